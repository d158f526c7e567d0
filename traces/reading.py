"""Open a trace file: find its format, check every row, yield requests one at a time in constant memory.

Two requests at one time are read: real clocks have steps (whole seconds in BurstGPT; 11 pairs of Mooncake's 3,993
share a millisecond), so a repeated time says nothing about the file. ``strict`` refuses them, for traces whose
clock is finer than their gaps, such as Azure's of 2023, where one would mean that rows were copied or rounded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from fingerprint.errors import BadInputError
from traces.formats import FORMATS, TraceFormat
from traces.formats.base import ZeroLengths
from traces.formats.servegen_folder import SERVEGEN_FOLDER, is_servegen_folder
from traces.request import Request
from traces.text_reader import Lines

__all__ = ["OpenTrace", "open_trace"]


class OpenTrace:
    """The requests of one file, once, in order; ``rows`` and ``skipped`` count as far as it has been read."""

    def __init__(
        self,
        lines: Lines,
        trace_format: TraceFormat,
        requests: Iterator[Request],
        *,
        zero_lengths: ZeroLengths | None,
        strict: bool,
    ) -> None:
        self.path = lines.path
        self.format = trace_format
        self.rows = 0
        self.skipped = 0
        self._lines = lines
        self._zero_lengths = zero_lengths or trace_format.zero_lengths
        self._strict = strict
        self._requests = self._checked(requests)

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        return next(self._requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; also done when the last row was read."""
        self._requests.close()

    def _checked(self, requests: Iterator[Request]) -> Generator[Request]:
        last_s = 0.0
        for request in requests:
            self.rows += 1
            if request.arrival_s <= last_s:
                self._check_time(request.arrival_s, last_s)
            last_s = request.arrival_s
            if not (request.input_tokens and request.output_tokens) and self._zero_lengths != "keep":
                if self._zero_lengths == "refuse":
                    side = "output" if request.input_tokens else "input"
                    raise self._lines.error(
                        f"has no {side} tokens; take the row out, or say zero_lengths in Python"
                    )
                self.skipped += 1
                continue
            yield request
        if self.rows == 0:
            raise BadInputError(f"{self.path} has a header and no requests")

    def _check_time(self, arrival_s: float, last_s: float) -> None:
        """Raise when a request does not arrive later than the one before, or the first one before 0."""
        when = f"arrives at {arrival_s:.7f} s"
        if self.rows == 1:
            if arrival_s < 0:
                raise self._lines.error(f"{when}, before the start of the trace")
        elif arrival_s < last_s:
            raise self._lines.error(f"{when}, before the row above it ({last_s:.7f} s); sort the file by time")
        elif self._strict:
            raise self._lines.error(f"{when} like the row above it; strict reading refuses that")


def open_trace(
    path: str | Path,
    format: str | None = None,  # noqa: A002  as the open of csv and pandas readers name it
    *,
    strict: bool = False,
    zero_lengths: ZeroLengths | None = None,
) -> OpenTrace:
    """Return the requests of a trace file, plain or gzip.

    Args:
        path: the file.
        format: a name of ``FORMATS``; None recognises it from the first line.
        strict: refuse two requests at the same time.
        zero_lengths: what to do with a request without input or output tokens: ``refuse`` the file, ``skip`` the
            request and count it, ``keep`` it; None leaves it to the format (BurstGPT skips: they failed there).

    Raises:
        NotFoundError: no such file.
        BadInputError: an unknown format, an empty file, or (while reading) a row that is wrong: negative or
            non-numeric lengths, NaN or negative times, times that go back, with the file and line.
    """
    path = Path(path)
    lines = Lines(path)
    rest = iter(lines)
    if is_servegen_folder(path):
        first, chosen = "", SERVEGEN_FOLDER
    else:
        first = next((line for line in rest if line.strip()), "")
        if not first:
            raise BadInputError(f"{path} is empty; a trace has a header and at least one request")
        chosen = _format_of(first, path) if format is None else _format_named(format)
    requests = chosen.read(first, lines, rest)
    return OpenTrace(lines, chosen, requests, zero_lengths=zero_lengths, strict=strict)


def _format_named(name: str) -> TraceFormat:
    if name not in FORMATS:
        raise BadInputError(f"there is no trace format {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def _format_of(first: str, path: Path) -> TraceFormat:
    for known in FORMATS.values():
        if known.recognises(first):
            return known
    forms = "; ".join(f"{known.name}: {known.describes}" for known in FORMATS.values())
    raise BadInputError(f"{path} begins with {first[:120]!r}, which is no trace format known here ({forms})")
