"""Numbers and names for people. Units appear here and nowhere before."""

from __future__ import annotations

import re

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Quantity
from fingerprint.sanitize import printable

__all__ = [
    "gib",
    "label",
    "number",
    "page_text",
    "percent",
    "range_of",
    "seconds",
    "tick_label",
    "time_unit",
    "workload_text",
]

_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
NO_BREAK = "\u00a0"
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZE_UNITS = ((2**30, "GiB"), (2**20, "MiB"))


def number(value: float) -> str:
    """Return three significant digits, never with an exponent below a million."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return f"{value:.3g}"


def tick_label(value: float) -> str:
    """Return a round number on an axis."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.6g}"


def time_unit(largest_s: float) -> tuple[float, str]:
    """Return (seconds per unit, unit) for an axis or an interval whose largest value is ``largest_s``."""
    return next((unit for unit in _TIME_UNITS if abs(largest_s) >= unit[0]), (1e-9, "ns"))


def seconds(value_s: float) -> str:
    """Return a time in the unit that suits it."""
    if value_s == 0:
        return "0 s"
    scale, unit = time_unit(value_s)
    return f"{number(value_s / scale)} {unit}"


def range_of(quantity: Quantity) -> str:
    """Return the interval of a time: ``3.1 to 3.9 ms``."""
    scale, unit = time_unit(quantity.value)
    return f"{number(quantity.low / scale)} to {number(quantity.high / scale)} {unit}"


def gib(size_bytes: float) -> str:
    """Return a size in the unit that suits it."""
    if size_bytes == 0:
        return "0"
    size, unit = next((unit for unit in _SIZE_UNITS if size_bytes >= unit[0]), (2**10, "KiB"))
    return f"{number(size_bytes / size)} {unit}"


def percent(fraction: float) -> str:
    """Return a signed relative error."""
    return f"{fraction:+.1%}"


def label(config: DeploymentConfig) -> str:
    """Return a configuration in one line, broken between its parts only, without what it does not have."""
    parts = [f"tp={config.tp} pp={config.pp}", f"{config.weights} weights", f"{config.kv} KV"]
    if config.pruning != "none":
        parts.append(str(config.pruning))
    if config.expert_parallel:
        parts.append("expert parallel")
    if config.draft_tokens:
        parts.append(f"{config.draft_tokens} drafts")
    if config.adapter_slots:
        parts.append(f"{config.adapter_slots} adapters")
    return ", ".join(part.replace(" ", NO_BREAK) for part in parts)


def workload_text(workload: Workload) -> str:
    return f"batch {workload.batch}, {workload.input_tokens} tokens in, {workload.output_tokens} out"


def page_text(text: str) -> str:
    """Return text as a page holds it: what XML cannot hold is lost, and marks of direction are shown."""
    return printable(_NOT_XML.sub("\ufffd", text).replace("\r\n", "\n").replace("\r", "\n"))
