"""Falcon, in its three attention layouts."""

from __future__ import annotations

from fingerprint.config_json import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, divides
from fingerprint.context_length import context_tokens
from fingerprint.errors import ConfigError
from fingerprint.families.base import Blueprint, Family, ModuleLayout, blueprint_of, ends_of
from fingerprint.tensor_shapes import linear, norm

__all__ = ["FAMILIES"]

_LAYOUT = ModuleLayout("transformer.h", ("transformer.word_embeddings",), ("transformer.ln_f",), "lm_head")


def _falcon(fields: Fields) -> Blueprint:
    """Return the blueprint: LayerNorms with bias, fused query_key_value, plain MLP, three attention layouts."""
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("n_embed", "hidden_size")
    heads = fields.count("num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    inner = fields.count("ffn_hidden_size", default=4 * hidden, most=4 * MAX_WIDTH)
    divides("num_attention_heads", heads, "hidden_size", hidden)
    head_dim = hidden // heads
    if head_dim % 2 and not fields.flag("alibi", default=False):
        raise ConfigError(f"hidden_size / num_attention_heads must be even for rotary embeddings, got {head_dim}")
    tied = fields.flag("tie_word_embeddings", default=True)
    bias = fields.flag("bias", default=False)
    kv_heads = _falcon_kv_heads(fields, heads)
    layer = [
        *(tensor for name in _falcon_norms(fields) for tensor in norm(name, hidden, bias=True)),
        *linear("self_attention.query_key_value", (heads + 2 * kv_heads) * head_dim, hidden, bias=bias),
        *linear("self_attention.dense", hidden, hidden, bias=bias),
        *linear("mlp.dense_h_to_4h", inner, hidden, bias=bias),
        *linear("mlp.dense_4h_to_h", hidden, inner, bias=bias),
    ]
    return blueprint_of(
        fields,
        "FalconForCausalLM",
        layer,
        ends_of(_LAYOUT, vocab, hidden, tied=tied, norm_bias=True, head_bias=False),
        num_layers=num_layers,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=context_tokens(fields, default=2048),
        tied=tied,
        gated_mlp=False,
    )


def _falcon_kv_heads(fields: Fields, heads: int) -> int:
    if not fields.flag("new_decoder_architecture", default=False):
        # num_kv_heads is not read here: one head with multi_query, else as many as queries
        return 1 if fields.flag("multi_query", default=True) else heads
    kv_heads = fields.count("num_kv_heads", default=heads)
    divides("num_kv_heads", kv_heads, "num_attention_heads", heads)
    return kv_heads


def _falcon_norms(fields: Fields) -> tuple[str, ...]:
    grouped = fields.flag("new_decoder_architecture", default=False)
    if not fields.flag("parallel_attn", default=True):
        if grouped:
            raise ConfigError("parallel_attn must be true with new_decoder_architecture, got False")
        return ("input_layernorm", "post_attention_layernorm")
    count = fields.count("num_ln_in_parallel_attn", default=2 if grouped else 1, most=2)
    if count == 2 and not grouped:
        raise ConfigError("num_ln_in_parallel_attn must be 1 without new_decoder_architecture, got 2")
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)


FAMILIES = {
    "falcon": Family(("FalconForCausalLM", "RWForCausalLM"), _LAYOUT, ("num_hidden_layers",), _falcon),
}
