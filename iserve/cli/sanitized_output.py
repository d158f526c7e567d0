"""Output of commands, made harmless: names, logs and answers may hold what a terminal obeys."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from fingerprint.sanitize import printable

__all__ = ["beneath", "harmless_output"]


class _Harmless:
    """A text stream whose control characters are shown, not obeyed. In JSON they become JSON's own escapes."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # rich's own name: its progress bars wrap such a stream too

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def harmless_output() -> None:
    """Make this process's standard output and error harmless from now on."""
    sys.stdout, sys.stderr = _Harmless(sys.stdout), _Harmless(sys.stderr)


def beneath(stream: TextIO) -> TextIO:
    """Return the stream beneath, where control characters are obeyed, for callers that write only their own."""
    while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = inner
    return stream
