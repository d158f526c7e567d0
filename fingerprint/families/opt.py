"""OPT: learned positions, LayerNorms with bias, plain MLP."""

from __future__ import annotations

from fingerprint.config_json import MAX_CONTEXT, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, divides
from fingerprint.errors import UnsupportedModelError
from fingerprint.families.base import Blueprint, Family, ModuleLayout, blueprint_of, ends_of
from fingerprint.tensor_shapes import Role, TensorShape, linear, norm

__all__ = ["FAMILIES"]

_LAYOUT = ModuleLayout(
    "model.decoder.layers",
    ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
    ("model.decoder.final_layer_norm",),
    "lm_head",
)
_USUAL = {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}
_OFFSET = 2  # the position table begins with two rows that no token uses


def _opt(fields: Fields) -> Blueprint:
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    inner = fields.count("ffn_dim", default=3072, most=4 * MAX_WIDTH)
    context = fields.count("max_position_embeddings", default=2048, most=MAX_CONTEXT)
    divides("num_attention_heads", heads, "hidden_size", hidden)
    _refuse_350m(fields, hidden)
    tied = fields.flag("tie_word_embeddings", default=True)
    bias = fields.flag("enable_bias", default=True)
    layer = [
        *(t for name in "kvq" for t in linear(f"self_attn.{name}_proj", hidden, hidden, bias=bias)),
        *linear("self_attn.out_proj", hidden, hidden, bias=bias),
        *norm("self_attn_layer_norm", hidden, bias=True),
        *linear("fc1", inner, hidden, bias=bias),
        *linear("fc2", hidden, inner, bias=bias),
        *norm("final_layer_norm", hidden, bias=True),
    ]
    ends = ends_of(_LAYOUT, vocab, hidden, tied=tied, norm_bias=True, head_bias=False)
    ends.embedding.append(
        TensorShape(f"{_LAYOUT.embedding[1]}.weight", (context + _OFFSET, hidden), Role.EMBEDDING)
    )
    return blueprint_of(
        fields,
        "OPTForCausalLM",
        layer,
        ends,
        num_layers=num_layers,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_context_tokens=context,
        tied=tied,
        gated_mlp=False,
    )


def _refuse_350m(fields: Fields, hidden: int) -> None:
    """Refuse the published size whose embedding is narrower than its layers, with its norms behind them."""
    if (width := fields.count("word_embed_proj_dim", default=hidden)) != hidden:
        raise UnsupportedModelError(
            f"word_embed_proj_dim={width} with hidden_size={hidden} is not supported: of the published OPT models "
            "only opt-350m has it"
        )
    for name, usual in _USUAL.items():
        if fields.flag(name, default=usual) is not usual:
            raise UnsupportedModelError(f"{name}={not usual} is not supported; most OPT models have {usual}")


FAMILIES = {"opt": Family(("OPTForCausalLM",), _LAYOUT, ("num_hidden_layers",), _opt, ("ffn_dim",))}
