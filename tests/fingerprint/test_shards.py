"""Tensor-parallel groups from one rank on one GPU: the profile's driver, times with modelled sums, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.depth_tied_plan import DepthTiedPlan
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import EngineError, InfeasibleError
from fingerprint.estimates import Source
from fingerprint.estimators.all_reduce import GroupSums
from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.l2 import L2
from fingerprint.estimators.l2_device import L2Device
from fingerprint.estimators.l3 import L3
from fingerprint.estimators.m2 import M2
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import Profile, RankMemory
from tests.fingerprint.estimator_conformance import EstimatorConformance
from tests.fingerprint.step_timed_machine import (
    PLAN,
    StepTimedMachine,
    StepTimedSyntheticSession,
    StepTruth,
    llama_7b,
    schedule,
)
from tests.golden_words import Golden

TP2 = DeploymentConfig(tp=2, engine="vllm")
ALONE = DeploymentConfig(engine="vllm")


class RankSession(StepTimedSyntheticSession):
    """A worker on which a rank's shape may be loaded with tp = 1: the path says of how many ranks it is."""

    ranks = 1

    def load(self, checkpoint: Path, **order: Any) -> None:
        super().load(checkpoint, **order)
        assert self.loaded is not None
        self.ranks = int(checkpoint.parent.name.removeprefix("tp"))
        assert self.tp == 1 or self.ranks == 1, "a rank's shape is never divided again"
        self.loaded = self.loaded._replace(tp=self.tp * self.ranks)

    def memory(self) -> tuple[RankMemory, ...]:
        if self.ranks == 1:
            return super().memory()
        self.tp = self.ranks
        try:
            held = super().memory()
        finally:
            self.tp = 1
        return tuple(replace(rank, rank=rank.stage) for rank in held if rank.rank % self.ranks == 0)


class RankMachine(StepTimedMachine):
    """Knows the shapes of ranks."""

    def open(self, *, tp: int, pp: int, expert_parallel: bool = False) -> RankSession:
        super().open(tp=tp, pp=pp)
        self.sessions[-1] = RankSession(self, tp, pp)
        return self.sessions[-1]

    def shape(self, layers: int, tp: int = 1) -> Path:
        return Path(f"/fingerprints/tp{tp}/{layers}")


def take(machine: RankMachine, plan: DepthTiedPlan = PLAN, family: str = "llama", **changes: Any) -> Profile:
    return _measure(machine, replace(plan, **changes), family)


def _measure(machine: RankMachine, plan: DepthTiedPlan, family: str = "llama", **options: Any) -> Profile:
    return depth_tied_profile(
        "synthetic",
        replace(machine.spec, family=family),
        machine,
        machine.shape,
        plan,
        num_gpus=machine.num_devices,
        clock=machine.clock,
        **options,
    )


def estimator_of(profile: Profile) -> DepthTiedEstimator:
    return DepthTiedEstimator(profile, RooflineEstimator(profile.spec, profile.machine.device), Calibration())


@pytest.fixture(scope="module")
def sharded() -> Profile:
    return take(RankMachine(num_devices=1), degrees=((1, 1), (2, 1)))


