"""Configs as published, which leave out what their class has by default: with the checkpoint, and alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fingerprint.checkpoint import StoredTensor
from fingerprint.config_json import read_config
from fingerprint.description.transformers_class import described_config
from fingerprint.errors import ConfigError
from fingerprint.families import load_spec, read_spec
from fingerprint.model_spec import ModelSpec
from tests.golden_words import Golden

SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL: dict[str, dict[str, Any]] = {
    "gemma3": {  # gemma-3-4b-it says five sizes of its text model, and no windows
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 8,
            "sliding_window": 32,
        },
        "vision_config": {"model_type": "siglip_vision_model", **VISION, "image_size": 28, "patch_size": 14},
    },
    "llama4": {  # Scout says a chunk's size, and not which layers have it
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {
            "model_type": "llama4_text",
            **SIZES,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 64,
            "pad_token_id": 0,
        },
        "vision_config": {"model_type": "llama4_vision_model", **VISION, "vision_output_dim": 32},
    },
    "nemotron_h": {  # without the type of its states, for which vLLM takes float32
        "architectures": ["NemotronHForCausalLM"],
        **SIZES,
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
    "hunyuan_v1_moe": {  # experts given layer by layer
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        **SIZES,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "moe_topk": [2, 2, 2, 2],
        "max_position_embeddings": 4096,
    },
}


def saved(model: dict[str, Any]) -> dict[str, StoredTensor]:
    """Names and shapes of the class that the config makes, with all that it leaves out."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**model)
    with torch.device("meta"):
        built = getattr(transformers, model["architectures"][0])._from_config(config)
    kept = built.state_dict().keys()
    tensors = dict(built.named_parameters()) | {n: b for n, b in built.named_buffers() if n in kept}
    return {name: StoredTensor("BF16", tuple(tensor.shape)) for name, tensor in tensors.items()}


def both(name: str, folder: Path) -> tuple[ModelSpec, ModelSpec]:
    """Return the model by the tensors, and by the config alone."""
    config = {"model_type": name, **SMALL[name]}
    (folder / "config.json").write_text(json.dumps(config))
    return load_spec(folder, saved(config)), read_spec(read_config(folder))


@pytest.mark.parametrize("name", SMALL)
def test_a_profile_of_the_config_alone_serves_the_checkpoint(name: str, tmp_path: Path) -> None:
    by_tensors, alone = both(name, tmp_path)
    assert by_tensors == alone
    assert by_tensors.shape_hash == alone.shape_hash


def test_windows_that_a_config_leaves_out_are_the_class_s(tmp_path: Path) -> None:
    gemma, _ = both("gemma3", tmp_path)
    assert gemma.windows == (32, 32, 32, 32, 32, None, 32, 32)
    assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_dim, gemma.max_context_tokens) == (8, 4, 256, 131_072)
    llama, _ = both("llama4", tmp_path)
    assert llama.windows == (64, 64, 64, None) * 2


def test_states_of_nemotron_are_float32_where_nothing_is_said(tmp_path: Path) -> None:
    spec, _ = both("nemotron_h", tmp_path)
    convolved, state = 4 * 16 + 2 * 2 * 16, 4 * 16 * 16
    assert {shape.state_bytes for shape in spec.layer_shapes} == {0, 4 * state + 2 * 3 * convolved}


def test_widths_are_those_of_the_experts_where_dense_layers_come_first() -> None:
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 4}
    spec = described_config(config | {"first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 2})
    assert (spec.intermediate_size, spec.num_experts, spec.experts_per_token) == (2048, 8, 2)


def test_experts_without_a_number_that_works_are_asked_for(tmp_path: Path, golden: Golden) -> None:
    config = {"model_type": "hunyuan_v1_moe", **SMALL["hunyuan_v1_moe"]}
    tensors = saved(config)
    del config["moe_topk"]
    config["model_type"] = "of-nobody"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with golden.raises("fingerprint", ConfigError):
        load_spec(tmp_path, tensors)


def test_another_name_for_a_class_that_transformers_has() -> None:
    config = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 4, "n_routed_experts": 8}
    config |= {"num_experts_per_tok": 2}
    known, other = (described_config(config | {"model_type": name}) for name in ("deepseek_v3", "kimi_k2"))
    assert (other.family, other.num_params) == ("kimi_k2", known.num_params)


@pytest.mark.parametrize(
    "changes",
    [
        {"vision_config": {"model_type": "siglip_vision_model", "depth": 30_000}},
        {"text_config": {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 9000}},
        {"text_config": {"model_type": "gemma3_text", "note": "x" * 10_000}},
    ],
)
def test_what_would_take_minutes_to_build_is_refused(changes: dict[str, Any], golden: Golden) -> None:
    with golden.raises("fingerprint", ConfigError):
        described_config({"model_type": "gemma3", **SMALL["gemma3"]} | changes)
