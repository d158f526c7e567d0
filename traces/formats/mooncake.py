"""JSON lines of Mooncake: ``{"timestamp": ms, "input_length": ..., "output_length": ..., "hash_ids": [...]}``.

Times are milliseconds since the start of the trace. ``hash_ids`` are the prompt's blocks (512 tokens in the
published traces) in order; each id is for the block and all before it. They become ``prefix_blocks``.

Source: Mooncake, FAST25-release/traces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain

from traces.formats.base import MAX_TOKENS, TraceFormat, refuse_to_lose, seconds_of
from traces.request import Request
from traces.text_reader import Lines

__all__ = ["MOONCAKE"]


_KEYS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})


def _recognises(first: str) -> bool:
    """Return whether the line has no key of another kind: such traces count times and blocks in other units."""
    if not first.lstrip().startswith("{") or '"input_length"' not in first:
        return False
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return True  # reading names the fault
    return isinstance(value, dict) and value.keys() <= _KEYS


def _read(first: str, lines: Lines, rest: Iterator[str]) -> Iterator[Request]:
    for line in chain([first], rest):
        if line.strip():
            yield _request(_parsed(line, lines), lines)


def _parsed(line: str, lines: Lines) -> dict[str, object]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise lines.error(f"not a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise lines.error("not a JSON object")
    return value


def _request(value: dict[str, object], lines: Lines) -> Request:
    blocks = value.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise lines.error("hash_ids must be a list of whole numbers")
    stamp = value.get("timestamp")
    if type(stamp) not in (int, float):
        raise lines.error(f"timestamp is {str(stamp)[:40]!r}, not a number of milliseconds")
    return Request(
        seconds_of(str(stamp), "timestamp", lines) / 1000,
        _count(value, "input_length", lines),
        _count(value, "output_length", lines),
        prefix_blocks=tuple(blocks),
    )


def _count(value: dict[str, object], key: str, lines: Lines) -> int:
    count = value.get(key)
    if type(count) is not int:
        raise lines.error(f"{key} is {str(count)[:40]!r}, not a whole number")
    if not 0 <= count <= MAX_TOKENS:
        raise lines.error(f"{key} is {str(count)[:40]}, outside 0 to {MAX_TOKENS}")
    return count


def _write(requests: Iterable[Request]) -> Iterator[str]:
    for request in requests:
        refuse_to_lose(request, "mooncake", model=True)
        milliseconds = request.arrival_s * 1000
        yield json.dumps(
            {
                "timestamp": int(milliseconds) if milliseconds.is_integer() else milliseconds,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.prefix_blocks,
            }
        )


MOONCAKE = TraceFormat(
    "mooncake",
    "Mooncake JSON lines: timestamp (ms), input_length, output_length, hash_ids",
    _recognises,
    _read,
    _write,
)
