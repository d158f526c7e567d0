"""Definition of a trace format, and the checks that the rows of every format go through."""

from __future__ import annotations

import csv
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from fingerprint.errors import BadInputError
from traces.request import Request
from traces.text_reader import Lines

__all__ = [
    "MAX_TOKENS",
    "Columns",
    "TraceFormat",
    "ZeroLengths",
    "count_of",
    "csv_rows",
    "model_cell",
    "names_of",
    "refuse_to_lose",
    "seconds_of",
]

# No prompt has as many; a longer number is a shifted column or a time stamp.
MAX_TOKENS = 10**9

ZeroLengths = Literal["refuse", "skip", "keep"]


@dataclass(frozen=True)
class TraceFormat:
    """File format of requests.

    ``read`` turns a first line and the lines after it into requests and checks what is the format's own;
    ``recognises`` says from the first line whether a file is of this format; ``write`` turns requests into lines,
    and is None where the format holds no single requests.
    ``zero_lengths`` says what a request without input or output tokens means in this format.
    """

    name: str
    describes: str
    recognises: Callable[[str], bool]
    read: Callable[[str, Lines, Iterator[str]], Iterator[Request]]
    write: Callable[[Iterable[Request]], Iterator[str]] | None
    zero_lengths: ZeroLengths = "refuse"


class Columns:
    """Positions of a CSV's columns, by the names in its header; order and further columns do not matter."""

    def __init__(self, header: str, needed: tuple[str, ...], lines: Lines) -> None:
        names = names_of(header)
        if missing := [name for name in needed if name not in names]:
            raise lines.error(f"the header has no {', '.join(missing)}; it is {header[:200]!r}")
        if len(set(names)) != len(names):
            raise lines.error(f"the header names a column twice: {header[:200]!r}")
        self.count = len(names)
        self._names = names

    def __getitem__(self, name: str) -> int:
        return self._names.index(name)

    def get(self, name: str) -> int | None:
        return self._names.index(name) if name in self._names else None


def names_of(header: str) -> list[str]:
    """Return a header's column names."""
    try:
        return [name.strip() for name in next(csv.reader([header]), [])]
    except csv.Error:
        return []


def csv_rows(lines: Lines, rest: Iterator[str], columns: int) -> Iterator[list[str]]:
    """Yield the fields of each row; an empty line ends nothing and is skipped."""
    reader = csv.reader(rest)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise lines.error(f"not a CSV row ({error})") from error
        if row is None:
            return
        if not row:
            continue
        if len(row) != columns:
            raise lines.error(f"{len(row)} fields, the header has {columns}")
        yield row


def count_of(text: str, what: str, lines: Lines) -> int:
    """Return a token count.

    Raises:
        BadInputError: not a whole number, negative, or above ``MAX_TOKENS``.
    """
    try:
        count = int(text)
    except ValueError as error:
        raise lines.error(f"{what} is {text[:40]!r}, not a whole number") from error
    if not 0 <= count <= MAX_TOKENS:
        raise lines.error(f"{what} is {text[:40]}, outside 0 to {MAX_TOKENS}")
    return count


def seconds_of(text: str, what: str, lines: Lines) -> float:
    """Return a finite time; whether it may be negative is for the caller to say.

    Raises:
        BadInputError: not a number, NaN or infinite.
    """
    try:
        seconds = float(text)
    except ValueError as error:
        raise lines.error(f"{what} is {text[:40]!r}, not a number") from error
    if not math.isfinite(seconds):
        raise lines.error(f"{what} is {text[:40]}, not a finite time")
    return seconds


def model_cell(request: Request) -> str:
    """Return the model's name for a CSV; BadInputError where it has a line end or other control character."""
    if any(unicodedata.category(character) == "Cc" for character in request.model):
        raise BadInputError(f"the model name {request.model[:40]!r} cannot stand in a line of a trace file")
    return request.model


def refuse_to_lose(
    request: Request, format_name: str, *, model: bool = False, prefix_blocks: bool = False
) -> None:
    """Raise BadInputError where writing would drop what the request says."""
    if model and request.model:
        raise BadInputError(f"{format_name} has no place for the model {request.model!r}; write csv instead")
    if prefix_blocks and request.prefix_blocks:
        raise BadInputError(f"{format_name} has no place for prefix blocks; write csv instead")
