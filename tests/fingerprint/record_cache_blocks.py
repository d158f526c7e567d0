"""Record how vLLM itself groups layers into blocks, and what it asks for one request, for models of every kind.

    python -m tests.fingerprint.record_cache_blocks

It needs the Python of an environment with vLLM (no GPU; the planning is plain Python). Heads of K and V are those
that the config publishes, divided as vLLM's attention does, where all layers attend; the sizes of latents, and of
what is kept next to states, are ours. The groups, the bytes of a block and the least cache that vLLM starts with
are vLLM's.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fingerprint import cache_blocks, description
from fingerprint.config import DeploymentConfig
from fingerprint.families import read_spec
from fingerprint.model_spec import ModelSpec
from tests.fingerprint import family_truths

RECORD = Path(__file__).parent / "recorded" / "cache_blocks.json"
PUBLIC = (
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "ibm-granite/granite-4.0-h-small",
    "LiquidAI/LFM2-1.2B",
    "google/gemma-3-27b-it (text)",
    "google/gemma-4-26B-A4B (text)",
    "openai/gpt-oss-20b",
    "mistralai/Mistral-7B-v0.1",
    "deepseek-ai/DeepSeek-V2-Lite",
    "zai-org/GLM-5",
    "meta-llama/Llama-3.1-8B",
)
DEFAULTS = (
    "FalconH1ForCausalLM",
    "Zamba2ForCausalLM",
    "KimiLinearForCausalLM",
    "JambaForCausalLM",
    "Mamba2ForCausalLM",
)
LENGTHS, DEGREES, STEP_TOKENS, STEPS_IN_FLIGHT = (640, 131_072), (1, 8), 8192, 2


def config_of(name: str) -> dict[str, Any]:
    """Return the config of a public model, or an architecture's with its class's defaults."""
    return (family_truths.public(name) if name in PUBLIC else family_truths.default(name)).config


def model_of(name: str) -> ModelSpec:
    """Return a public model, or an architecture with its class's defaults."""
    return read_spec(config_of(name)) if name in PUBLIC else description.described_config(config_of(name))


def main() -> None:
    """Record all."""
    vllm = importlib.import_module("vllm.v1.kv_cache_interface")
    planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    layout = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout.LBNHC
    found: dict[str, Any] = {}
    for name in (*PUBLIC, *DEFAULTS):
        model = model_of(name)
        for tp in DEGREES:
            of_degree: dict[str, Any] = {}
            for length in LENGTHS:
                tokens = min(length, model.max_context_tokens)
                asked = _vllm_config(tokens, layout, has_prefixes=model.keeps_state and model.keeps_tokens)
                groups = planning.get_kv_cache_groups(asked, _specs(vllm, model, tp, config_of(name)))
                block = planning._get_kv_cache_bytes_per_block(groups, layout)
                specs = [group.kv_cache_spec for group in groups]
                blocks = sum(-(-spec.max_memory_usage_bytes(asked) // spec.page_size_bytes) for spec in specs)
                of_degree |= {"groups": len(groups), "block_bytes": block, f"least_{length}": (1 + blocks) * block}
            found.setdefault(name, {})[str(tp)] = of_degree
    document = {"vllm": "0.33.0", "layout": layout.name, "step_tokens": STEP_TOKENS, "models": found}
    RECORD.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _vllm_config(tokens: int, layout: Any, *, has_prefixes: bool) -> SimpleNamespace:
    """Return the part of vLLM's config that the planning asks, for requests of ``tokens``."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=STEP_TOKENS
        ),
        model_config=SimpleNamespace(max_model_len=tokens),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(
            mamba_cache_mode="align" if has_prefixes else "none", get_resolved_kv_cache_layout=lambda: layout
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        max_in_flight_tokens=STEPS_IN_FLIGHT * STEP_TOKENS,
    )


def _published_heads(published: dict[str, Any], window: int | None, tp: int) -> dict[str, Any]:
    """Return the K and V of a layer on one rank, as ``Gemma4Attention`` and its like have them."""
    heads = published.get("num_key_value_heads") or published["num_attention_heads"]
    width = published.get("head_dim") or published["hidden_size"] // published["num_attention_heads"]
    if window is None:
        heads = published.get("num_global_key_value_heads") or heads
        width = published.get("global_head_dim") or width
    return {"num_kv_heads": max(1, heads // tp), "head_size": width, "dtype": torch.bfloat16}


def _specs(vllm: Any, model: ModelSpec, tp: int, published: dict[str, Any]) -> dict[str, Any]:
    """Return each layer's cache as vLLM specifies it: heads of K and V, or bytes of a token or of a state."""
    config = DeploymentConfig(engine="vllm", tp=tp)
    every, (caches,) = cache_blocks._caches_of_stages(model, config, [model.num_layers])
    page = cache_blocks._page_bytes(every, model)
    most = max(cache.token_bytes for cache in every)
    tokens = page // most if most else cache_blocks.BLOCK_TOKENS
    specs: dict[str, Any] = {}
    for place, cache in enumerate(caches):
        sizes = {"block_size": tokens, "num_kv_heads": 1, "dtype": torch.uint8}
        if not cache.token_bytes:
            spec = vllm.MambaSpec(
                block_size=tokens,
                shapes=((cache.state_bytes,),),
                dtypes=(torch.uint8,),
                page_size_padded=page,
                mamba_cache_mode="align" if most else "none",
                num_prefill_checkpoint_blocks=int(most > 0),
            )
        elif cache_blocks._is_latent(model):
            spec = vllm.MLAAttentionSpec(head_size=cache.token_bytes, **sizes)
        else:
            heads = sizes | {"head_size": cache.token_bytes // 2}
            if not model.keeps_state:
                heads = {"block_size": tokens} | _published_heads(published, cache.window, tp)
            if cache.window is None:
                spec = vllm.FullAttentionSpec(**heads)
            else:
                spec = vllm.SlidingWindowSpec(sliding_window=cache.window, **heads)
        specs[f"layers.{place}.cache"] = spec
    return specs


if __name__ == "__main__":
    main()
