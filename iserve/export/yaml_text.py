"""YAML of plain values, for files that people read and edit. Dicts, lists, strings, numbers, booleans and None."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

__all__ = ["Value", "comment", "document"]

Value: TypeAlias = "Mapping[str, Value] | Sequence[Value] | str | int | float | bool | None"

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# What YAML 1.1 readers take for something else than a string.
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_BLOCK = re.compile(r"[!-~][ -~]*\n(?:[ -~]*\n)*")  # lines of printable ASCII, the first one not indented
_ASTRAL = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")


def document(value: Mapping[str, Value]) -> str:
    """Return a YAML document, keys in their order."""
    return "\n".join(_lines(value)) + "\n"


def comment(lines: Iterable[str]) -> str:
    """Return each line after a ``#``, whatever characters it has."""
    return "".join(f"# {''.join(c if c.isprintable() else ' ' for c in line)}".rstrip() + "\n" for line in lines)


def _lines(value: Mapping[str, Value] | Sequence[Value]) -> list[str]:
    """Return lines of a collection that is not empty."""
    lines: list[str] = []
    if isinstance(value, Mapping):
        for key, item in value.items():
            lines += _entry(f"{_string(key)}:", item, indented=not isinstance(item, list | tuple))
        return lines
    for item in value:
        if _is_empty(item) or not isinstance(item, Mapping | list | tuple):
            lines += _entry("-", item, indented=True)
        else:
            first, *rest = _lines(item)
            lines += [f"- {first}", *(f"  {line}" if line else "" for line in rest)]
    return lines


def _entry(head: str, item: Value, *, indented: bool) -> list[str]:
    if isinstance(item, str) and "\n" in item and _BLOCK.fullmatch(item) and not item.endswith("\n\n"):
        return [f"{head} |", *(f"  {line}" if line else "" for line in item[:-1].split("\n"))]
    if _is_empty(item) or not isinstance(item, Mapping | list | tuple):
        return [f"{head} {_scalar(item)}"]
    return [head, *(f"  {line}" if line and indented else line for line in _lines(item))]


def _is_empty(item: Value) -> bool:
    return isinstance(item, Mapping | list | tuple) and not item


def _scalar(item: Value) -> str:
    if isinstance(item, str):
        return _string(item)
    if isinstance(item, Mapping | list | tuple):
        return "{}" if isinstance(item, Mapping) else "[]"
    return json.dumps(item)


def _string(text: str) -> str:
    """Return text plain where no reader can take it for anything else, else in double quotes."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return _ASTRAL.sub(_one_escape, json.dumps(text).replace("\x7f", "\\x7f"))


def _one_escape(pair: re.Match[str]) -> str:
    """Write one escape where JSON writes two surrogates, which YAML readers take for two characters."""
    high, low = int(pair[1], 16), int(pair[2], 16)
    return f"\\U{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):08x}"
