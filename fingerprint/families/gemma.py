"""Gemma 2 and the text models of Gemma 3: Llama with norms on both sides of a part, and windows by turns."""

from __future__ import annotations

from functools import partial

from fingerprint.config_json import Fields
from fingerprint.errors import UnsupportedModelError
from fingerprint.families.base import Blueprint, Family
from fingerprint.families.llama_like import LAYOUT, llama_like
from fingerprint.families.sliding_window import windows_by_turns

__all__ = ["FAMILIES"]

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _gemma(fields: Fields, *, architecture: str, context_default: int, qk_norm: bool, turn_key: str) -> Blueprint:
    if fields.flag("use_bidirectional_attention", default=False):
        raise UnsupportedModelError(
            f"this {fields.family} model attends both ways: it embeds and generates no text"
        )
    return llama_like(
        fields,
        architecture=architecture,
        context_default=context_default,
        kv_heads_default=4,
        head_dim_default=256,
        tied_default=True,
        attention_bias_default=False,
        qk_norm=qk_norm,
        norms=_NORMS,
        windows=partial(windows_by_turns, default=4096, turn_key=turn_key, turn_default=6 if turn_key else 2),
    )


_gemma2 = partial(_gemma, architecture="Gemma2ForCausalLM", context_default=8192, qk_norm=False, turn_key="")
_gemma3 = partial(
    _gemma,
    architecture="Gemma3ForCausalLM",
    context_default=131_072,
    qk_norm=True,
    turn_key="sliding_window_pattern",
)
FAMILIES = {
    "gemma2": Family(("Gemma2ForCausalLM",), LAYOUT, ("num_hidden_layers",), _gemma2, explicit_head_dim=True),
    "gemma3_text": Family(("Gemma3ForCausalLM",), LAYOUT, ("num_hidden_layers",), _gemma3, explicit_head_dim=True),
}
