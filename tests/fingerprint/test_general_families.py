"""Families without a row in the table: counts of transformers' own model, cuts of small random ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fingerprint.errors import BadInputError, ConfigError, UnsupportedModelError
from fingerprint.families import FAMILIES, family_of, read_spec
from fingerprint.truncate import generate, generate_dummy
from tests.fingerprint.test_families import on_meta
from tests.fingerprint.test_truncate import load, logits
from tests.golden_words import Golden

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 96, "n_positions": 64}
SMALL: dict[str, dict[str, Any]] = {
    "olmo2": {"model_type": "olmo2", **_SIZES},
    "starcoder2": {"model_type": "starcoder2", **_SIZES, "sliding_window": None},
    "stablelm": {"model_type": "stablelm", **_SIZES, "use_qkv_bias": True},
    "glm4": {"model_type": "glm4", **_SIZES, "head_dim": 16},
    "gemma": {"model_type": "gemma", **_SIZES, "head_dim": 16},
    "gpt2": {"model_type": "gpt2", **_GPT2, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_bigcode": {"model_type": "gpt_bigcode", **_GPT2, "bos_token_id": 1, "eos_token_id": 2},
}
KV = {"olmo2": (2, 8), "starcoder2": (2, 8), "stablelm": (2, 8), "glm4": (2, 16), "gemma": (2, 16)}
KV |= {"gpt2": (4, 8), "gpt_bigcode": (1, 8)}


@pytest.mark.parametrize("family", SMALL)
def test_counts_are_those_of_transformers_model(family: str) -> None:
    import torch

    assert family not in FAMILIES
    spec, model = read_spec(SMALL[family]), on_meta(SMALL[family])
    layer = model.get_submodule(family_of(SMALL[family]).layout.layers)[0]
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    assert spec.layer_params == sum(p.numel() for p in layer.parameters())
    matrices = [m for m in layer.modules() if isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D"]
    assert spec.layer_linear_params == sum(m.weight.numel() for m in matrices)
    assert spec.embedding_params >= 96 * 32
    assert (spec.num_kv_heads, spec.head_dim) == KV[family]
    assert spec.num_layers == spec.num_heads == 4
    assert (spec.hidden_size, spec.vocab_size, spec.max_context_tokens) == (32, 96, 64)
    assert spec.intermediate_size == (128 if "gpt" in family else 48)
    assert spec.tied_embeddings == (model.lm_head.weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("family", SMALL)
def test_a_cut_model_s_logits_are_those_of_its_layers(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL[family])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "whole")
    generate(tmp_path / "whole", tmp_path / "cut", [0, 2])
    parent, _, name = family_of(SMALL[family]).layout.layers.rpartition(".")
    stack = getattr(model.get_submodule(parent), name)
    setattr(model.get_submodule(parent), name, torch.nn.ModuleList([stack[0], stack[2]]))
    model.config.num_hidden_layers = 2
    assert torch.equal(logits(load(tmp_path / "cut")), logits(model))


@pytest.mark.parametrize("family", ["olmo2", "gpt2"])
def test_a_dummy_has_every_tensor_that_the_class_loads(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL[family]))
    generate_dummy(tmp_path, tmp_path / "dummy", 2)
    assert read_spec(load(tmp_path / "dummy").config.to_dict()).num_layers == 2


def test_code_that_a_config_brings_is_not_run() -> None:
    """Nor are kernels or an attention of its choice loaded."""
    named = {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "attn_implementation": "evil/kernel"}
    named |= {"_attn_implementation": "evil/kernel", "experts_implementation": "evil"}
    assert read_spec(SMALL["olmo2"] | named) == read_spec(SMALL["olmo2"])


def test_a_multimodal_model_is_its_text_model_with_the_towers_beside_it() -> None:
    text = {"model_type": "llama", **_SIZES}
    config = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    alone, spec = read_spec(text), read_spec(config | {"vision_config": {"model_type": "clip_vision_model"}})
    assert (spec.family, spec.num_layers, spec.layer_params) == ("llava", alone.num_layers, alone.layer_params)
    assert (spec.kv_elements, spec.num_kv_heads) == (alone.kv_elements, alone.num_kv_heads)
    towers = spec.num_params - alone.num_params
    assert towers > 8 * 10**7  # CLIP's base one has 86 million, and there is a projector


def test_layers_that_look_back_differently_are_told_apart() -> None:
    config = SMALL["olmo2"] | {"model_type": "cohere2", "sliding_window": 8, "head_dim": 8}
    spec = read_spec(config)
    assert (spec.layer_windows, spec.sliding_window) == ((8, 8, 8, None), None)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "nobody"}, UnsupportedModelError),
        (_SIZES | {"model_type": "camembert"}, UnsupportedModelError),
        (SMALL["gpt2"] | {"n_embd": 33}, ConfigError),
        (SMALL["gpt2"] | {"n_layer": 10**9}, ConfigError),
        (_SIZES | {"model_type": "dbrx", "n_layers": 4, "ffn_config": {"moe_num_experts": 10**9}}, ConfigError),
        (SMALL["olmo2"] | {"hidden_size": 2**70}, ConfigError),
        (SMALL["olmo2"] | {"hidden_size": "wide"}, ConfigError),
        (SMALL["olmo2"] | {"num_hidden_layers": None}, ConfigError),
        (SMALL["olmo2"] | {"architectures": ["Evil"]}, UnsupportedModelError),
        (SMALL["olmo2"] | {"architectures": ["Olmo2ForSequenceClassification"]}, UnsupportedModelError),
        (SMALL["olmo2"] | {"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError),
    ],
)
def test_what_cannot_be_read_is_one_line(
    config: dict[str, Any], kind: type[BadInputError], golden: Golden
) -> None:
    with pytest.raises(kind) as caught:
        read_spec(config)
    ours, of_transformers, _its_words = str(caught.value).partition("makes no model of this config.json")
    golden("fingerprint", ours + of_transformers)
    assert "\n" not in str(caught.value)
