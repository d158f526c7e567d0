"""BurstGPT's CSV: ``Timestamp, Model, Request tokens, Response tokens`` and more.

Time stamps are seconds; the second release counts them from some other moment (19,440,110 in its first row),
so the clock starts at the first row. They are whole seconds: many requests share one. A request that failed
at the source has 0 response tokens; such rows are skipped and counted unless asked for. Session, elapsed
time, total and log type are not read.

Source: BurstGPT README (files with and without failures), releases 1.1 and 2.0.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from fingerprint.errors import BadInputError
from traces.formats.base import (
    Columns,
    TraceFormat,
    count_of,
    csv_rows,
    model_cell,
    names_of,
    refuse_to_lose,
    seconds_of,
)
from traces.request import Request
from traces.text_reader import Lines

__all__ = ["BURSTGPT"]

_NEEDED = ("Timestamp", "Model", "Request tokens", "Response tokens")
_HEADER = (*_NEEDED, "Total tokens", "Log Type")


def _recognises(header: str) -> bool:
    return set(_NEEDED) <= set(names_of(header))


def _read(header: str, lines: Lines, rest: Iterator[str]) -> Iterator[Request]:
    columns = Columns(header, _NEEDED, lines)
    stamp, model, inputs, outputs = (columns[name] for name in _NEEDED)
    start_s: float | None = None
    for row in csv_rows(lines, rest, columns.count):
        seconds = seconds_of(row[stamp], "Timestamp", lines)
        if start_s is None:
            start_s = seconds
        yield Request(
            seconds - start_s,
            count_of(row[inputs], "Request tokens", lines),
            count_of(row[outputs], "Response tokens", lines),
            row[model],
        )


def _write(requests: Iterable[Request]) -> Iterator[str]:
    yield ",".join(_HEADER)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="")
    for request in requests:
        refuse_to_lose(request, "burstgpt", prefix_blocks=True)
        if not request.model:
            raise BadInputError("burstgpt names a model in every row, and this trace has a request without one")
        tokens = (request.input_tokens, request.output_tokens, request.input_tokens + request.output_tokens)
        writer.writerow((repr(request.arrival_s), model_cell(request), *tokens, "API log"))
        yield text.getvalue()
        text.seek(0)
        text.truncate()


BURSTGPT = TraceFormat(
    "burstgpt",
    "BurstGPT: Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,Total tokens,Log Type",
    _recognises,
    _read,
    _write,
    zero_lengths="skip",
)
