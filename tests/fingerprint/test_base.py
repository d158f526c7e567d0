"""The paper's other strategies (L1, M1, M3) and L2 on the device's time, on machines whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload, even_split
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Source
from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.l1 import L1
from fingerprint.estimators.l2 import L2
from fingerprint.estimators.l2_device import L2Device
from fingerprint.estimators.l3 import L3
from fingerprint.estimators.m1 import M1
from fingerprint.estimators.m2 import M2
from fingerprint.estimators.m2_blocks import M2Blocks
from fingerprint.estimators.m3 import M3
from fingerprint.estimators.registry import Predicts, estimator_names
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import Profile, RunReading, StepReading, TimingPoint
from fingerprint.profile import ProfilePlan
from tests.fingerprint.estimator_conformance import EstimatorConformance
from tests.fingerprint.step_timed_machine import StepTimedMachine, StepTruth, take_depth_tied
from tests.fingerprint.strategy_conformance import NEVER_RUN, LatencyStrategyConformance, MemoryStrategyConformance
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, Truth, llama, take_profile
from tests.golden_words import Golden

BITS16, INT8 = WeightFormat.BITS16, WeightFormat.INT8
VLLM = DeploymentConfig(engine="vllm")
PLAN = ProfilePlan(
    budget_s=1e6, min_repeats=3, max_repeats=3, degrees=((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
)
FINGERPRINTS = replace(PLAN, degrees=((1, 1), (2, 1), (1, 2)))


def whole_model(machine: SyntheticMachine) -> Profile:
    """Return what :func:`take_profile` measures of fingerprints, of the whole model."""
    return take_profile(machine, replace(FINGERPRINTS, whole=True))


@pytest.fixture(scope="module")
def whole() -> Profile:
    return whole_model(SyntheticMachine())


@pytest.fixture(scope="module")
def everywhere() -> Profile:
    """Fingerprints under every configuration of the plan."""
    return take_profile(SyntheticMachine(num_devices=4), PLAN)


@pytest.fixture(scope="module")
def fingerprints() -> Profile:
    return take_profile(SyntheticMachine(), FINGERPRINTS)


@pytest.fixture(scope="module")
def plain() -> Profile:
    return take_depth_tied(StepTimedMachine(), plain_points=((1, 128), (8, 1024)))


class TestL1(LatencyStrategyConformance):
    refused = (*NEVER_RUN, DeploymentConfig(tp=4), DeploymentConfig(tp=4, pp=2))

    @pytest.fixture
    def strategy(self, whole: Profile) -> L1:
        return L1(whole)

    @pytest.mark.parametrize("workload", [Workload(1, 128, 17), Workload(4, 512, 9), Workload(2, 512, 30)])
    @pytest.mark.parametrize("tp", [1, 2])
    def test_the_whole_model_is_what_was_run(self, strategy: L1, tp: int, workload: Workload) -> None:
        truth, (b, n, m) = Truth(), (workload.batch, workload.input_tokens, workload.output_tokens)
        latency = strategy.latency(DeploymentConfig(tp=tp), workload)
        assert latency.ttft_s.value == pytest.approx(truth.ttft_s(32, b, n, tp=tp))
        assert latency.tpot_s.value == pytest.approx(truth.tpot_s(32, b, n, m, tp=tp))

    def test_what_was_run_is_called_measured_and_other_points_are_not(self, strategy: L1) -> None:
        assert strategy.latency(DeploymentConfig(), Workload(4, 512, 17)).tpot_s.source is Source.MEASURED
        assert strategy.latency(DeploymentConfig(), Workload(2, 512, 17)).tpot_s.source is Source.EXTRAPOLATED

    @pytest.mark.parametrize("pp", [2, 4, 8])
    def test_at_batch_one_more_stages_take_what_one_does(self, strategy: L1, pp: int) -> None:
        """So it misses the hand-overs, 2 ms and 1 us a token each on this machine."""
        workload = Workload(1, 128, 17)
        alone, staged = (strategy.latency(DeploymentConfig(pp=p), workload) for p in (1, pp))
        assert staged.ttft_s.value == alone.ttft_s.value
        assert staged.tpot_s.value == alone.tpot_s.value
        assert staged.ttft_s.source is Source.EXTRAPOLATED
        assert staged.ttft_s.value < Truth().ttft_s(32, 1, 128, pp=pp)

    def test_batches_through_stages_are_refused(self, strategy: L1) -> None:
        with pytest.raises(NotMeasuredError, match="batch 1 only"):
            strategy.latency(DeploymentConfig(pp=2), Workload(4, 512, 17))

    def test_fingerprints_are_not_looked_at(self) -> None:
        assert not L1(take_profile(SyntheticMachine(), FINGERPRINTS)).fits


class TestM1(MemoryStrategyConformance):
    reached = (DeploymentConfig(), DeploymentConfig(tp=4), DeploymentConfig(pp=4), DeploymentConfig(tp=2, pp=2))

    @pytest.fixture
    def strategy(self, whole: Profile) -> M1:
        return M1(whole)

    @pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2)])
    def test_the_equations_hold_for_totals(self, tp: int, pp: int) -> None:
        """(4, 1) and (8, 1) were never loaded. Whole replicas: what a layer is does not matter."""
        spec, truth = llama(num_kv_heads=8), Truth()
        config, workload = DeploymentConfig(tp=tp, pp=pp), Workload(4, 512, 1)
        memory = M1(whole_model(SyntheticMachine(spec=spec))).memory(config, workload)
        split = even_split(32, pp)
        for index, layers in enumerate(split):
            stage = memory.stage(index, layers)
            true = truth.weights_bytes(layers, tp=tp, first=index == 0, last=index == pp - 1)
            assert stage.weights_bytes == pytest.approx(true, abs=64)
            assert stage.activation_bytes == pytest.approx(truth.activation_bytes(2048, tp=tp), abs=2)
            assert stage.runtime_bytes == truth.runtime_bytes

    def test_unequal_stages_are_not_looked_at(self, whole: Profile) -> None:
        unequal = tuple(replace(point, num_layers=31) for point in whole.memory)
        profile = replace(whole, spec=llama(31), memory=unequal)
        with pytest.raises(NotMeasuredError, match="pp above 1"):
            M1(profile).memory(DeploymentConfig(pp=2), Workload())

    def test_fingerprints_are_not_looked_at(self) -> None:
        with pytest.raises(NotMeasuredError):
            M1(take_profile(SyntheticMachine(), FINGERPRINTS)).memory(DeploymentConfig(), Workload())


class TestM3(MemoryStrategyConformance):
    reached = tuple(DeploymentConfig(tp=tp, pp=pp) for tp, pp in PLAN.degrees)
    refused = (*NEVER_RUN, DeploymentConfig(tp=8), DeploymentConfig(pp=3), DeploymentConfig(tp=4, pp=2))

    @pytest.fixture
    def strategy(self, everywhere: Profile) -> M3:
        return M3(everywhere)

    @settings(max_examples=20, deadline=None)
    @given(
        layer_split=st.integers(10_000, 10**9),
        layer_whole=st.integers(0, 10**6),
        embedding=st.integers(1_000, 10**9),
        head=st.integers(1_000, 10**9),
        degree=st.sampled_from(PLAN.degrees),
    )
    def test_every_stage_is_right_whatever_tp_divides(
        self, layer_split: int, layer_whole: int, embedding: int, head: int, degree: tuple[int, int]
    ) -> None:
        """M2 must guess whether embedding or head is divided when they are of one size; M3 has loaded it."""
        truth = Truth(
            layer_split_bytes=layer_split,
            layer_whole_bytes=layer_whole,
            embedding_bytes=embedding,
            head_split_bytes=head,
        )
        tp, pp = degree
        plan = replace(PLAN, degrees=(degree,), min_repeats=1, max_repeats=1)
        profile = take_profile(SyntheticMachine(truth=truth, num_devices=4), plan)
        memory = M3(profile).memory(DeploymentConfig(tp=tp, pp=pp), Workload(1, 512, 1))
        for index, layers in enumerate(even_split(32, pp)):
            true = truth.weights_bytes(layers, tp=tp, first=index == 0, last=index == pp - 1)
            assert memory.stage(index, layers).weights_bytes == pytest.approx(true, abs=3 * 32)

    def test_a_format_that_was_not_loaded_there_is_refused_though_m2_borrows_it(self) -> None:
        plan = replace(FINGERPRINTS, weights=(BITS16, INT8))
        profile = take_profile(SyntheticMachine(), plan)
        lacking = [p for p in profile.memory if (p.weights, p.tp) != (INT8, 2)]
        profile, config = replace(profile, memory=tuple(lacking)), DeploymentConfig(tp=2, weights=INT8)
        assert M2(profile).memory(config, Workload()).source is Source.SCALED
        with pytest.raises(NotMeasuredError, match="M3 needs"):
            M3(profile).memory(config, Workload())


class TestM2Blocks(MemoryStrategyConformance):
    reached = (DeploymentConfig(), DeploymentConfig(tp=4), DeploymentConfig(pp=4), DeploymentConfig(tp=2, pp=2))

    @pytest.fixture
    def strategy(self, fingerprints: Profile) -> M2Blocks:
        return M2Blocks(fingerprints)

    @pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
    @pytest.mark.parametrize("workload", [Workload(1, 128, 17), Workload(4, 512, 17)])
    def test_an_even_split_adds_up_to_m2_and_any_split_is_its_layers(
        self, strategy: M2Blocks, fingerprints: Profile, tp: int, pp: int, workload: Workload
    ) -> None:
        config = DeploymentConfig(tp=tp, pp=pp)
        parts, blocks = M2(fingerprints).memory(config, workload), strategy.memory(config, workload)
        even = even_split(32, pp)
        assert blocks.total_bytes(even) == pytest.approx(parts.total_bytes(even), abs=32 * tp)
        for layers in (1, 5, 31):
            assert blocks.stage(0, layers).total_bytes == layers * blocks.stage(0, 1).total_bytes

    def test_it_says_too_little_of_the_fullest_gpu_where_one_stage_holds_an_end(self) -> None:
        """A plan is not made by it for this reason: an embedding of 40 layers on the first of two GPUs."""
        machine = SyntheticMachine(truth=Truth(embedding_bytes=40_000_000))
        profile = take_profile(machine, FINGERPRINTS)
        config, workload = DeploymentConfig(pp=2), Workload(1, 128, 17)
        split = even_split(32, 2)
        true = M2(profile).memory(config, workload).per_gpu_bytes(split)
        assert M2Blocks(profile).memory(config, workload).per_gpu_bytes(split) < true - 15_000_000


class TestL2(LatencyStrategyConformance):
    reached = (DeploymentConfig(), DeploymentConfig(tp=2), DeploymentConfig(pp=2))

    @pytest.fixture
    def strategy(self, everywhere: Profile) -> L2:
        return L2(everywhere)

    def test_repeated_forwards_are_not_taken_for_fingerprints(self) -> None:
        assert not L2(take_depth_tied(StepTimedMachine())).fits


class TestM2(MemoryStrategyConformance):
    reached = (DeploymentConfig(), DeploymentConfig(tp=2), DeploymentConfig(pp=2), DeploymentConfig(tp=8, pp=4))

    @pytest.fixture
    def strategy(self, everywhere: Profile) -> M2:
        return M2(everywhere)


class TestCounted(MemoryStrategyConformance):
    reached = (VLLM,)
    refused = (replace(VLLM, tp=2), DeploymentConfig(), replace(VLLM, pruning=Pruning.WANDA))

    @pytest.fixture
    def strategy(self, plain: Profile) -> CountedMemory:
        return CountedMemory(plain)


def steps_of(forward_s: float, host_s: float, count: int, *, overlapped: bool) -> tuple[StepReading, ...]:
    """Decode steps of one sequence: the device waits for the host where it must."""
    rest = max(0.0, host_s - forward_s) if overlapped else host_s
    return tuple(
        StepReading(
            tokens=1, sequences=1, prefill_tokens=0, context_tokens=128 + i, attention_pairs=129 + i,
            gap_s=rest / 2, lead_s=rest / 2, forward_s=forward_s, tail_s=0.0,
        )
        for i in range(count)
    )  # fmt: skip


def fingerprints_of(once_s: float, layer_s: float, host_s: float, *, overlapped: bool, engine: str) -> Profile:
    """Return one and two layers of a 32-layer model, prompts of the same times as steps."""
    profile = take_depth_tied(StepTimedMachine())
    points = []
    for layers in (1, 2):
        forward_s = once_s + layers * layer_s
        prompt = StepReading(
            tokens=128, sequences=1, prefill_tokens=128, context_tokens=0, attention_pairs=128 * 129 // 2,
            gap_s=0.0, lead_s=0.0, forward_s=forward_s, tail_s=0.0,
        )  # fmt: skip
        for output in (1, 33):
            steps = (prompt, *steps_of(forward_s, host_s, output - 1, overlapped=overlapped))
            e2e_s = host_s + sum(step.cadence_s for step in steps)
            device_s = sum(step.forward_s for step in steps)
            run = RunReading(e2e_s=e2e_s, device_s=device_s, host_s=e2e_s - device_s, steps=steps)
            points.append(
                TimingPoint(
                    num_layers=layers, tp=1, pp=1, weights=BITS16, kv=KvFormat.BITS16,
                    batch=1, input_tokens=128, output_tokens=output, runs=(run, run),
                )
            )  # fmt: skip
    return replace(profile, timing=tuple(points), engine=engine)


class TestL2Device(LatencyStrategyConformance):
    reached = (VLLM,)
    refused = (replace(VLLM, tp=2), replace(VLLM, pp=2), replace(VLLM, pruning=Pruning.WANDA))
    workloads = (Workload(1, 128, 33), Workload(8, 1024, 33))

    @pytest.fixture
    def strategy(self, plain: Profile) -> L2Device:
        return L2Device(plain)

    def test_a_synchronous_engine_is_recovered(self) -> None:
        """On a machine that does one thing after the other, its whole model is the sum."""
        machine = StepTimedMachine(truth=StepTruth(max_batched_tokens=2048))
        profile = take_depth_tied(machine, plain_points=((1, 128), (8, 1024)))
        strategy = L2Device(profile, overlapped=False)
        for batch, n in ((1, 128), (8, 1024)):
            latency = strategy.latency(VLLM, Workload(batch, n, 33))
            assert latency.ttft_s.value == pytest.approx(machine.ttft_s(batch, n))
            if batch == 1:  # prompts of a batch run in chunks: the T(n) of a client mixes them with decode steps
                assert latency.tpot_s.value == pytest.approx(machine.tpot_s(batch, n, 33), rel=1e-6)

    @settings(max_examples=50, deadline=None)
    @given(*(st.floats(1e-5, 1e-2) for _ in range(3)), st.booleans())
    def test_host_and_device_are_composed_as_the_engine_does(
        self, once_s: float, layer_s: float, host_s: float, overlapped: bool
    ) -> None:
        """The whole model of 32 layers: the longer of both, or their sum; a first token always waits for both."""
        engine = "vllm" if overlapped else "torch"
        profile = fingerprints_of(once_s, layer_s, host_s, overlapped=overlapped, engine=engine)
        latency = L2Device(profile).latency(replace(VLLM, engine=engine), Workload(1, 128, 33))
        device_s = once_s + 32 * layer_s
        whole_s = max(device_s, host_s) if overlapped else device_s + host_s
        assert latency.tpot_s.value == pytest.approx(whole_s, rel=1e-6)
        assert latency.ttft_s.value == pytest.approx(device_s + host_s, rel=1e-6)

    def test_wall_clock_extrapolation_misses_what_the_host_hides(self) -> None:
        """The reason for this strategy: 2 ms of host hide 0.1 ms a layer, and the wall's clock sees none."""
        profile = fingerprints_of(0.0, 1e-4, 2e-3, overlapped=True, engine="vllm")
        on_the_wall = replace(
            profile,
            timing=tuple(
                replace(p, runs=tuple(replace(run, device_s=run.e2e_s, host_s=0.0) for run in p.runs))
                for p in profile.timing
            ),
        )
        workload = Workload(1, 128, 33)
        assert L2Device(profile).latency(VLLM, workload).tpot_s.value == pytest.approx(3.2e-3)
        assert L2(on_the_wall).latency(VLLM, workload).tpot_s.value == pytest.approx(2e-3)

    def test_points_that_were_not_run_are_refused_and_the_nearest_is_named(
        self, strategy: L2Device, golden: Golden
    ) -> None:
        (fit,) = strategy.fits.values()
        assert fit.reached == ((1, 128), (8, 1024))
        assert fit.nearest_workload(Workload(6, 900, 100)) == Workload(8, 1024, 33)
        with golden.raises("fingerprint", NotMeasuredError):
            strategy.latency(VLLM, Workload(2, 128, 33))

    def test_one_layer_is_told(self, strategy: L2Device) -> None:
        (effect,) = strategy.layer_effects
        assert (effect.batch, effect.input_tokens) == (8, 1024)
        assert 0 < effect.next_s.value < effect.first_s.value

    def test_runs_without_step_records_tell_nothing(self) -> None:
        assert not L2Device(take_profile(SyntheticMachine(), FINGERPRINTS)).fits


