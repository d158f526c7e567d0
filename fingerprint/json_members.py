"""Large JSON objects, member by member.

``json.loads`` holds every other thread of the process until it has read the last byte: seconds for 32 MiB, which
the header of a checkpoint may have. Here no step reads more than one member.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from json import JSONDecoder
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from fingerprint.errors import CheckpointError

__all__ = ["JsonMembers"]

_SPACE = re.compile(r"[ \t\n\r]*")


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
