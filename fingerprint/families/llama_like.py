"""Llama and the families that differ from it in a bias, a norm, a window or the MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fingerprint.config_json import MAX_CONTEXT, MAX_LAYERS, MAX_VOCAB, Fields, divides
from fingerprint.errors import ConfigError
from fingerprint.families.blueprint import Blueprint, Family, ModuleLayout, blueprint_of, ends_of
from fingerprint.families.windows import one_window, qwen_window
from fingerprint.tensor_shapes import Role, TensorShape, linear, norm

__all__ = ["FAMILIES"]

MAX_EXPERTS = 4096
_LAYOUT = ModuleLayout("model.layers", ("model.embed_tokens",), ("model.norm",), "lm_head")


def _llama_like(
    fields: Fields,
    *,
    architecture: str,
    context_default: int,
    kv_heads_default: int | None = None,
    head_dim_default: int | None = None,
    has_attention_bias: bool = False,
    has_mlp_bias: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: bool = False,
    window: Callable[[Fields, int], int | None] = lambda fields, num_layers: None,
) -> Blueprint:
    """RMSNorm, rotary attention with q, k, v, o matrices, gated MLP or experts.

    Args:
        architecture: the causal-LM class.
        context_default, kv_heads_default, head_dim_default: what the config class assumes when the field is left
            out; None: as many KV heads as heads, hidden_size / heads.
        has_attention_bias, has_mlp_bias: the family reads ``attention_bias`` (q, k, v, o) or ``mlp_bias``.
        qkv_bias: q, k and v always have a bias, o never.
        qk_norm: queries and keys are normalised per head.
    """
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("hidden_size")
    inner = fields.count("intermediate_size")
    heads = fields.count("num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    class_default = heads if fields.has("num_key_value_heads") else (kv_heads_default or heads)  # null: as heads
    kv_heads = fields.count("num_key_value_heads", default=class_default)
    divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    head_dim = _head_dim(fields, hidden, heads, head_dim_default)
    num_experts = fields.count("num_local_experts", "num_experts", default=8, most=MAX_EXPERTS) if experts else 0
    tied = fields.flag("tie_word_embeddings", default=False)
    all_bias = has_attention_bias and fields.flag("attention_bias", default=False)
    mlp_bias = has_mlp_bias and fields.flag("mlp_bias", default=False)
    layer = [
        *norm("input_layernorm", hidden, bias=False),
        *_attention(hidden, heads * head_dim, kv_heads * head_dim, qkv_bias=qkv_bias or all_bias, o_bias=all_bias),
        *(norm("self_attn.q_norm", head_dim, bias=False) if qk_norm else []),
        *(norm("self_attn.k_norm", head_dim, bias=False) if qk_norm else []),
        *norm("post_attention_layernorm", hidden, bias=False),
        *(_experts(num_experts, hidden, inner) if experts else _gated_mlp(hidden, inner, bias=mlp_bias)),
    ]
    return blueprint_of(
        fields,
        architecture,
        layer,
        ends_of(_LAYOUT, vocab, hidden, tied=tied, norm_bias=False, head_bias=False),
        num_layers=num_layers,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=fields.count("max_position_embeddings", default=context_default, most=MAX_CONTEXT),
        tied=tied,
        num_experts=num_experts,
        experts_per_token=fields.count("num_experts_per_tok", default=2, most=num_experts) if experts else 0,
        sliding_window=window(fields, num_layers),
    )


def _head_dim(fields: Fields, hidden: int, heads: int, class_default: int | None) -> int:
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


def _gated_mlp(hidden: int, inner: int, *, bias: bool) -> list[TensorShape]:
    return [
        *linear("mlp.gate_proj", inner, hidden, bias=bias),
        *linear("mlp.up_proj", inner, hidden, bias=bias),
        *linear("mlp.down_proj", hidden, inner, bias=bias),
    ]


def _experts(count: int, hidden: int, inner: int) -> list[TensorShape]:
    """Mixtral's published names; transformers stacks the experts only in memory."""
    tensors = [TensorShape("block_sparse_moe.gate.weight", (count, hidden), Role.ROUTER)]
    for expert in range(count):
        name = f"block_sparse_moe.experts.{expert}"
        tensors += linear(f"{name}.w1", inner, hidden, bias=False, role=Role.EXPERT)
        tensors += linear(f"{name}.w2", hidden, inner, bias=False, role=Role.EXPERT)
        tensors += linear(f"{name}.w3", inner, hidden, bias=False, role=Role.EXPERT)
    return tensors


def _row(architecture: str, **options: Any) -> Family:
    read = partial(_llama_like, architecture=architecture, **options)
    return Family((architecture,), _LAYOUT, ("num_hidden_layers",), read)


FAMILIES = {
    "llama": _row(
        "LlamaForCausalLM",
        context_default=2048,
        has_attention_bias=True,
        has_mlp_bias=True,
    ),
    "mistral": _row(
        "MistralForCausalLM",
        context_default=131072,
        kv_heads_default=8,
        window=partial(one_window, default=4096),
    ),
    "mixtral": _row(
        "MixtralForCausalLM",
        context_default=131072,
        kv_heads_default=8,
        experts=True,
        window=partial(one_window, default=None),
    ),
    "qwen2": _row(
        "Qwen2ForCausalLM",
        context_default=32768,
        kv_heads_default=32,
        qkv_bias=True,
        window=qwen_window,
    ),
    "qwen3": _row(
        "Qwen3ForCausalLM",
        context_default=32768,
        kv_heads_default=32,
        head_dim_default=128,
        has_attention_bias=True,
        qk_norm=True,
        window=qwen_window,
    ),
}
