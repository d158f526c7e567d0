"""Small models of every family, as config.json and as saved checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_LLAMA_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
_FALCON_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
_GPTJ_SIZES: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "rotary_dim": 4,
    "vocab_size": 96,
    "n_positions": 64,
}
_PHI3_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # its own lie beyond this vocabulary
_WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}

# Every branch of fingerprint.families that changes a tensor.
SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA_SIZES},
    "llama-tied": {"model_type": "llama", **_LLAMA_SIZES, "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", **_LLAMA_SIZES, "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", **_LLAMA_SIZES, "head_dim": 12, "num_key_value_heads": None},
    "mistral": {"model_type": "mistral", **_LLAMA_SIZES, "sliding_window": 8},
    "mixtral": {"model_type": "mixtral", **_LLAMA_SIZES, "num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", **_LLAMA_SIZES},
    "qwen2-tied-windowed": {"model_type": "qwen2", **_LLAMA_SIZES, **_WINDOWED, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **_LLAMA_SIZES, "head_dim": 16},
    "qwen3-biases": {"model_type": "qwen3", **_LLAMA_SIZES, "head_dim": 8, "attention_bias": True},
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        **_LLAMA_SIZES,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        **_LLAMA_SIZES,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
    },
    "falcon-7b": {"model_type": "falcon", **_FALCON_SIZES},
    "falcon-untied-biases": {"model_type": "falcon", **_FALCON_SIZES, "tie_word_embeddings": False, "bias": True},
    "falcon-40b": {"model_type": "falcon", **_FALCON_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon2-11b": {
        "model_type": "falcon",
        **_FALCON_SIZES,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "ffn_hidden_size": 40,
    },
    "falcon-rw": {
        "model_type": "falcon",
        **_FALCON_SIZES,
        "multi_query": False,
        "parallel_attn": False,
        "alibi": True,
        "bias": True,
    },
    "gemma2": {"model_type": "gemma2", **_LLAMA_SIZES, "head_dim": 12, "sliding_window": 8},
    "gemma2-untied-biases": {
        "model_type": "gemma2",
        **_LLAMA_SIZES,
        "head_dim": 8,
        "sliding_window": 8,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_LLAMA_SIZES,
        "head_dim": 12,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **_LLAMA_SIZES,
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "phi3": {"model_type": "phi3", **_LLAMA_SIZES, **_PHI3_TOKENS, "sliding_window": 8},
    "phi3-tied": {"model_type": "phi3", **_LLAMA_SIZES, **_PHI3_TOKENS, "tie_word_embeddings": True},
    "gpt-neox": {"model_type": "gpt_neox", **_FALCON_SIZES, "intermediate_size": 40},
    "gpt-neox-no-bias": {
        "model_type": "gpt_neox",
        **_FALCON_SIZES,
        "intermediate_size": 40,
        "attention_bias": False,
        "use_parallel_residual": False,
    },
    "opt": {"model_type": "opt", **_FALCON_SIZES, "ffn_dim": 40},
    "opt-untied-plain": {
        "model_type": "opt",
        **_FALCON_SIZES,
        "ffn_dim": 40,
        "tie_word_embeddings": False,
        "enable_bias": False,
    },
    "gptj": {"model_type": "gptj", **_GPTJ_SIZES},
    "gptj-tied-inner": {"model_type": "gptj", **_GPTJ_SIZES, "n_inner": 56, "tie_word_embeddings": True},
}


@dataclass(frozen=True)
class SavedModel:
    """A random model in memory and the two checkpoints that save_pretrained made of it."""

    name: str
    model: Any
    single: Path
    sharded: Path


@pytest.fixture(scope="session", params=SMALL_CONFIGS)
def small_config(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return a parsed config.json per variant of a family."""
    return json.loads(json.dumps(SMALL_CONFIGS[request.param]))


@pytest.fixture(scope="session", params=SMALL_CONFIGS)
def saved_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """Return a saved random model per variant: in one file, and in many with an index."""
    return _save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """A saved random Llama of four layers."""
    return _save("llama", tmp_path_factory.mktemp("saved-llama"))


@pytest.fixture(scope="session")
def published_configs() -> dict[str, dict[str, Any]]:
    """Published configs of real models with recorded facts under ``planner``."""
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    if not folder:
        pytest.skip("ISERVE_REFERENCE_DATA does not name the folder of reference data")
    return json.loads((Path(folder) / "reference" / "model-configs.json").read_text())


def _save(name: str, folder: Path) -> SavedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL_CONFIGS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: a lost one must change the logits
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    return SavedModel(name, model, folder / "single", folder / "sharded")
