"""Llama and the families that differ from it in a bias, a norm, a window or the MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fingerprint.config_json import MAX_LAYERS, MAX_VOCAB, Fields, divides
from fingerprint.context_length import context_tokens
from fingerprint.errors import ConfigError
from fingerprint.families.base import Blueprint, Family, ModuleLayout, blueprint_of, ends_of
from fingerprint.families.mlp import Mlp, gated, mixtral_experts, qwen_experts
from fingerprint.families.sliding_window import (
    Windows,
    no_windows,
    one_window,
    qwen2_moe_windows,
    qwen3_moe_windows,
    qwen_windows,
)
from fingerprint.tensor_shapes import Role, TensorShape, linear, norm

__all__ = ["FAMILIES", "LAYOUT", "llama_like", "rotary_head_dim"]

LAYOUT = ModuleLayout("model.layers", ("model.embed_tokens",), ("model.norm",), "lm_head")


def llama_like(
    fields: Fields,
    *,
    architecture: str,
    context_default: int,
    kv_heads_default: int | None = None,
    head_dim_default: int | None = None,
    tied_default: bool = False,
    attention_bias_default: bool | None = None,
    qkv_bias: Callable[[Fields], bool] = lambda fields: False,
    qk_norm: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    mlp: Callable[[Fields, int], Mlp] = gated,
    has_sinks: bool = False,
    windows: Callable[[Fields, int], Windows] = no_windows,
) -> Blueprint:
    """Return the blueprint: RMSNorm, rotary attention with q, k, v, o matrices, gated MLP or experts.

    Args:
        architecture: the causal-LM class.
        context_default, kv_heads_default, head_dim_default, tied_default: what the config class assumes when the
            field is left out; None: as many KV heads as heads, hidden_size / heads.
        attention_bias_default: likewise of ``attention_bias`` (q, k, v, o); None: the family does not read it.
        qkv_bias: whether q, k and v have a bias and o has none.
        qk_norm: queries and keys are normalised per head.
        has_sinks: each head has one more logit that no value belongs to.
    """
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("hidden_size")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    heads, kv_heads = _head_counts(fields, kv_heads_default)
    head_dim = rotary_head_dim(fields, hidden, heads, head_dim_default)
    tied = fields.flag("tie_word_embeddings", default=tied_default)
    reads_bias = attention_bias_default is not None
    all_bias = reads_bias and fields.flag("attention_bias", default=bool(attention_bias_default))
    q_bias = qkv_bias(fields) or all_bias
    after = mlp(fields, hidden)
    layer = [
        *(tensor for name in norms for tensor in norm(name, hidden, bias=False)),
        *_attention(hidden, heads * head_dim, kv_heads * head_dim, qkv_bias=q_bias, o_bias=all_bias),
        *(_query_and_key_norms(head_dim) if qk_norm else []),
        *([TensorShape("self_attn.sinks", (heads,), Role.BIAS)] if has_sinks else []),
        *after.tensors,
    ]
    return blueprint_of(
        fields,
        architecture,
        layer,
        ends_of(LAYOUT, vocab, hidden, tied=tied, norm_bias=False, head_bias=False),
        num_layers=num_layers,
        intermediate_size=after.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=context_tokens(fields, default=context_default),
        tied=tied,
        num_experts=after.num_experts,
        experts_per_token=after.experts_per_token,
        layer_windows=windows(fields, num_layers),
    )


def _query_and_key_norms(head_dim: int) -> list[TensorShape]:
    return [tensor for name in ("q_norm", "k_norm") for tensor in norm(f"self_attn.{name}", head_dim, bias=False)]


def _head_counts(fields: Fields, kv_heads_default: int | None) -> tuple[int, int]:
    """Return the heads and the KV heads, which divide them."""
    heads = fields.count("num_attention_heads")
    class_default = heads if fields.has("num_key_value_heads") else (kv_heads_default or heads)  # null: as heads
    kv_heads = fields.count("num_key_value_heads", default=class_default)
    divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    return heads, kv_heads


def rotary_head_dim(fields: Fields, hidden: int, heads: int, class_default: int | None) -> int:
    """Return ``head_dim``, else hidden size over heads; even, for rotary embeddings turn pairs."""
    head_dim = fields.count("head_dim", default=class_default or 0)
    if head_dim == 0:
        divides("num_attention_heads", heads, "hidden_size", hidden)
        head_dim = hidden // heads
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _attention(hidden: int, q_width: int, kv_width: int, *, qkv_bias: bool, o_bias: bool) -> list[TensorShape]:
    return [
        *linear("self_attn.q_proj", q_width, hidden, bias=qkv_bias),
        *linear("self_attn.k_proj", kv_width, hidden, bias=qkv_bias),
        *linear("self_attn.v_proj", kv_width, hidden, bias=qkv_bias),
        *linear("self_attn.o_proj", hidden, q_width, bias=o_bias),
    ]


def _row(
    architecture: str,
    *,
    width_keys: tuple[str, ...] = ("intermediate_size",),
    explicit_head_dim: bool = False,
    **options: Any,
) -> Family:
    read = partial(llama_like, architecture=architecture, **options)
    return Family((architecture,), LAYOUT, ("num_hidden_layers",), read, width_keys, explicit_head_dim)


FAMILIES = {
    "llama": _row(
        "LlamaForCausalLM",
        explicit_head_dim=True,
        context_default=2048,
        attention_bias_default=False,
        mlp=partial(gated, reads_bias=True),
    ),
    "mistral": _row(
        "MistralForCausalLM",
        explicit_head_dim=True,
        context_default=131072,
        kv_heads_default=8,
        windows=partial(one_window, default=4096),
    ),
    "mixtral": _row(
        "MixtralForCausalLM",
        explicit_head_dim=True,
        context_default=131072,
        kv_heads_default=8,
        mlp=mixtral_experts,
        windows=partial(one_window, default=None),
    ),
    "qwen2": _row(
        "Qwen2ForCausalLM",
        context_default=32768,
        kv_heads_default=32,
        qkv_bias=lambda fields: True,
        windows=qwen_windows,
    ),
    "qwen3": _row(
        "Qwen3ForCausalLM",
        explicit_head_dim=True,
        context_default=32768,
        kv_heads_default=32,
        head_dim_default=128,
        attention_bias_default=False,
        qk_norm=True,
        windows=qwen_windows,
    ),
    "qwen2_moe": _row(
        "Qwen2MoeForCausalLM",
        width_keys=("moe_intermediate_size", "shared_expert_intermediate_size"),
        context_default=32768,
        kv_heads_default=16,
        qkv_bias=lambda fields: fields.flag("qkv_bias", default=True),
        mlp=partial(qwen_experts, count_default=60, inner_default=1408, per_token_default=4, shared=True),
        windows=qwen2_moe_windows,
    ),
    "qwen3_moe": _row(
        "Qwen3MoeForCausalLM",
        explicit_head_dim=True,
        width_keys=("moe_intermediate_size",),
        context_default=32768,
        kv_heads_default=4,
        attention_bias_default=False,
        qk_norm=True,
        mlp=partial(qwen_experts, count_default=128, inner_default=768, per_token_default=8, shared=False),
        windows=qwen3_moe_windows,
    ),
}
