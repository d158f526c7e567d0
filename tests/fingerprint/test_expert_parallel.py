"""Expert parallelism is predicted where it was measured, and nothing else is predicted from it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import InfeasibleError, NotMeasuredError
from fingerprint.estimates import Source
from fingerprint.estimators.calibration import Calibration, MeasuredError
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.fingerprinted import FingerprintedEstimator, nearest
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import MeasuredKey, Profile
from fingerprint.verification import Reading, Verification
from tests.fingerprint.mixture_machine import MixtureMachine, mixture
from tests.fingerprint.step_timed_machine import PLAN, take_depth_tied
from tests.golden_words import Golden

TP2 = DeploymentConfig(tp=2, engine="vllm")
EP2 = replace(TP2, expert_parallel=True)
AT = Workload(8, 1024, 33)
MIXTURES = "16bit experts"


@cache
def taken(*, expert_parallel: bool, tp: int = 2) -> Profile:
    machine = MixtureMachine(num_devices=4)
    return take_depth_tied(machine, degrees=((tp, 1),), expert_parallel=expert_parallel)


@cache
def whole(*, with_experts: bool) -> Profile:
    """Return the profile of one and two GPUs, with the latter's expert parallelism or without."""
    parts = [taken(expert_parallel=False, tp=1), taken(expert_parallel=False)]
    parts += [taken(expert_parallel=True)] * with_experts
    return replace(
        parts[0],
        timing=tuple(point for part in parts for point in part.timing),
        memory=tuple(point for part in parts for point in part.memory),
    )


def estimator(profile: Profile, *errors: MeasuredError) -> DepthTiedEstimator:
    roofline = RooflineEstimator(profile.spec, profile.machine.device)
    return DepthTiedEstimator(profile, roofline, Calibration(errors))


class TestMeasuring:
    def test_a_plan_with_it_has_every_point_run_with_it(self) -> None:
        machine = MixtureMachine()
        profile = take_depth_tied(machine, degrees=((2, 1),), expert_parallel=True)
        assert [entry for entry in machine.log if entry[0] == "open"] == [("open", 2, 1, "experts")]
        points = (*profile.timing, *profile.memory)
        assert {point.key for point in points} == {
            MeasuredKey(2, 1, WeightFormat.BITS16, KvFormat.BITS16, expert_parallel=True)
        }
        assert {point.key.config("vllm") for point in points} == {EP2}

    def test_one_rank_alone_is_none_of_it(self) -> None:
        """A rank's shape has a part of each expert."""
        machine = MixtureMachine(num_devices=1)
        plan = replace(PLAN, degrees=((2, 1),), expert_parallel=True)
        with pytest.raises(InfeasibleError):
            depth_tied_profile("m", machine.spec, machine, machine.fingerprint, plan, num_gpus=1)
        assert not [entry for entry in machine.log if entry[0] == "load"]


class TestEstimates:
    def test_it_is_what_was_measured_with_it(self) -> None:
        found = estimator(whole(with_experts=True)).estimate(EP2, AT)
        machine = MixtureMachine()
        machine.open(tp=2, pp=1, expert_parallel=True)
        assert found.tpot_s.value == pytest.approx(machine.tpot_s(8, 1024, 33, tp=2), rel=0.01)
        assert found.ttft_s.value == pytest.approx(machine.ttft_s(8, 1024, tp=2), rel=0.01)
        assert (found.config, found.measured_config, found.tpot_s.source) == (EP2, EP2, Source.EXTRAPOLATED)
        assert found.is_measured

    def test_each_gpu_holds_as_much_as_of_divided_matrices(self) -> None:
        found = estimator(whole(with_experts=True))
        assert found.estimate(EP2, AT).memory == found.estimate(TP2, AT).memory

    @pytest.mark.parametrize(
        "config",
        [
            pytest.param(
                DeploymentConfig(tp=tp, pp=pp, kv=kv, weights=weights, engine="vllm"), id=f"{tp}-{pp}-{kv}"
            )
            for tp, pp, kv, weights in (
                (1, 1, KvFormat.BITS16, WeightFormat.BITS16),
                (2, 1, KvFormat.BITS16, WeightFormat.BITS16),
                (4, 1, KvFormat.BITS16, WeightFormat.FP8),
                (2, 2, KvFormat.FP8, WeightFormat.BITS16),
            )
        ],
    )
    def test_everything_else_is_as_if_it_had_not_been_measured(self, config: DeploymentConfig) -> None:
        without, with_it = (estimator(whole(with_experts=one)) for one in (False, True))
        assert with_it.estimate(config, AT) == without.estimate(config, AT)
        assert with_it.steady_state(config) == without.steady_state(config)

    def test_where_the_rest_was_not_measured_nothing_is_scaled_from_it(self) -> None:
        alone = estimator(taken(expert_parallel=True))
        assert alone.estimate(EP2, AT).is_measured
        with pytest.raises(NotMeasuredError):
            alone.estimate(TP2, AT)

    def test_it_is_not_scaled_from_anything(self, golden: Golden) -> None:
        measured = estimator(whole(with_experts=True))
        for config in (
            replace(EP2, tp=4),
            replace(EP2, pp=2),
            replace(EP2, weights=WeightFormat.FP8),
            replace(EP2, kv=KvFormat.FP8),
        ):
            with pytest.raises(NotMeasuredError):
                measured.estimate(config, AT)
            with pytest.raises(NotMeasuredError) as refused:
                nearest(config, [EP2, TP2, replace(config, expert_parallel=False)])
            golden("fingerprint", str(refused.value))
        with pytest.raises(NotMeasuredError):
            estimator(whole(with_experts=False)).estimate(EP2, AT)

    @pytest.mark.parametrize("config", [TP2, replace(TP2, tp=4)], ids=str)
    def test_the_rest_is_scaled_from_farther_away_and_not_from_it(self, config: DeploymentConfig) -> None:
        one = taken(expert_parallel=False, tp=1)
        both = replace(
            one,
            timing=one.timing + taken(expert_parallel=True).timing,
            memory=one.memory + taken(expert_parallel=True).memory,
        )
        assert estimator(both).estimate(EP2, AT).is_measured
        assert estimator(both).estimate(config, AT) == estimator(one).estimate(config, AT)

    def test_an_engine_without_step_timer_has_none(self) -> None:
        """A release that iServe does not know is profiled by the wall clock, without it."""
        profile = whole(with_experts=False)
        roofline = RooflineEstimator(profile.spec, profile.machine.device)
        with pytest.raises(NotMeasuredError):
            FingerprintedEstimator(profile, roofline, memory="counted").estimate(EP2, AT)

    def test_datasheets_do_not_tell(self, golden: Golden) -> None:
        machine = MixtureMachine().machine()
        with pytest.raises(NotMeasuredError) as refused:
            RooflineEstimator(mixture(), machine.device).estimate(EP2, AT)
        golden("fingerprint", str(refused.value))


