"""Bytes of weights per format, by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat
from fingerprint.families import read_spec
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import (
    embedding_bytes,
    head_bytes,
    kv_heads_per_gpu,
    layer_weight_bytes,
    layer_weight_bytes_per_gpu,
    linear_element_bytes,
)

LLAMA_2_7B = read_spec(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
)
FALCON_7B = read_spec(
    {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "vocab_size": 65024,
    }
)
MIXTRAL = read_spec(
    {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
)
MODELS = [LLAMA_2_7B, FALCON_7B, MIXTRAL]
configs = st.builds(
    DeploymentConfig,
    tp=st.sampled_from([1, 2, 4, 8]),
    weights=st.sampled_from(list(WeightFormat)),
    pruning=st.sampled_from(list(Pruning)),
)


def whole_model_bytes(spec: ModelSpec, config: DeploymentConfig) -> float:
    layers = spec.num_layers * layer_weight_bytes(spec, config)
    return layers + embedding_bytes(spec) + head_bytes(spec) + 2 * spec.final_norm_params


def test_llama_2_7b_in_16_bit_is_two_bytes_per_parameter() -> None:
    assert whole_model_bytes(LLAMA_2_7B, DeploymentConfig()) == 6_738_415_616 * 2


def test_llama_2_7b_keeps_512_kib_of_kv_per_token() -> None:
    # 2 (K, V) x 32 layers x 32 heads x 128 x 2 bytes
    assert 32 * LLAMA_2_7B.kv_bytes_per_token_per_layer(KvFormat.BITS16) == 524_288
    assert 32 * LLAMA_2_7B.kv_bytes_per_token_per_layer(KvFormat.INT8) == 262_144


@pytest.mark.parametrize(
    ("weights", "layer_bytes"),
    [
        # Llama-2-7B's layer: 4 matrices 4096x4096, gate and up 4096->11008, down 11008->4096; two norms of 4096
        pytest.param(WeightFormat.BITS16, 2 * 202_375_168 + 2 * 8192, id="two-bytes"),
        # one 16-bit scale for each of 4 x 4096 + 2 x 11008 + 4096 outputs
        pytest.param(WeightFormat.INT8, 202_375_168 + 2 * 42_496 + 2 * 8192, id="scale-per-output"),
        # half a byte, and 202,375,168 / 128 = 1,581,056 scales
        pytest.param(WeightFormat.INT4, 101_187_584 + 2 * 1_581_056 + 2 * 8192, id="scale-per-group"),
        # zeros of 4 bits per group, an int32 for each of 4 x 4096 + 2 x 4096 + 11008 inputs
        pytest.param(
            WeightFormat.GPTQ4, 101_187_584 + 2 * 1_581_056 + 790_528 + 4 * 35_584 + 2 * 8192, id="zeros-and-g-idx"
        ),
        pytest.param(WeightFormat.FP8, 202_375_168 + 4 * 7 + 2 * 8192, id="scale-per-matrix"),
    ],
)
def test_a_layer_in_each_format(weights: WeightFormat, layer_bytes: int) -> None:
    assert layer_weight_bytes(LLAMA_2_7B, DeploymentConfig(weights=weights)) == pytest.approx(
        layer_bytes, rel=1e-12
    )


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.family)
def test_int4_with_groups_of_128_is_between_4_and_4_and_a_quarter_bits(spec: ModelSpec) -> None:
    # Falcon's 4544 inputs are 35.5 groups: the last group is half empty
    assert 4.125 <= 8 * linear_element_bytes(spec, WeightFormat.INT4) < 4.135
    assert 4.15 < 8 * linear_element_bytes(spec, WeightFormat.GPTQ4) <= 4.25


@pytest.mark.parametrize("pruning", [Pruning.SPARSEGPT, Pruning.WANDA, Pruning.WANDA_4_8, Pruning.WANDA_2_4])
def test_zeros_in_a_dense_matrix_take_their_room(pruning: Pruning) -> None:
    dense = layer_weight_bytes(LLAMA_2_7B, DeploymentConfig())
    assert layer_weight_bytes(LLAMA_2_7B, DeploymentConfig(pruning=pruning)) == dense


def test_structured_pruning_removes_a_quarter_of_the_linear_weights() -> None:
    pruned = layer_weight_bytes(LLAMA_2_7B, DeploymentConfig(pruning=Pruning.LLM_PRUNER_25))
    assert pruned == 2 * 202_375_168 * 0.75 + 16_384


def test_tensor_parallelism_divides_matrices_and_repeats_norms() -> None:
    assert layer_weight_bytes_per_gpu(LLAMA_2_7B, DeploymentConfig(tp=4)) == 2 * 202_375_168 / 4 + 16_384


def test_one_kv_head_is_on_every_rank() -> None:
    assert kv_heads_per_gpu(FALCON_7B, 8) == 1
    one, two = (layer_weight_bytes_per_gpu(FALCON_7B, DeploymentConfig(tp=tp)) for tp in (1, 2))
    kv_projections = 2 * 4544 * 64 * 2  # bytes
    rest = 2 * (FALCON_7B.layer_params - FALCON_7B.layer_linear_params)
    assert two == pytest.approx((one - rest - kv_projections) / 2 + kv_projections + rest)


def test_a_tied_head_is_the_embedding_once_more() -> None:
    tied = replace(LLAMA_2_7B, tied_embeddings=True, head_params=0)
    assert head_bytes(tied) == embedding_bytes(tied) == 2 * 32000 * 4096


@given(config=configs, spec=st.sampled_from(MODELS))
def test_more_ranks_never_hold_more_each_nor_less_in_all(config: DeploymentConfig, spec: ModelSpec) -> None:
    here = layer_weight_bytes_per_gpu(spec, config)
    twice = layer_weight_bytes_per_gpu(spec, replace(config, tp=2 * config.tp))
    assert twice <= here
    assert config.tp * here >= layer_weight_bytes(spec, config) * (1 - 1e-9)


@given(config=configs, spec=st.sampled_from(MODELS))
def test_no_format_takes_more_than_16_bit(config: DeploymentConfig, spec: ModelSpec) -> None:
    dense = layer_weight_bytes(spec, DeploymentConfig())
    assert 0.15 * dense < layer_weight_bytes(spec, config) <= dense
