"""Context that a scaling of rotary embeddings gives a model, by vLLM's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fingerprint.config_json import MAX_CONTEXT, Fields, show
from fingerprint.errors import ConfigError

__all__ = ["scaled_context"]

# Types of which max_position_embeddings is the scaled context already.
_SCALED_ALREADY = frozenset(
    {"su", "longrope", "llama3", "yarn", "telechat3-yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
_SCALED_FAMILY = "gemma3"  # as those types, whatever its own


def scaled_context(fields: Fields, context: int) -> int:
    """Return the tokens of the longest context of a rotary model whose config.json gives ``context``.

    A scaling of another type (``linear``, ``dynamic``) multiplies it, as in vLLM 0.33.0's
    ``_get_and_verify_max_len``; yarn, llama3 and longrope do not.

    Args:
        fields: the text model's.

    Raises:
        ConfigError: the factor is no number, or the context leaves the bounds.
    """
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
