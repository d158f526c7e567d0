"""Bytes that one rank keeps of a token and of a sequence, against vLLM's own functions and by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint import description
from fingerprint.config import DeploymentConfig, KvFormat, Workload
from fingerprint.description.facts import Facts
from fingerprint.description.mixers import kept_of_layer
from fingerprint.families import read_spec
from fingerprint.model_spec import LayerShape, ModelSpec
from fingerprint.weight_bytes import kv_tokens_per_layer, layer_state_bytes_per_gpu
from tests.fingerprint import family_truths

RECORDED = json.loads((Path(__file__).parent / "recorded" / "state_sizes_by_tp.json").read_text(encoding="utf-8"))
SHAPE = LayerShape(mixer="mamba2", params=1, linear_params=1, kv_elements=0)


def assert_ranks_keep(spec: ModelSpec, by_degree: dict[str, int]) -> None:
    shapes = [shape for shape in spec.layer_shapes if shape.state_bytes]
    assert shapes
    assert by_degree
    for tp, size in by_degree.items():
        assert {shape.state_bytes_of_rank(int(tp)) for shape in shapes} == {size}, f"tp {tp}"


@pytest.mark.parametrize("architecture", RECORDED["defaults"])
def test_a_rank_keeps_what_vllm_s_functions_say(architecture: str) -> None:
    held = family_truths.default(architecture)
    assert_ranks_keep(description.described_config(held.config), RECORDED["defaults"][architecture])


@pytest.mark.parametrize("model", RECORDED["public"])
def test_a_rank_of_a_public_model_keeps_what_vllm_s_functions_say(model: str) -> None:
    assert_ranks_keep(read_spec(family_truths.public(model).config), RECORDED["public"][model])


def test_a_single_group_is_whole_on_every_rank() -> None:
    """granite-4.0-h-small: B and C of 1 group x 128, 3 inputs of 16 bits of each, beside 128 heads."""
    spec = read_spec(family_truths.public("ibm-granite/granite-4.0-h-small").config)
    (shape,) = {shape for shape in spec.layer_shapes if shape.state_bytes}
    assert (shape.state_groups, shape.state_group_bytes) == (1, 2 * 128 * 3 * 2)
    assert shape.state_bytes_of_rank(8) == (shape.state_bytes - 1536) / 8 + 1536


@given(
    st.integers(0, 2**20), st.integers(0, 4096), st.sampled_from([0, 1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])
)
def test_ranks_together_keep_the_state_and_none_keeps_more(rest: int, part: int, groups: int, tp: int) -> None:
    shape = replace(SHAPE, state_bytes=rest + groups * part, state_group_bytes=part, state_groups=groups)
    of_rank = shape.state_bytes_of_rank(tp)
    assert shape.state_bytes_of_rank(1) == shape.state_bytes
    assert shape.state_bytes / tp <= of_rank * (1 + 1e-12)
    assert of_rank <= shape.state_bytes
    if groups % tp == 0:
        assert of_rank == pytest.approx(shape.state_bytes / tp)


def lightning(names: dict[str, tuple[int, ...]], **more: Any) -> Any:
    sizes = RECORDED["lightning"]
    config = {"model_type": "minimax", "hidden_size": 6144, "num_attention_heads": sizes["heads"]}
    return kept_of_layer(names, Facts(config | {"head_dim": sizes["head_dim"]} | more))


MINIMAX = {
    "self_attn.norm.weight": (8192,),
    "self_attn.qkv_proj.weight": (3 * 8192, 6144),
    "self_attn.output_gate.weight": (8192, 6144),
    "self_attn.out_proj.weight": (6144, 8192),
}
BAILING = {  # model_executor/layers/mamba/linear/bailing_linear_attn.py of vLLM 0.33
    "attention.query_key_value.weight": (3 * 8192, 6144),
    "attention.g_proj.weight": (8192, 6144),
    "attention.g_norm.weight": (8192,),
    "attention.dense.weight": (6144, 8192),
}


@pytest.mark.parametrize("names", [MINIMAX, BAILING])
def test_lightning_attention_keeps_a_square_for_each_head_in_the_model_s_type(
    names: dict[str, tuple[int, ...]],
) -> None:
    kept = lightning(names)
    assert (kept.mixer, kept.kv_elements) == ("lightning attention", 0)
    shape = replace(SHAPE, state_bytes=kept.state_bytes)
    for tp, size in RECORDED["lightning"]["tp"].items():
        assert shape.state_bytes_of_rank(int(tp)) == size


def test_minimax_is_read_from_its_config() -> None:
    """Half of the layers keep K and V, half a square of 128 for each of 64 heads, in 16 bits."""
    config = {
        "architectures": ["MiniMaxForCausalLM"],
        "model_type": "minimax",
        "hidden_size": 256,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 1024,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }
    spec = description.described_config(config)
    kept = [spec.layer_shapes[index] for index in spec.layer_shape_indexes]
    assert [layer.state_bytes for layer in kept] == [2 * 64 * 128 * 128, 0] * 2
    assert [layer.kv_elements for layer in kept] == [0, 2 * 8 * 128] * 2


class TestSparseAttention:
    """Hand-computed: 512 + 64 elements of a latent, one key of 128 with a float32 scale.

    ``DeepseekV32IndexerCache(head_dim + head_dim // quant_block_size * 4)`` in bytes, and 656 for the latent in
    ``fp8_ds_mla``: ``models/deepseek_v2.py`` and ``layers/attention/mla_attention.py`` of vLLM 0.33.
    """

    SPEC = read_spec(family_truths.public("zai-org/GLM-5").config)

    @pytest.mark.parametrize(
        ("kv", "token_bytes"), [(KvFormat.BITS16, 576 * 2 + 128 + 4), (KvFormat.FP8, 656 + 128 + 4)]
    )
    def test_a_token_takes(self, kv: KvFormat, token_bytes: int) -> None:
        assert self.SPEC.kv_bytes_per_token_per_layer(kv) == token_bytes
        workload = Workload(1, 900, 100)
        for tp in (1, 8):  # a latent is whole on every rank
            config = DeploymentConfig(engine="vllm", tp=tp, kv=kv)
            assert kv_tokens_per_layer(self.SPEC, config, workload) == 1000

    def test_layers_that_take_the_choice_of_another_have_no_key(self) -> None:
        """HY v4 has a key in every fourth layer alone."""
        spec = description.described_config(family_truths.default("HYV4ForCausalLM").config)
        shares = {spec.kv_share(kind, KvFormat.FP8) * 788 for kind in spec.kinds}
        assert shares == {788, 656}
        assert {spec.kv_share(kind, KvFormat.BITS16) * 1284 for kind in spec.kinds} == {1284, 1152}


def test_a_latent_without_sparse_attention_has_a_byte_for_each_element() -> None:
    spec = description.described_config(family_truths.default("DeepseekV3ForCausalLM").config)
    assert spec.kv_bytes_per_token_per_layer(KvFormat.FP8) == 576
    assert spec.kv_bytes_per_token_per_layer(KvFormat.BITS16) == 1152


def test_compressed_attention_keeps_its_window_on_every_rank() -> None:
    spec = description.described_config(family_truths.default("DeepseekV4ForCausalLM").config)
    alone, split = (layer_state_bytes_per_gpu(spec, DeploymentConfig(tp=tp), 8) for tp in (1, 8))
    assert alone == split > 0
