"""Models whose layers look back differently: cuts that tell each kind, and the whole model from them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.estimates import Source
from fingerprint.estimators.l2 import L2
from fingerprint.estimators.m2 import M2
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfilePlan
from fingerprint.profile_plan import fingerprint_cuts
from fingerprint.weight_bytes import kv_tokens_per_layer
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, Truth, llama, take_profile
from tests.golden_words import Golden

WINDOWS = (200, 200, 200, 200, 200, None) * 4  # as Gemma 3's, on both sides of the prompts that are run
BY_TURNS = (64, None) * 12  # as GPT-OSS's, shorter than any
THREE = (64, None, 300) * 6
FULL_FIRST = (None,) * 3 + (64,) * 9  # as Qwen 2's
LLAMA = llama(24)
PLAN = ProfilePlan(budget_s=1e6, max_repeats=5)
windows_of_models = st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=30).map(tuple)


def spec_of(windows: tuple[int | None, ...]) -> ModelSpec:
    several = len(set(windows)) > 1
    alike = {"layer_windows": windows} if several else {"sliding_window": windows[0]}
    return llama(len(windows), **alike)


def of_kinds(windows: tuple[int | None, ...]) -> SyntheticMachine:
    return SyntheticMachine(spec_of(windows), Truth())


@pytest.fixture(
    scope="module", params=[WINDOWS, BY_TURNS, THREE, FULL_FIRST], ids=["5:1", "1:1", "three", "blocks"]
)
def measured(request: pytest.FixtureRequest) -> tuple[SyntheticMachine, Profile]:
    machine = of_kinds(request.param)
    return machine, take_profile(machine, replace(PLAN, weights=(WeightFormat.BITS16, WeightFormat.INT8)))


class TestCuts:
    @given(windows_of_models, st.integers(1, 4))
    def test_they_tell_every_layer_and_what_is_beside_them(self, windows: tuple[int | None, ...], pp: int) -> None:
        """The whole model is a sum of cuts, wherever the model has enough layers of each kind."""
        spec = spec_of(windows)
        cuts = fingerprint_cuts(spec, pp)
        for cut in cuts:
            assert list(cut) == sorted(set(cut))
            assert len(cut) in (pp, 2 * pp)
        kinds = [kind.window for kind in spec.kinds]
        counted = [[1, *([windows[layer] for layer in cut].count(kind) for kind in kinds)] for cut in cuts]
        whole = [1, *(kind.count for kind in spec.kinds)]
        if len(cuts) == 1 + len(kinds):
            found, *_ = np.linalg.lstsq(np.array(counted, dtype=float).T, np.array(whole, dtype=float), rcond=None)
            assert np.array(counted, dtype=float).T @ found == pytest.approx(whole)

    @pytest.mark.parametrize("pp", [1, 2, 4])
    def test_of_layers_all_alike_they_are_the_first_one_and_two_a_stage(self, pp: int) -> None:
        assert fingerprint_cuts(LLAMA, pp) == (tuple(range(pp)), tuple(range(2 * pp)))

    def test_the_commonest_kind_comes_alone(self) -> None:
        spec = llama(24, layer_windows=WINDOWS)
        assert fingerprint_cuts(spec, 1) == ((0,), (0, 1), (0, 5))
        assert fingerprint_cuts(spec, 2) == ((0, 1), (0, 1, 2, 3), (0, 1, 5, 11))

    def test_a_kind_that_is_too_rare_is_noted(self, golden: Golden) -> None:
        machine = of_kinds((64,) * 11 + (None,))
        notes = take_profile(machine, PLAN).notes
        golden("fingerprint", notes)


class TestLatency:
    @pytest.mark.parametrize("workload", [Workload(1, 128, 17), Workload(4, 512, 17), Workload(2, 300, 33)])
    @pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (1, 4)])
    @pytest.mark.parametrize("weights", [WeightFormat.BITS16, WeightFormat.INT8])
    def test_the_full_model_is_recovered(
        self,
        tp: int,
        pp: int,
        weights: WeightFormat,
        workload: Workload,
        measured: tuple[SyntheticMachine, Profile],
    ) -> None:
        machine, profile = measured
        if pp == 4 and workload.batch > 1:
            return  # nothing was run there
        latency = L2(profile).latency(DeploymentConfig(tp=tp, pp=pp, weights=weights), workload)
        windows, where = machine.spec.windows, {"tp": tp, "pp": pp, "int8": weights is WeightFormat.INT8}
        at = (workload.batch, workload.input_tokens)
        assert latency.ttft_s.value == pytest.approx(machine.truth.ttft_s(windows, *at, **where), rel=1e-6)
        tpot_s = machine.truth.tpot_s(windows, *at, workload.output_tokens, **where)
        assert latency.tpot_s.value == pytest.approx(tpot_s, rel=1e-6)

    def test_a_layer_s_effect_is_that_of_the_mean_layer(self) -> None:
        machine = of_kinds(BY_TURNS)
        effect = L2(take_profile(machine, PLAN)).layer_effects[0]
        first_s = machine.truth.first_s(BY_TURNS, 4, 512) - machine.truth.first_s((), 4, 512)
        assert effect.first_s.value == pytest.approx(first_s / len(BY_TURNS), rel=1e-6)

    def test_intervals_hold_a_noisy_machine(self) -> None:
        inside = []
        for seed in range(20):
            machine = of_kinds(WINDOWS)
            machine.noise, machine.random = 0.05, np.random.default_rng(seed)
            latency = L2(take_profile(machine, replace(PLAN, degrees=((1, 1),)))).latency(
                DeploymentConfig(), Workload(4, 512, 17)
            )
            true_s = machine.truth.ttft_s(WINDOWS, 4, 512)
            inside.append(latency.ttft_s.low <= true_s <= latency.ttft_s.high)
        assert np.mean(inside) >= 0.8

    def test_points_travel_as_json(self, measured: tuple[SyntheticMachine, Profile]) -> None:
        profile = measured[1]
        assert from_json(to_json(profile), Profile) == profile


def filled_up(windows: tuple[int | None, ...], pp: int) -> float:
    """Layers that vLLM has room for in the groups of a stage, for each layer that is there, at most.

    Groups are as large as the rarest kind, or the commonest where that is less than half as common again.
    """
    found, first = [1.0], 0
    for layers in even_split(len(windows), pp):
        counts = Counter(windows[first : first + layers]).values()
        size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        found.append(sum(math.ceil(count / size) * size for count in counts) / layers)
        first += layers
    return max(found)


class TestMemory:
    @pytest.mark.parametrize("workload", [Workload(1, 16, 17), Workload(4, 512, 17), Workload(3, 2000, 48)])
    @pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
    def test_a_layer_holds_no_more_than_its_window(
        self, tp: int, pp: int, workload: Workload, measured: tuple[SyntheticMachine, Profile]
    ) -> None:
        machine, profile = measured
        spec, memory = machine.spec, M2(profile)
        assert memory.warnings == ()
        estimate = memory.memory(DeploymentConfig(tp=tp, pp=pp), workload)
        each = spec.kv_bytes_per_token_per_layer(KvFormat.BITS16) / tp * workload.batch
        first = 0
        for stage, layers in enumerate(even_split(spec.num_layers, pp)):
            room = [min(w or workload.context_tokens, workload.context_tokens) for w in spec.windows]
            held = each * sum(room[first : first + layers])
            assert estimate.stage(stage, layers).kv_bytes >= held - 1
            if pp == 1:
                assert estimate.stage(stage, layers).kv_bytes == pytest.approx(held, abs=layers)
            first += layers

    def test_an_engine_that_keeps_all_tokens_of_sliding_layers_is_noticed(self) -> None:
        machine = of_kinds(BY_TURNS)
        machine.truth = Truth(kv_factor=1.5)
        checked = M2(take_profile(machine, PLAN))
        assert len(checked.warnings) == 2
        assert all("(+50.0%)" in warning for warning in checked.warnings)

    @given(
        windows_of_models,
        st.integers(1, 4),
        st.builds(Workload, st.integers(1, 8), st.integers(1, 300), st.integers(1, 300)),
        st.integers(0, 500),
        st.sampled_from(["tensorrt-llm", "vllm"]),
    )
    def test_kv_tokens_lie_between_one_window_and_all(
        self, windows: tuple[int | None, ...], pp: int, workload: Workload, step_tokens: int, engine: str
    ) -> None:
        """And what fills up vLLM's groups of layers lies beyond."""
        spec = spec_of(windows)
        pp = min(pp, len(windows))
        config = DeploymentConfig(pp=pp, engine=engine)
        tokens = kv_tokens_per_layer(spec, config, workload, step_tokens)
        most = workload.kv_tokens(engine) * (filled_up(windows, pp) if engine == "vllm" else 1)
        assert min(workload.context_tokens, 8) * workload.batch <= tokens <= most + 1e-6
        exact = sum(workload.batch * min(w or workload.context_tokens, workload.context_tokens) for w in windows)
        assert tokens * len(windows) >= exact - 1e-6
        if engine != "vllm":
            alike = replace(spec, sliding_window=None, layer_windows=())
            assert kv_tokens_per_layer(alike, config, workload) >= tokens

    def test_a_group_that_is_filled_up_counts_whole(self) -> None:
        """Gemma 3 27B: 52 sliding layers in 6 groups of 10, beside 10 others, are as many as 70 of its 62."""
        windows = ((64,) * 5 + (None,)) * 10 + (64, 64)
        spec, config = spec_of(windows), DeploymentConfig(engine="vllm")
        tokens = kv_tokens_per_layer(spec, config, Workload(3, 900, 100))
        assert tokens * 62 == pytest.approx(10 * 3000 + 60 * 3 * 64)