class TestL3(LatencyStrategyConformance):
    reached = (VLLM,)
    refused = (replace(VLLM, tp=2), replace(VLLM, pruning=Pruning.WANDA))

    @pytest.fixture
    def strategy(self, plain: Profile) -> L3:
        return L3(plain, RooflineEstimator(plain.spec, plain.machine.device), Calibration())


def test_every_registered_strategy_is_held_to_the_suite() -> None:
    suites = {
        Predicts.MEMORY: {
            "M1": TestM1,
            "M2": TestM2,
            "M2-blocks": TestM2Blocks,
            "M3": TestM3,
            "counted": TestCounted,
        },
        Predicts.LATENCY: {"L1": TestL1, "L2": TestL2, "L2-device": TestL2Device, "L3": TestL3},
    }
    for predicts, named in suites.items():
        assert tuple(sorted(named)) == estimator_names(predicts)
        assert all(suite.predicts is predicts for suite in named.values())


@pytest.mark.parametrize(("memory", "latency"), [("M1", "L1"), ("M3", "L2"), ("M2", "L1")])
def test_the_estimator_takes_any_of_them(memory: str, latency: str, whole: Profile, everywhere: Profile) -> None:
    """Configurations that a strategy refuses are scaled from those that it reaches."""
    fingerprints = everywhere if "1" not in memory + latency else replace(everywhere, timing=whole.timing)
    profile = whole if memory == "M1" else fingerprints
    estimator = FingerprintedEstimator(
        profile, RooflineEstimator(profile.spec, CPU), memory=memory, latency=latency
    )
    for config in (DeploymentConfig(), DeploymentConfig(tp=4, pp=2), DeploymentConfig(weights=WeightFormat.INT4)):
        found = estimator.estimate(config, Workload(4, 512, 17))
        assert found.ttft_s.value > 0
        assert found.memory.layer_weight_bytes > 0
    assert estimator.estimate(DeploymentConfig(tp=8), Workload()).ttft_s.source is Source.SCALED


class TestFingerprintedOfWholeModels(EstimatorConformance):
    """M1 and L1 behind the estimator's own laws."""

    @pytest.fixture
    def estimator(self, whole: Profile) -> FingerprintedEstimator:
        return FingerprintedEstimator(whole, RooflineEstimator(whole.spec, CPU), memory="M1", latency="L1")

    def test_it_is_registered_under_its_name(self, estimator: FingerprintedEstimator) -> None:
        assert (estimator.memory.name, estimator.latency.name) == ("M1", "L1")
