"""Models whose layers differ in what they are made of and keep: exact counts, memory and times by the roofline."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.depth_tied_cuts import kind_counts, tied_depths
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import LayerShape, ModelSpec, Stored
from fingerprint.profile_plan import fingerprint_cuts
from fingerprint.profile_points import Visit
from fingerprint.weight_bytes import kv_tokens_per_layer, layer_state_bytes_per_gpu, stage_weight_ratio
from tests.fingerprint import family_truths
from tests.fingerprint.synthetic_machine import llama

LLAMA = llama(24)
FULL = LayerShape(
    mixer="attention",
    params=LLAMA.layer_params,
    linear_params=LLAMA.layer_linear_params,
    kv_elements=LLAMA.kv_elements,
)
STATE = replace(FULL, mixer="gated delta", kv_elements=0, state_bytes=2**20)
H200 = gpu_spec("h200")
ONE = DeploymentConfig()
WORKLOAD = Workload(8, 4000, 200)
orders = st.lists(st.integers(0, 1), min_size=2, max_size=48)


def of(order: list[int], *shapes: LayerShape) -> ModelSpec:
    return replace(
        LLAMA, num_layers=len(order), layer_shapes=shapes or (FULL, STATE), layer_shape_indexes=tuple(order)
    )


def test_of_one_shape_all_figures_are_those_of_a_model_without_shapes() -> None:
    same = of([0] * 24, FULL)
    plain, shaped = (RooflineEstimator(spec, H200).estimate(ONE, WORKLOAD) for spec in (LLAMA, same))
    assert (shaped.memory.layer_kv_bytes, shaped.tpot_s) == (plain.memory.layer_kv_bytes, plain.tpot_s)
    assert (same.num_params, same.several_kinds) == (LLAMA.num_params, False)


def test_parameters_are_the_sum_of_the_layers() -> None:
    dense, mixture = replace(FULL, params=1_000_001, linear_params=10**6), replace(FULL, params=7_000_003)
    spec = of([0, 0, 1, 1, 1], dense, mixture)
    ends = spec.embedding_params + spec.head_params + spec.final_norm_params
    assert spec.num_params == 2 * 1_000_001 + 3 * 7_000_003 + ends


@given(orders, st.integers(1, 64))
def test_what_is_kept_is_the_sum_over_the_layers(order: list[int], batch: int) -> None:
    spec, workload = of(order), replace(WORKLOAD, batch=batch)
    tokens, states = order.count(0) * batch * workload.context_tokens, order.count(1) * batch * 2**20
    layers = len(order)
    assert layers * kv_tokens_per_layer(spec, ONE, workload) == pytest.approx(tokens)
    assert layers * layer_state_bytes_per_gpu(spec, ONE, batch) == pytest.approx(states)
    memory = RooflineEstimator(spec, H200).estimate(ONE, workload).memory
    held = tokens * spec.kv_bytes_per_token_per_layer(KvFormat.BITS16) + states
    assert memory.layer_kv_bytes * layers == pytest.approx(held, abs=layers)


def test_the_fullest_stage_counts() -> None:
    spec = of([0, 0, 1, 1])
    two = DeploymentConfig(pp=2)
    assert kv_tokens_per_layer(spec, two, WORKLOAD) == kv_tokens_per_layer(LLAMA, two, WORKLOAD)
    assert layer_state_bytes_per_gpu(spec, two, 8) == 8 * 2**20


def test_the_heaviest_stage_of_deepseek_v3_holds_eight_mixtures() -> None:
    """``DeepseekV2DecoderLayer`` of vLLM 0.33 makes a mixture of every layer but the first three.

    Stages 2 to 5 of 8 hold eight of them: each of 256 + 1 experts of 3 x 7168 x 2048, and attention of
    7168 x 1536 + 1536 x 128 x 192 + 7168 x 576 + 512 x 128 x 256 + 128 x 128 x 7168, a byte an element in fp8.
    """
    spec = read_spec(family_truths.public("deepseek-ai/DeepSeek-V3").config)
    config = DeploymentConfig(pp=8, weights=WeightFormat.FP8, engine="vllm")
    memory = RooflineEstimator(spec, H200).estimate(config, Workload()).memory
    experts = 257 * 3 * 7168 * 2048
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert memory.stage(2, 8).weights_bytes == pytest.approx(8 * (experts + attention), rel=5e-4)
    assert memory.stage(2, 8).total_bytes == pytest.approx(94.05e9, rel=5e-4)
    dense = read_spec(family_truths.public("meta-llama/Llama-3.1-8B").config)
    assert stage_weight_ratio(dense, 8) == stage_weight_ratio(spec, 1) == 1


@given(orders, st.integers(1, 8), st.integers(1, 10**9))
def test_no_stage_holds_more_than_is_planned(order: list[int], pp: int, params: int) -> None:
    pp = min(pp, len(order))
    sizes = (10**6, params)
    spec = of(order, *(replace(FULL, params=size, linear_params=0) for size in sizes))
    mean = sum(sizes[index] for index in order) / len(order)
    of_layer = mean * stage_weight_ratio(spec, pp)
    ends = list(accumulate(even_split(len(order), pp), initial=0))
    held = [sum(sizes[index] for index in order[first:end]) for first, end in pairwise(ends)]
    planned = [(end - first) * of_layer for first, end in pairwise(ends)]
    assert all(least <= most * (1 + 1e-9) for least, most in zip(held, planned, strict=True))
    assert any(least == pytest.approx(most) for least, most in zip(held, planned, strict=True))


def test_a_state_is_divided_among_ranks_and_a_latent_is_not() -> None:
    assert layer_state_bytes_per_gpu(of([1, 1]), DeploymentConfig(tp=4), 8) == 2 * 2**20
    latent = replace(LLAMA, num_kv_heads=1, kv_head_elements=576)
    assert latent.kv_bytes_per_token_per_layer(KvFormat.BITS16) == 1152
    alone, split = (RooflineEstimator(latent, H200).estimate(DeploymentConfig(tp=t), WORKLOAD) for t in (1, 4))
    assert split.memory.layer_kv_bytes == alone.memory.layer_kv_bytes


def test_a_long_context_slows_layers_that_keep_all_of_it_alone() -> None:
    long = replace(WORKLOAD, input_tokens=60_000)

    def slows(order: list[int]) -> float:
        estimator = RooflineEstimator(of(order), H200)
        return estimator.tpot_s(ONE, long) - estimator.tpot_s(ONE, WORKLOAD)

    assert slows([1] * 24) == pytest.approx(0, abs=1e-9)
    assert slows([0, 1, 1, 1] * 6) == pytest.approx(slows([0] * 24) / 4, rel=1e-6)


def test_what_another_layer_keeps_is_read_and_takes_no_memory() -> None:
    looks = replace(
        FULL, mixer="attention to another layer's KV", kv_elements=0, kv_read_elements=FULL.kv_elements
    )
    whole, shared = (
        RooflineEstimator(of(order, FULL, looks), H200).estimate(ONE, WORKLOAD)
        for order in ([0] * 24, [0, 1] * 12)
    )
    assert shared.tpot_s.value == pytest.approx(whole.tpot_s.value, rel=1e-9)
    assert shared.memory.layer_kv_bytes == pytest.approx(whole.memory.layer_kv_bytes / 2, abs=1)


class TestCuts:
    ORDER = [1, 1, 1, 0] * 6

    def test_each_kind_has_its_own(self) -> None:
        spec = of(self.ORDER)
        cuts = fingerprint_cuts(spec, 1)
        counts = [Visit(cut, WeightFormat.BITS16, KvFormat.BITS16).kinds(spec) for cut in cuts]
        assert counts == [(1, 0), (2, 0), (1, 1)]

    def test_a_pattern_is_two_and_one_of_its_kind(self) -> None:
        spec = of(self.ORDER)
        assert tied_depths(spec, 1) == (8, 4)
        assert kind_counts(spec, 4) == (3, 1)


def test_how_many_bytes_single_matrices_take_changes_no_hash() -> None:
    stored = Stored(method="fp8", form="a", bits=8, layer_linear_bytes=1e9, layer_expert_bytes=5e8)
    one, other = (replace(LLAMA, stored=s) for s in (stored, replace(stored, layer_linear_bytes=1e9 + 7)))
    assert one.shape_hash == other.shape_hash != LLAMA.shape_hash
    assert one.shape_hash != replace(LLAMA, stored=replace(stored, form="b")).shape_hash


def test_shapes_travel_as_json_and_change_the_hash() -> None:
    spec = of([0, 1])
    assert from_json(to_json(spec), ModelSpec) == spec
    assert spec.shape_hash != LLAMA.shape_hash
