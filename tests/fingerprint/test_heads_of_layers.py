"""Heads of single layers on the ranks of a tensor-parallel group, by vLLM's rules and by hand.

Sources: ``model_executor/models/gemma4.py`` (``Gemma4Attention``) and ``mimo_v2.py`` (``MiMoV2Attention``) of vLLM
0.33: both have ``num_kv_heads = max(1, total_num_kv_heads // tp_size)`` in each layer, of that layer's own total.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint import description
from fingerprint.cache_blocks import block_bytes
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimators.roofline import CALIBRATED, RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.loaded_bytes import added_layer_bytes
from fingerprint.model_spec import LayerShape, ModelSpec
from fingerprint.weight_bytes import kept_bytes_per_replica, kv_token_bytes_per_gpu, layer_weight_bytes_per_gpu
from planner.space import shape_refusal
from tests.fingerprint import family_truths
from tests.fingerprint.synthetic_machine import llama

GEMMA = read_spec(family_truths.public("google/gemma-4-31B-it (text)").config)
SMALL_GEMMA = read_spec(family_truths.public("google/gemma-4-26B-A4B (text)").config)
H200 = gpu_spec("h200")
LONG = Workload(1, 250_000, 100)
STEP_TOKENS = 2 * 8192  # of the two steps in flight, which a sliding layer keeps with its window


def on_vllm(tp: int) -> DeploymentConfig:
    return DeploymentConfig(engine="vllm", tp=tp)


def heads(spec: ModelSpec) -> list[int]:
    return [spec.kv_heads_of(kind) for kind in spec.kinds]


def test_each_kind_of_layer_has_its_own_heads() -> None:
    """``num_key_value_heads``, ``num_global_key_value_heads`` of the published configs; ``swa_...`` of MiMo's."""
    assert heads(GEMMA) == [16, 4]
    assert heads(SMALL_GEMMA) == [8, 2]
    mimo = description.described_config(family_truths.default("MiMoV2FlashForCausalLM").config)
    assert set(heads(mimo)) == {4, 8}


@pytest.mark.parametrize(("tp", "sliding", "whole"), [(1, 16, 4), (2, 8, 2), (4, 4, 1), (8, 2, 1)])
def test_a_rank_of_gemma_4_holds_whole_heads_of_each_kind(tp: int, sliding: int, whole: int) -> None:
    """``Gemma4Attention``: 50 sliding layers of 16 heads x 256, 10 layers of 4 x 512, K and V of 2 bytes each."""
    memory = RooflineEstimator(GEMMA, H200).estimate(on_vllm(tp), LONG).memory
    of_windows = 50 * (1024 + STEP_TOKENS) * sliding * 256 * 2 * 2
    of_all = 10 * 250_100 * whole * 512 * 2 * 2
    assert 60 * memory.layer_kv_bytes == pytest.approx(of_windows + of_all, abs=60)


def test_a_replica_keeps_a_global_head_on_each_rank() -> None:
    """``Gemma4Attention`` at 8 ranks: each has 2 of 16 sliding heads, and one of the 4 global heads, whole."""
    of_rank = 50 * 2 * 256 * 2 * 2 + 10 * 1 * 512 * 2 * 2
    assert kept_bytes_per_replica(GEMMA, on_vllm(8)) == (8 * of_rank, 0)


@pytest.mark.parametrize(("tp", "page"), [(1, 8 * 256), (4, 2 * 256), (8, 512)])
def test_a_page_is_of_the_layers_that_keep_most_on_the_rank(tp: int, page: int) -> None:
    """gemma-4-26B-A4B at 8 ranks: a global head of 512 takes more than a sliding head of 256; groups of 5 layers.

    vLLM's ``unify_kv_cache_spec_page_size`` makes all pages as large as the largest, here of blocks of 16 tokens.
    """
    assert kv_token_bytes_per_gpu(SMALL_GEMMA, on_vllm(tp)) == page * 2 * 2
    assert block_bytes(SMALL_GEMMA, on_vllm(tp), 0, 30) == 5 * 16 * page * 2 * 2


def test_a_decode_step_reads_the_heads_that_a_rank_has() -> None:
    """10 layers of ``Gemma4Attention`` read one whole head of 512 at 8 ranks, at 4 likewise."""

    def reads_s(tp: int) -> float:
        estimator = RooflineEstimator(GEMMA, H200)
        times = [
            estimator.tpot_s(on_vllm(tp), replace(LONG, input_tokens=tokens)) for tokens in (100_000, 200_000)
        ]
        return times[1] - times[0]

    bandwidth = H200.memory_bytes_per_s * CALIBRATED.memory_efficiency
    assert [reads_s(4), reads_s(8)] == pytest.approx([100_000 * 10 * 512 * 2 * 2 / bandwidth] * 2)


def test_a_long_prompt_takes_the_arithmetic_of_each_kind_s_queries() -> None:
    """``Gemma4Attention`` has 32 query heads in all layers, of 512 in 10 of them: 4 FLOPs an element and pair.

    What grows with the prompt's length alone falls out of the time of twice the prompt less twice the prompt's.
    """
    tokens, estimator = 16 * 8192, RooflineEstimator(GEMMA, H200)
    once, twice = (estimator.ttft_s(DeploymentConfig(), Workload(1, count, 1)) for count in (tokens, 2 * tokens))
    flops = 10 * 4 * 32 * 512 * tokens**2
    assert twice - 2 * once == pytest.approx(flops / (989e12 * CALIBRATED.compute_efficiency), rel=1e-3)