class TestErrors:
    @pytest.mark.parametrize("expert_parallel", [False, True])
    def test_errors_are_of_their_own_kind(self, expert_parallel: bool) -> None:
        """Two models erred by a tenth with it, and by a fifth without."""
        errors = tuple(
            MeasuredError(
                model=model,
                shape_hash=model,
                engine="vllm 0.24.0",
                gpu="h200-sxm",
                weights=MIXTURES,
                tp=2,
                pp=1,
                metric="tpot",
                batch=8,
                input_tokens=1024,
                log_error=0.1 if kind else 0.2,
                expert_parallel=kind,
            )
            for model in ("a", "b")
            for kind in (False, True)
        )
        profile, config = whole(with_experts=True), replace(TP2, expert_parallel=expert_parallel)
        own = tuple(one for one in errors if one.expert_parallel is expert_parallel)
        others = tuple(one for one in errors if one not in own)
        found, alone, unknown = (
            estimator(profile, *known).estimate(config, AT) for known in (errors, own, others)
        )
        assert found == alone
        assert unknown.tpot_s == estimator(profile).estimate(config, AT).tpot_s
        assert found.tpot_s != unknown.tpot_s


def checked(config: DeploymentConfig, times: float, profile: Profile) -> Verification:
    """Return a check in which everything took ``times`` as long as predicted."""
    found = estimator(profile).estimate(config, AT)

    def reading(value: float) -> Reading:
        return Reading(value=times * value, low=0.99 * times * value, high=1.01 * times * value, repeats=3)

    return Verification(
        config=config,
        workload=AT,
        launch_workload=AT,
        layers_per_stage=(profile.spec.num_layers,),
        measured_at="2026-11-30T05:00:00+00:00",
        ttft_s=reading(found.ttft_s.value),
        tpot_s=reading(found.tpot_s.value),
        memory_bytes_per_gpu=None,
        kv_tokens=None,
    )


class TestChecks:
    @pytest.mark.parametrize(("one", "other"), [(EP2, TP2), (TP2, EP2)], ids=["with", "without"])
    def test_a_check_corrects_its_own_kind_alone(self, one: DeploymentConfig, other: DeploymentConfig) -> None:
        profile = whole(with_experts=True)
        corrected = CorrectedEstimator(estimator(profile), [checked(one, 1.3, profile)])
        plain = estimator(profile)
        assert corrected.estimate(other, AT) == plain.estimate(other, AT)
        assert corrected.estimate(one, AT).tpot_s.value == pytest.approx(
            1.3 * plain.estimate(one, AT).tpot_s.value
        )

    def test_a_check_of_what_the_profile_lacks_corrects_nothing(self) -> None:
        known, lacking = (whole(with_experts=one) for one in (True, False))
        corrected = CorrectedEstimator(estimator(lacking), [checked(EP2, 1.3, known)])
        assert corrected.warnings == ()
        assert corrected.estimate(TP2, AT) == estimator(lacking).estimate(TP2, AT)
