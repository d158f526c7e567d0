"""Azure's LLM inference traces: ``TIMESTAMP,ContextTokens,GeneratedTokens`` (2023; 2024 has a UTC offset as well).

Time stamps are wall-clock times in steps of 100 ns, such as ``2023-11-16 18:15:46.6805900``, more than a datetime
holds: they are taken apart into whole steps, so that differences are exact. The clock starts at the first row.
Further columns (``NumImages`` of the multimodal trace) are not read.

Source: AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from traces.formats.base import Columns, TraceFormat, count_of, csv_rows, names_of, refuse_to_lose
from traces.request import Request
from traces.text_reader import Lines

__all__ = ["AZURE"]

_NEEDED = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STEPS_PER_S = 10**7
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Written traces start here: a request has no date.
_WRITTEN_ORIGIN = datetime(2000, 1, 1)


def _recognises(header: str) -> bool:
    return set(_NEEDED) <= set(names_of(header))


def _read(header: str, lines: Lines, rest: Iterator[str]) -> Iterator[Request]:
    columns = Columns(header, _NEEDED, lines)
    stamp, inputs, outputs = (columns[name] for name in _NEEDED)
    clock = _Clock(lines)
    start: int | None = None
    for row in csv_rows(lines, rest, columns.count):
        steps = clock.steps(row[stamp])
        if start is None:
            start = steps
        yield Request(
            (steps - start) / _STEPS_PER_S,
            count_of(row[inputs], "ContextTokens", lines),
            count_of(row[outputs], "GeneratedTokens", lines),
        )


class _Clock:
    """Time stamps to 100 ns steps since 1970, remembering the minute: neighbours mostly share it."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._minute: tuple[str, str | None] | None = None
        self._minute_steps = 0

    def steps(self, text: str) -> int:
        found = _STAMP.fullmatch(text)
        if found is None:
            raise self._lines.error(f"TIMESTAMP is {text[:40]!r}, not like 2023-11-16 18:15:46.6805900")
        minute, seconds, fraction, offset = found.groups()
        if (minute, offset) != self._minute:
            try:
                moment = datetime.fromisoformat(f"{minute}:00{offset or '+00:00'}")
            except ValueError as error:
                raise self._lines.error(f"TIMESTAMP is {text[:40]!r}: {error}") from error
            self._minute_steps = (moment - _EPOCH) // timedelta(seconds=1) * _STEPS_PER_S
            self._minute = (minute, offset)
        if int(seconds) > 60:  # 60 is a leap second
            raise self._lines.error(f"TIMESTAMP is {text[:40]!r}, with {seconds} seconds in a minute")
        steps = int(fraction.ljust(7, "0")[:7]) if fraction else 0
        return self._minute_steps + int(seconds) * _STEPS_PER_S + steps


def _write(requests: Iterable[Request]) -> Iterator[str]:
    yield ",".join(_NEEDED)
    for request in requests:
        refuse_to_lose(request, "azure", model=True, prefix_blocks=True)
        seconds, steps = divmod(round(request.arrival_s * _STEPS_PER_S), _STEPS_PER_S)
        moment = _WRITTEN_ORIGIN + timedelta(seconds=seconds)
        yield f"{moment:%Y-%m-%d %H:%M:%S}.{steps:07d},{request.input_tokens},{request.output_tokens}"


AZURE = TraceFormat(
    "azure", "Azure LLM inference trace: TIMESTAMP,ContextTokens,GeneratedTokens", _recognises, _read, _write
)