def test_a_prompt_takes_no_less_arithmetic_where_fewer_kv_heads_are_kept() -> None:
    """``QKVParallelLinear`` gives every query head its keys, however many share them."""
    few, many = (replace(GEMMA.layer_shapes[1], kv_heads=count, kv_elements=1024 * count) for count in (4, 16))
    specs = [replace(GEMMA, layer_shapes=(GEMMA.layer_shapes[0], shape)) for shape in (few, many)]
    times = [RooflineEstimator(spec, H200).ttft_s(DeploymentConfig(), LONG) for spec in specs]
    assert times[0] == pytest.approx(times[1], rel=1e-3)


def test_the_matrices_of_whole_heads_are_whole_on_each_rank() -> None:
    """``QKVParallelLinear`` splits no KV head: of 4 at 8 ranks each has a quarter, not an eighth."""
    few = replace(GEMMA, layer_shapes=tuple(replace(shape, kv_heads=16) for shape in GEMMA.layer_shapes))
    more = layer_weight_bytes_per_gpu(GEMMA, on_vllm(8)) - layer_weight_bytes_per_gpu(few, on_vllm(8))
    of_layer = 5376 * 2 * 4 * 512 * 2 * (1 / 4 - 1 / 8)
    assert more == pytest.approx(of_layer * 10 / 60)


@pytest.mark.parametrize(("tp", "sliding", "whole"), [(1, 16, 4), (2, 8, 2), (4, 4, 1), (8, 2, 1)])
def test_gemma_4_has_rows_of_v_where_the_checkpoint_has_none(tp: int, sliding: int, whole: int) -> None:
    """``QKVParallelLinear`` of ``Gemma4Attention`` has rows of Q, K and V, where global layers store no V.

    ``Gemma4ForCausalLM`` loads K's into both (``k_eq_v_shards``). There are 32 query heads, an MLP of
    3 x 5376 x 21504, and norms on every rank: four of 5376, two of a head's width and a scale.
    """
    queries, mlp = 32 / tp, 3 * 5376 * 21504 / tp
    of_sliding = 5376 * 256 * (queries + 2 * sliding + queries) + mlp + 4 * 5376 + 2 * 256 + 1
    of_global = 5376 * 512 * (queries + 2 * whole + queries) + mlp + 4 * 5376 + 2 * 512 + 1
    held = layer_weight_bytes_per_gpu(GEMMA, on_vllm(tp)) + added_layer_bytes(GEMMA, on_vllm(tp), H200)
    assert 60 * held == pytest.approx(2 * (50 * of_sliding + 10 * of_global), rel=1e-8)


@pytest.mark.parametrize(
    ("model", "whole"),
    [
        pytest.param("deepseek-ai/DeepSeek-V3", 7168 * 1536 + 7168 * 576, id="to-latents"),
        pytest.param(
            "zai-org/GLM-5",
            6144 * 2048 + 6144 * 576 + 2048 * 32 * 128 + 6144 * (128 + 32),
            id="and-the-indexer",
        ),
    ],
)
def test_projections_to_latents_are_whole_on_each_rank(model: str, whole: int) -> None:
    """``DeepseekV2MLAAttention``: ``fused_qkv_a_proj`` has ``disable_tp``, and an indexer's ``wk_weights_proj``.

    ``wq_b`` of the ``Indexer`` is a ``ReplicatedLinear``.
    """
    spec = read_spec(family_truths.public(model).config)
    alone, split = (layer_weight_bytes_per_gpu(spec, on_vllm(tp)) for tp in (1, 8))
    rest = spec.layer_params - spec.layer_linear_params
    assert split - alone / 8 == pytest.approx(2 * (whole + rest) * (1 - 1 / 8))


def test_a_degree_that_some_layers_heads_do_not_take_is_refused() -> None:
    """``Gemma4Attention`` asserts that the ranks divide the layer's heads, or the heads the ranks."""
    odd = replace(GEMMA, layer_shapes=(GEMMA.layer_shapes[0], replace(GEMMA.layer_shapes[1], kv_heads=3)))
    reason = shape_refusal(odd, on_vllm(8), 8)
    assert reason is not None
    assert "tp=8" in reason
    assert "3 KV heads" in reason
    assert shape_refusal(GEMMA, on_vllm(8), 8) is None


def test_heads_of_layers_change_no_hash() -> None:
    """A profile of an earlier release, which does not say them, serves the model all the same."""
    shapes = tuple(
        replace(shape, kv_heads=0, query_width=0, whole_params=0, doubled_params=0) for shape in GEMMA.layer_shapes
    )
    silent = replace(GEMMA, layer_shapes=shapes)
    assert silent.shape_hash == GEMMA.shape_hash


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]))
def test_a_rank_has_its_part_and_a_whole_head_at_least(one: int, other: int, tp: int) -> None:
    shapes = tuple(
        LayerShape(mixer="attention", params=1, linear_params=1, kv_elements=256 * count, kv_heads=count)
        for count in (one, other)
    )
    spec = replace(llama(2), num_kv_heads=one, head_dim=128, layer_shapes=shapes, layer_shape_indexes=(0, 1))
    of_ranks, _ = kept_bytes_per_replica(spec, on_vllm(tp))
    assert of_ranks == tp * sum(max(count / tp, 1) * 256 * 2 for count in (one, other))
