"""Longest context of a model by its config.json, by vLLM's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fingerprint.config_json import MAX_CONTEXT, Fields, show
from fingerprint.errors import ConfigError

__all__ = ["CONTEXT_KEYS", "context_tokens"]

CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length"),
    *("max_seq_length", "seq_len"),
)
"""Names of the context in config.json."""
_BEFORE_ALL = "model_max_length"  # Command-R's

# Types of which max_position_embeddings is the scaled context already.
_SCALED_ALREADY = frozenset(
    {"su", "longrope", "llama3", "yarn", "telechat3-yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
_SCALED_FAMILY = "gemma3"  # as those types, whatever its own


def context_tokens(fields: Fields, *, default: int) -> int:
    """Return the tokens of the longest context of a rotary model: the smallest that config.json gives, scaled.

    As in vLLM 0.33.0's ``derive_max_model_len_and_key`` and ``_get_and_verify_max_len``; ``model_max_length`` goes
    before all. A scaling of another type than yarn, llama3 and longrope (``linear``, ``dynamic``) multiplies it.

    Args:
        fields: the text model's.
        default: ``max_position_embeddings`` where it is absent.

    Raises:
        ConfigError: a length or a factor is no number, or the context leaves the bounds.
    """
    first, *further = CONTEXT_KEYS
    given = [fields.count(key, most=MAX_CONTEXT) for key in further if fields.given(key)[1] is not None]
    before_all = fields.given(_BEFORE_ALL)[1]
    if isinstance(before_all, int) and 1 <= before_all <= MAX_CONTEXT:
        return _scaled(fields, before_all)
    return _scaled(fields, min([fields.count(first, default=default, most=MAX_CONTEXT), *given]))


def _scaled(fields: Fields, context: int) -> int:
    """Return ``context`` times the factor of a scaling that it does not have yet."""
    if _SCALED_FAMILY in fields.family or _SCALED_FAMILY in str(fields.given("model_type")[1]):
        return context
    factor: object = None
    for rope in _each(fields):
        kind = rope.get("rope_type", rope.get("type"))
        if not isinstance(kind, str) or kind not in _SCALED_ALREADY:
            factor = rope.get("factor", factor)
    if factor is None:
        return context
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ConfigError(f"the factor of rope_scaling must be a number, got {show(factor)}")
    if not 1 <= context * factor <= MAX_CONTEXT:
        raise ConfigError(
            f"the factor of rope_scaling must leave a context of 1 to {MAX_CONTEXT:,} tokens, got {show(factor)} "
            f"for {context:,} tokens"
        )
    return int(context * factor)


def _each(fields: Fields) -> Iterator[Mapping[object, object]]:
    """Yield the model's rotary parameters: one, or of each type of layers."""
    rope = fields.given("rope_scaling")[1] or fields.given("rope_parameters")[1]
    if not isinstance(rope, Mapping) or not rope:
        return
    if all(isinstance(part, Mapping) or part is None for part in rope.values()):
        yield from (part for part in rope.values() if isinstance(part, Mapping))
    else:
        yield rope
