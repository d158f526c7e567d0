"""Phi-3 and Phi-4-mini: Llama with q, k and v in one matrix, and gate and up in one."""

from __future__ import annotations

from fingerprint.config_json import MAX_LAYERS, MAX_VOCAB, Fields, divides
from fingerprint.context_length import context_tokens
from fingerprint.families.base import Blueprint, Family, blueprint_of, ends_of
from fingerprint.families.llama_like import LAYOUT, rotary_head_dim
from fingerprint.families.sliding_window import one_window
from fingerprint.tensor_shapes import linear, norm

__all__ = ["FAMILIES"]


def _phi3(fields: Fields) -> Blueprint:
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("hidden_size")
    inner = fields.count("intermediate_size")
    heads = fields.count("num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    kv_heads = fields.count("num_key_value_heads", default=heads)
    divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    head_dim = rotary_head_dim(fields, hidden, heads, None)
    tied = fields.flag("tie_word_embeddings", default=False)
    layer = [
        *norm("input_layernorm", hidden, bias=False),
        *linear("self_attn.qkv_proj", (heads + 2 * kv_heads) * head_dim, hidden, bias=False),
        *linear("self_attn.o_proj", hidden, heads * head_dim, bias=False),
        *norm("post_attention_layernorm", hidden, bias=False),
        *linear("mlp.gate_up_proj", 2 * inner, hidden, bias=False),
        *linear("mlp.down_proj", hidden, inner, bias=False),
    ]
    return blueprint_of(
        fields,
        "Phi3ForCausalLM",
        layer,
        ends_of(LAYOUT, vocab, hidden, tied=tied, norm_bias=False, head_bias=False),
        num_layers=num_layers,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=context_tokens(fields, default=4096),
        tied=tied,
        layer_windows=one_window(fields, num_layers, default=None),
    )


FAMILIES = {"phi3": Family(("Phi3ForCausalLM",), LAYOUT, ("num_hidden_layers",), _phi3, explicit_head_dim=True)}