class TestRoofline:
    """A model of two kinds lies between those of one, and costs what its layers cost one by one."""

    @pytest.mark.parametrize("workload", [Workload(1, 32, 8), Workload(4, 3000, 128)])
    def test_times_are_the_mean_of_the_kinds_(self, workload: Workload) -> None:
        def of(**changes: object) -> RooflineEstimator:
            return RooflineEstimator(replace(LLAMA, **changes), replace(CPU, flops_16bit_per_s=1e15))  # type: ignore[arg-type]

        full, sliding, mixed = of(), of(sliding_window=64), of(layer_windows=BY_TURNS)
        for time_s in (
            lambda estimator: estimator.ttft_s(DeploymentConfig(), workload),
            lambda estimator: estimator.tpot_s(DeploymentConfig(), workload),
        ):
            assert time_s(mixed) == pytest.approx((time_s(full) + time_s(sliding)) / 2, rel=1e-9)

    def test_kv_of_a_long_context(self) -> None:
        spec, workload = replace(LLAMA, layer_windows=BY_TURNS), Workload(2, 30_000, 1000)
        memory = (
            RooflineEstimator(spec, CPU, max_batched_tokens=1024).estimate(DeploymentConfig(), workload).memory
        )
        token = spec.kv_bytes_per_token_per_layer(KvFormat.BITS16)
        assert memory.layer_kv_bytes == pytest.approx(token * (62_000 + 2 * 64 + 1024) / 2, abs=1)
        assert memory.source is Source.ROOFLINE


def test_hashes_of_shapes_without_kinds_are_kept() -> None:
    """Profiles and recordings are found by them."""
    assert LLAMA.shape_hash == "270eca4cac0e9207"
    assert replace(LLAMA, layer_windows=BY_TURNS).shape_hash != LLAMA.shape_hash
