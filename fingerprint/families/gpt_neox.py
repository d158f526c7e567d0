"""GPT-NeoX and Pythia: LayerNorms with bias, fused query_key_value, plain MLP."""

from __future__ import annotations

from fingerprint.config_json import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, divides
from fingerprint.context_length import context_tokens
from fingerprint.families.base import Blueprint, Family, ModuleLayout, blueprint_of, ends_of
from fingerprint.tensor_shapes import linear, norm

__all__ = ["FAMILIES"]

_LAYOUT = ModuleLayout(
    "gpt_neox.layers", ("gpt_neox.embed_in",), ("gpt_neox.final_layer_norm",), "lm_head", stored_head="embed_out"
)


def _gpt_neox(fields: Fields) -> Blueprint:
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    inner = fields.count("intermediate_size", default=24576, most=4 * MAX_WIDTH)
    divides("num_attention_heads", heads, "hidden_size", hidden)
    tied = fields.flag("tie_word_embeddings", default=False)
    bias = fields.flag("attention_bias", default=True)
    layer = [
        *norm("input_layernorm", hidden, bias=True),
        *norm("post_attention_layernorm", hidden, bias=True),
        *linear("attention.query_key_value", 3 * hidden, hidden, bias=bias),
        *linear("attention.dense", hidden, hidden, bias=bias),
        *linear("mlp.dense_h_to_4h", inner, hidden, bias=True),
        *linear("mlp.dense_4h_to_h", hidden, inner, bias=True),
    ]
    return blueprint_of(
        fields,
        "GPTNeoXForCausalLM",
        layer,
        ends_of(_LAYOUT, vocab, hidden, tied=tied, norm_bias=True, head_bias=False),
        num_layers=num_layers,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_context_tokens=context_tokens(fields, default=2048),
        tied=tied,
        gated_mlp=False,
    )


FAMILIES = {"gpt_neox": Family(("GPTNeoXForCausalLM",), _LAYOUT, ("num_hidden_layers",), _gpt_neox)}
