"""Console of rich, whose texts are made harmless and whose own escape sequences pass through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from fingerprint.sanitize import printable
from iserve.cli.sanitized_output import beneath

__all__ = ["SanitizedConsole"]


class SanitizedConsole(Console):
    """Rich itself drops some control characters of a text, but not the one that begins an escape sequence."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def _stream(self) -> TextIO:
        return beneath(Console.file.fget(self))  # type: ignore[attr-defined]

    file = property(_stream, Console.file.fset)  # type: ignore[attr-defined]
