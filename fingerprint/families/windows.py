"""How far back a layer looks, where config.json says that not to the beginning."""

from __future__ import annotations

from fingerprint.config_json import MAX_CONTEXT, MAX_WIDTH, Fields

__all__ = ["one_window", "qwen2_moe_window", "qwen3_moe_window", "qwen_window"]


def one_window(fields: Fields, num_layers: int, *, default: int | None) -> int | None:
    """One window for all layers; a null switches it off, an absent field means the class's default."""
    if fields.given("sliding_window")[1] is None:
        return None if fields.has("sliding_window") else default
    return fields.count("sliding_window", most=MAX_CONTEXT)


def qwen_window(fields: Fields, num_layers: int) -> int | None:
    """The window if every layer slides. With layers of both kinds all count as full, so KV is never too small."""
    first_sliding = fields.count("max_window_layers", default=28, least=0, most=MAX_WIDTH)
    types = fields.layer_types(num_layers)
    if not fields.flag("use_sliding_window", default=False):
        return None
    every = all(kind == "sliding_attention" for kind in types) if types is not None else first_sliding == 0
    return one_window(fields, num_layers, default=4096) if every else None


def qwen2_moe_window(fields: Fields, num_layers: int) -> int | None:
    """As :func:`qwen_window`; where no ``layer_types`` are given, every second layer is full whatever else is."""
    return None if fields.layer_types(num_layers) is None else qwen_window(fields, num_layers)


def qwen3_moe_window(fields: Fields, num_layers: int) -> int | None:
    """One switch and one window for all layers."""
    on = fields.flag("use_sliding_window", default=False)
    return one_window(fields, num_layers, default=4096) if on else None
