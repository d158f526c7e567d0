"""GPT-J."""

from __future__ import annotations

from fingerprint.config_json import MAX_CONTEXT, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, divides
from fingerprint.errors import ConfigError
from fingerprint.families.base import Blueprint, Family, ModuleLayout, blueprint_of, ends_of
from fingerprint.tensor_shapes import linear, norm

__all__ = ["FAMILIES"]

_LAYOUT = ModuleLayout("transformer.h", ("transformer.wte",), ("transformer.ln_f",), "lm_head")


def _gptj(fields: Fields) -> Blueprint:
    """Return the blueprint: one LayerNorm per layer, attention without biases, MLP and head with biases."""
    hidden = fields.count("n_embd", "hidden_size")
    heads = fields.count("n_head", "num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    inner = fields.count("n_inner", default=4 * hidden, most=4 * MAX_WIDTH)
    divides("n_head", heads, "n_embd", hidden)
    head_dim = hidden // heads
    rotary = fields.count("rotary_dim", default=64)
    if rotary > head_dim or rotary % 2:
        raise ConfigError(f"rotary_dim must be even and at most n_embd / n_head = {head_dim}, got {rotary}")
    tied = fields.flag("tie_word_embeddings", default=False)
    layer = [
        *norm("ln_1", hidden, bias=True),
        *(t for name in ("q", "k", "v", "out") for t in linear(f"attn.{name}_proj", hidden, hidden, bias=False)),
        *linear("mlp.fc_in", inner, hidden, bias=True),
        *linear("mlp.fc_out", hidden, inner, bias=True),
    ]
    return blueprint_of(
        fields,
        "GPTJForCausalLM",
        layer,
        ends_of(_LAYOUT, vocab, hidden, tied=tied, norm_bias=True, head_bias=True),
        num_layers=fields.count("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_context_tokens=fields.count("n_positions", "max_position_embeddings", default=2048, most=MAX_CONTEXT),
        tied=tied,
        gated_mlp=False,
    )


FAMILIES = {"gptj": Family(("GPTJForCausalLM",), _LAYOUT, ("n_layer", "num_hidden_layers"), _gptj)}