class TestDriver:
    def test_what_there_are_gpus_for_runs_whole_and_the_rest_as_one_rank(self, golden: Golden) -> None:
        machine = RankMachine(num_devices=2)
        profile = take(machine, degrees=((1, 1), (2, 1), (1, 2), (4, 1), (2, 2)))
        assert {(p.tp, p.pp, p.shard) for p in profile.timing} == {
            (1, 1, False),
            (2, 1, False),
            (1, 2, False),
            (4, 1, True),
            (2, 2, True),
        }
        assert {(p.tp, p.pp, p.shard) for p in profile.memory} == {(p.tp, p.pp, p.shard) for p in profile.timing}
        opened = [entry[1:] for entry in machine.log if entry[0] == "open"]
        assert opened == [(1, 1), (2, 1), (1, 2), (1, 1), (1, 2)]
        assert all(session.closed for session in machine.sessions)
        golden("fingerprint", profile.notes)
        assert profile.complete

    def test_without_need_nothing_is_a_shard(self) -> None:
        profile = take(RankMachine(num_devices=2), degrees=((1, 1), (2, 1)))
        assert not any(point.shard for point in (*profile.timing, *profile.memory))
        assert profile.notes == ()

    def test_stages_need_their_gpus_and_families_a_head_dim(self, golden: Golden) -> None:
        profile = take(RankMachine(num_devices=1), family="gptj", degrees=((1, 1), (2, 1), (1, 2)))
        assert {(p.tp, p.pp) for p in profile.timing} == {(1, 1)}
        golden("fingerprint", [note.partition(":")[0] for note in profile.notes])
        golden("fingerprint", profile.notes[0])
        golden("fingerprint", profile.notes[1])
        assert not profile.complete

    def test_where_neither_works_it_says_why(self, golden: Golden) -> None:
        with golden.raises("fingerprint", InfeasibleError):
            take(RankMachine(num_devices=1), degrees=((1, 2),))

    def test_a_rank_that_fails_is_noted_and_the_rest_is_kept(self, golden: Golden) -> None:
        def broken(cut: Any, *_: int) -> EngineError | None:
            return EngineError("no kernel for 4 heads") if cut.tp == 1 and machine.sessions[1:] else None

        machine = RankMachine(num_devices=1, broken=broken)
        profile = take(machine, degrees=((1, 1), (2, 1)))
        assert {(p.tp, p.pp) for p in profile.timing} == {(1, 1)}
        golden("fingerprint", profile.notes)
        assert not profile.complete

    def test_the_first_failure_is_raised_when_nothing_is_left(self) -> None:
        machine = RankMachine(num_devices=1, refuses_to_open=lambda *_: EngineError("no driver"))
        with pytest.raises(EngineError, match="no driver"):
            take(machine, degrees=((1, 1), (2, 1)))

    def test_the_budget_is_of_all_together(self, golden: Golden) -> None:
        alone = take(RankMachine(num_devices=1), degrees=((1, 1),))
        both = take(RankMachine(num_devices=1), degrees=((1, 1), (2, 1)), budget_s=alone.spent_s * 0.9)
        assert both.budget_s == alone.spent_s * 0.9
        assert both.spent_s <= alone.spent_s * 1.1
        assert not both.complete
        least = take(RankMachine(num_devices=1), degrees=((1, 1), (2, 1)), budget_s=1e-3)
        assert {(p.tp, p.shard) for p in least.timing} == {(1, False)}
        golden("fingerprint", least.notes[-1])

    def test_a_rank_is_asked_about_with_all_that_was_measured_and_left_out_without_a_start(
        self, golden: Golden
    ) -> None:
        formats = (WeightFormat.BITS16, WeightFormat.FP8)
        asked: list[tuple[DeploymentConfig, set[WeightFormat]]] = []

        def needless(config: DeploymentConfig, so_far: Profile) -> str | None:
            asked.append((config, {point.weights for point in so_far.timing}))
            return "16 bits would do" if config == replace(TP2, weights=WeightFormat.FP8) else None

        machine = RankMachine(num_devices=1)
        plan = replace(PLAN, degrees=((1, 1), (2, 1)), weights=formats)
        profile = _measure(machine, plan, needless=needless)
        fp8 = replace(TP2, weights=WeightFormat.FP8)
        assert asked == [
            (replace(ALONE, weights=WeightFormat.FP8), {WeightFormat.BITS16}),
            (TP2, set(formats)),
            (fp8, set(formats)),
        ]
        assert {(p.tp, p.weights) for p in profile.timing if p.shard} == {(2, WeightFormat.BITS16)}
        golden("fingerprint", profile.notes[-1])
        assert profile.complete

    def test_it_travels_as_json(self, sharded: Profile) -> None:
        assert from_json(to_json(sharded), Profile) == sharded


