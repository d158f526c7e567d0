"""Attention windows by layer: a number of tokens, or None for all the way to the beginning.

Layers that look back differently are of different kinds: beyond the window they cost different times and KV.
"""

from __future__ import annotations

from collections.abc import Callable

from fingerprint.config_json import MAX_CONTEXT, MAX_WIDTH, Fields

__all__ = [
    "Windows",
    "no_windows",
    "one_window",
    "qwen2_moe_windows",
    "qwen3_moe_windows",
    "qwen_windows",
    "windows_by_turns",
]

Windows = tuple[int | None, ...]  # of each layer


def no_windows(fields: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


def one_window(fields: Fields, num_layers: int, *, default: int | None) -> Windows:
    """Return the same window for all layers."""
    return (_window(fields, default),) * num_layers


def windows_by_turns(
    fields: Fields, num_layers: int, *, default: int, turn_key: str = "", turn_default: int = 2
) -> Windows:
    """Return windows by turns: of every so many layers the last looks all the way back (Gemma 2 and 3, GPT-OSS).

    Args:
        default: the window, when the field is left out.
        turn_key: the field that says of how many; ``""`` where there is none.
    """
    turn = fields.count(turn_key, default=turn_default) if turn_key else turn_default
    return _by_type(fields, num_layers, _window(fields, default), lambda layer: (layer + 1) % turn != 0)


def qwen_windows(fields: Fields, num_layers: int) -> Windows:
    """Return full windows below ``max_window_layers``, sliding from there on, if the switch is on at all."""
    first_sliding = fields.count("max_window_layers", default=28, least=0, most=MAX_WIDTH)
    return _by_type(fields, num_layers, _switched(fields), lambda layer: layer >= first_sliding)


def qwen2_moe_windows(fields: Fields, num_layers: int) -> Windows:
    """Let every second layer below ``max_window_layers`` slide, if the switch is on at all."""
    first_full = fields.count("max_window_layers", default=28, least=0, most=MAX_WIDTH)
    return _by_type(
        fields, num_layers, _switched(fields), lambda layer: layer < first_full and (layer + 1) % 2 != 0
    )


def qwen3_moe_windows(fields: Fields, num_layers: int) -> Windows:
    """Return one window for all layers, by its switch."""
    return (_switched(fields),) * num_layers


def _by_type(fields: Fields, num_layers: int, window: int | None, slides: Callable[[int], bool]) -> Windows:
    """Return windows by ``layer_types``; where it is left out, as the class fills it in."""
    types = fields.layer_types(num_layers)
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    return tuple(window if slides(layer) else None for layer in range(num_layers))


def _switched(fields: Fields) -> int | None:
    return _window(fields, 4096) if fields.flag("use_sliding_window", default=False) else None


def _window(fields: Fields, default: int | None) -> int | None:
    """Return the window: a null switches it off, an absent field means the class's default."""
    if fields.given("sliding_window")[1] is None:
        return None if fields.has("sliding_window") else default
    return fields.count("sliding_window", most=MAX_CONTEXT)
