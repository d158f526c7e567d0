"""Large JSON objects, read member by member, or in pieces where they are written as an encoder writes them.

``json.loads`` holds every other thread of the process until it has read the last byte: seconds for 100 MB, which
the header of a checkpoint may have. Here no step reads more than one member or one piece, and no key may be there
twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from json import JSONDecoder
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, TypeVar

import msgspec

from fingerprint.errors import CheckpointError

__all__ = ["JsonMembers", "decode_canonical"]

T = TypeVar("T")
_PIECE_BYTES = 2**16

_SPACE = re.compile(r"[ \t\n\r]*")


def decode_canonical(text: bytes, start: int, member: type[T], separator: bytes, most: int) -> dict[str, T] | None:
    """Return the members of a JSON object that is written without white space and escapes, else None.

    What was decoded is encoded again and compared: equal bytes had no key twice and were not read differently from
    how another reader reads them. None says nothing about the text: :class:`JsonMembers` reads it or explains it.

    Args:
        start: where the first member to be read begins.
        member: type of the members' values.
        separator: last character of a value, a comma and the next key's quote. No string can hold it: a quote in
            a string has a backslash before it.
        most: number of members above which the answer is None.
    """
    decoder, encoder = msgspec.json.Decoder(dict[str, member]), msgspec.json.Encoder()  # type: ignore[valid-type]
    members: dict[str, T] = {}
    num_read, last = 0, len(text) - 1
    if text[:1] != b"{" or text[last:] != b"}":
        return None
    while start < last:
        end = last
        if last - start > 2 * _PIECE_BYTES:
            end = text.find(separator, start + _PIECE_BYTES, start + 2 * _PIECE_BYTES) + 1
        piece = b"{" + text[start:end] + b"}"
        try:
            found = decoder.decode(piece)
            if encoder.encode(found) != piece:
                return None
        except (msgspec.MsgspecError, ValueError):
            return None
        members |= found
        num_read += len(found)
        if not found or num_read > most:
            return None
        start = end + 1
    return members if num_read == len(members) else None


class JsonMembers:
    """Cursor over the text of one JSON object.

    Args:
        what: the file, for messages.

    Raises (every method):
        CheckpointError: the text is not JSON of the expected form, or an object has a key twice.
    """

    def __init__(self, raw: bytes, what: str) -> None:
        self._what = what
        self._at = 0
        self._decoder = JSONDecoder(object_pairs_hook=self._unique)
        try:
            self._text = raw.decode()
        except UnicodeDecodeError as error:
            raise self._invalid(str(error)) from error

    def members(self) -> Iterator[str]:
        """Yield each key of the object that begins here; the caller reads the value before the next key."""
        if not self._next_is("{"):
            raise self._invalid(f"not an object at character {self._at}")
        seen: set[str] = set()
        if self._next_is("}"):
            return
        while True:
            key = self.string()
            if key in seen:
                raise CheckpointError(f"{self._what} has a key twice")
            seen.add(key)
            self._expect(":")
            yield key
            if self._next_is("}"):
                return
            self._expect(",")

    def string(self) -> str:
        """Read a string."""
        self._expect('"')
        try:
            text, self._at = scanstring(self._text, self._at)
        except ValueError as error:
            raise self._invalid(str(error)) from error
        return str(text)

    def canonical_strings(self, most: int) -> dict[str, str] | None:
        """Read an object of strings as :func:`decode_canonical` does, with or without white space.

        On None nothing was read.
        """
        self._skip_space()
        end = self._text.find("}", self._at) + 1
        try:
            text = msgspec.json.format(self._text[self._at : end].encode(), indent=-1)
        except (msgspec.MsgspecError, ValueError):
            return None
        members = decode_canonical(text, 1, str, b'","', most)
        if members:
            self._at = end
        return members

    def value(self, max_chars: int) -> Any:
        """Read a string of any length, or another value of at most ``max_chars`` characters."""
        self._skip_space()
        if self._text.startswith('"', self._at):
            return self.string()
        try:
            value, length = self._decoder.raw_decode(self._text[self._at : self._at + max_chars])
        except (ValueError, RecursionError) as error:
            raise self._invalid(f"at character {self._at}: {error}, or longer than {max_chars}") from error
        self._at += length
        return value

    def end(self) -> None:
        """Check that only white space follows."""
        self._skip_space()
        if self._at < len(self._text):
            raise self._invalid(f"extra data at character {self._at}")

    def _unique(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise CheckpointError(f"{self._what} has a key twice")
        return members

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _next_is(self, character: str) -> bool:
        self._skip_space()
        found = self._text.startswith(character, self._at)
        self._at += found
        return found

    def _expect(self, character: str) -> None:
        if not self._next_is(character):
            found = self._text[self._at : self._at + 1] or "its end"
            raise self._invalid(f"expected {character} at character {self._at}, found {found!r}")

    def _invalid(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._what} is not valid JSON: {why[:200]}")
