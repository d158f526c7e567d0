"""Frozen dataclasses to JSON and back, for everything that crosses a process or is stored.

One place decides how (msgspec), so that no package invents its own dict of strings. Reading is strict about
types and missing fields; ``__post_init__`` checks run on the way in.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

from fingerprint.errors import BadInputError

__all__ = ["from_json", "to_builtins", "to_json"]

T = TypeVar("T")

# Making a decoder evaluates the annotations of every dataclass in it: two threads at once have ended CPython 3.11
# with a segmentation fault. A decoder that is made may be shared.
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.Lock()


def to_json(value: object, *, indent: int = 0) -> bytes:
    """Return JSON of a dataclass tree (enums by value, tuples as lists).

    Raises:
        BadInputError: half a surrogate pair is in a text: a file's name of bytes that are not UTF-8 has such.
    """
    try:
        raw = msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise BadInputError(f"{ascii(error.object)[:200]} cannot be written as UTF-8; change this text") from error
    return msgspec.json.format(raw, indent=indent) if indent else raw


def from_json(data: bytes | str, kind: type[T], *, what: str = "JSON") -> T:
    """Return the ``kind`` that ``data`` holds.

    Raises:
        BadInputError: not JSON, nested too deeply, a missing field, or a value of the wrong type; ``what`` names
            the document.
    """
    try:
        decoded: T = _decoder(kind).decode(data)
        return decoded
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInputError(f"{what} is not a valid {kind.__name__}: {error}") from error


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    known = _decoders.get(kind)
    if known is None:
        with _making:
            known = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return known


def to_builtins(value: object) -> Any:
    """Return the same tree as dicts, lists, strings and numbers, for a JSON library that is not ours."""
    return msgspec.to_builtins(value)