class TestTimes:
    def test_the_sums_of_llama_2_7b_on_two_h200(self) -> None:
        """64 sums of 128 x 4096 x 2 bytes: 21.8 us and 1 MiB over 58.6% of 450 GB/s each."""
        sums = GroupSums(llama_7b(), gpu_spec("h200"), 2)
        assert sums.step_s(128) == pytest.approx(64 * (21.8e-6 + 2**20 / (0.586 * 450e9)))
        assert sums.prompts_s(256, 2) == pytest.approx(2 * sums.step_s(128))

    @pytest.mark.parametrize("num_layers", [31, 32])
    def test_a_group_takes_its_rank_s_time_and_the_sums_of_every_layer_once(self, num_layers: int) -> None:
        """Whatever divides the depth: two sums for each of the N layers in every step."""
        machine = RankMachine(spec=llama_7b(num_layers), num_devices=1)
        profile = take(machine, degrees=((2, 1),))
        strategy = L3(profile, RooflineEstimator(profile.spec, profile.machine.device), Calibration())
        sums = GroupSums(profile.spec, profile.machine.device, 2)
        (points,) = strategy.points.values()
        assert {(p.batch, p.input_tokens) for p in points} == set(PLAN.points)
        for point in points:
            at = (point.batch, point.input_tokens)
            steps = schedule(*at, 1, machine.truth.max_batched_tokens)
            of_prompts = sum(sums.step_s(step.prefill_tokens) for step in steps if step.prefill_tokens)
            assert point.ttft_s == pytest.approx(machine.ttft_s(*at, tp=2) + of_prompts, rel=1e-3)
            assert point.tpot_s(33) == pytest.approx(
                machine.tpot_s(*at, 33, tp=2) + sums.step_s(point.batch), rel=0.03
            )

    def test_they_say_that_they_are_of_a_shard_and_are_less_sure(self, sharded: Profile) -> None:
        estimator, at = estimator_of(sharded), Workload(8, 1024, 33)
        alone, group = estimator.estimate(ALONE, at), estimator.estimate(TP2, at)
        assert alone.ttft_s.source is alone.memory.source is Source.EXTRAPOLATED
        assert {group.ttft_s.source, group.tpot_s.source, group.memory.source} == {Source.SHARDED}
        for sure, unsure in ((alone.ttft_s, group.ttft_s), (alone.tpot_s, group.tpot_s)):
            assert math.log(unsure.high / unsure.low) > math.log(sure.high / sure.low)

    @given(share=st.floats(1e-6, 1.0))
    def test_the_interval_holds_half_and_twice_the_sums(self, share: float) -> None:
        below, above = GroupSums(llama_7b(), gpu_spec("h200"), 2).log_errors(share, 1.0)
        assert math.exp(-below) <= 1 - share / 2 + 1e-12
        assert math.exp(above) >= 1 + share - 1e-12
        assert min(below, above) >= 0.1

    def test_a_real_group_comes_before_a_rank_alone(self, sharded: Profile) -> None:
        real = take(RankMachine(num_devices=2, truth=StepTruth(tp_time=0.9)), degrees=((2, 1),))
        both = replace(sharded, timing=(*sharded.timing, *real.timing), memory=(*sharded.memory, *real.memory))
        workload = Workload(8, 1024, 33)
        found, expected = (estimator_of(profile).estimate(TP2, workload) for profile in (both, real))
        assert found.ttft_s.source is found.memory.source is Source.EXTRAPOLATED
        assert (found.ttft_s, found.tpot_s, found.memory) == (expected.ttft_s, expected.tpot_s, expected.memory)

    def test_what_is_scaled_from_a_rank_is_called_scaled(self, sharded: Profile) -> None:
        found = estimator_of(sharded).estimate(replace(TP2, tp=4), Workload(8, 1024, 33))
        assert found.ttft_s.source is found.memory.source is Source.SCALED


class TestMemory:
    def test_weights_and_kv_of_a_rank_are_the_group_s(self, sharded: Profile) -> None:
        """Llama-2-7B on two GPUs: half of each layer's matrices and both norms; half of the KV heads."""
        memory = CountedMemory(sharded).memory(TP2, Workload(8, 1024, 33))
        matrices, norms = 4 * 4096**2 + 3 * 4096 * 11008, 2 * 4096
        rounded_up = 2**20  # the allocator makes 44 MiB of the 43 of half of the MLP's last matrix
        assert memory.layer_weight_bytes == 2 * (matrices // 2 + norms) + rounded_up
        assert memory.layer_kv_bytes == 2 * 16 * 128 * 2 * 8 * (1024 + 33)
        ends = memory.first_stage_bytes + memory.last_stage_bytes
        assert ends == pytest.approx(2 * (2 * 32_000 * 4096 // 2), abs=60 * 2**20)  # the allocator's steps

    def test_a_group_s_buffers_are_assumed_and_doubted(self, sharded: Profile) -> None:
        """The buffers are 768 MiB in addition to what the rank alone held, half of it as error."""
        counted = CountedMemory(sharded)
        alone, group = (counted.memory(config, Workload()) for config in (ALONE, TP2))
        assert group.runtime_bytes == alone.runtime_bytes + 768 * 2**20
        held = group.per_gpu_bytes((32,))
        assert group.relative_error == pytest.approx(0.01 + 384 * 2**20 / held)

    def test_blocks_are_fewer_by_the_buffers(self, sharded: Profile) -> None:
        """A block of one layer is 16 tokens x 2 x 16 heads x 128 x 2 bytes = 131,072 bytes; 32 layers of them."""
        counted, real = CountedMemory(sharded), take(RankMachine(num_devices=2), degrees=((1, 1), (2, 1)))
        blocks = counted.kv_blocks(TP2, 100 * 2**30)
        assert CountedMemory(real).kv_blocks(TP2, 100 * 2**30) - blocks == pytest.approx(
            768 * 2**20 / (32 * 131_072), abs=1
        )


def test_other_strategies_do_not_take_a_rank_for_a_group(sharded: Profile) -> None:
    """Other strategies add no sums; of a profile with plain points they see tp = 1 alone."""
    profile = take(RankMachine(num_devices=1), degrees=((1, 1), (2, 1)), plain_points=((1, 128), (8, 1024)))
    assert {key.tp for key in L2(profile).fits} == {key.tp for key in L2Device(profile).fits} == {1}
    assert {tp for _, tp, _ in M2(profile).measured} == {1}


class TestDepthTiedOfShards(EstimatorConformance):
    configs = (ALONE, TP2, replace(TP2, tp=4), replace(TP2, pp=2))

    @pytest.fixture
    def estimator(self, sharded: Profile) -> DepthTiedEstimator:
        return estimator_of(sharded)
