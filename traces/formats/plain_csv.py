"""Plain CSV: ``arrival_s,input_tokens,output_tokens`` and, where there, ``model`` and ``prefix_block_ids``.

Times are seconds since the start of the trace, unchanged. Block ids are separated by spaces.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from traces.formats.base import Columns, TraceFormat, count_of, csv_rows, model_cell, names_of, seconds_of
from traces.request import Request
from traces.text_reader import Lines

__all__ = ["CSV"]

_NEEDED = ("arrival_s", "input_tokens", "output_tokens")
_HEADER = (*_NEEDED, "model", "prefix_block_ids")


def _recognises(header: str) -> bool:
    return set(_NEEDED) <= set(names_of(header))


def _read(header: str, lines: Lines, rest: Iterator[str]) -> Iterator[Request]:
    columns = Columns(header, _NEEDED, lines)
    arrival, inputs, outputs = (columns[name] for name in _NEEDED)
    model, blocks = columns.get("model"), columns.get("prefix_block_ids")
    for row in csv_rows(lines, rest, columns.count):
        yield Request(
            seconds_of(row[arrival], "arrival_s", lines),
            count_of(row[inputs], "input_tokens", lines),
            count_of(row[outputs], "output_tokens", lines),
            "" if model is None else row[model],
            () if blocks is None else _block_ids(row[blocks], lines),
        )


def _block_ids(text: str, lines: Lines) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split()))
    except ValueError as error:
        raise lines.error(f"prefix_block_ids must be whole numbers: {error}") from error


def _write(requests: Iterable[Request]) -> Iterator[str]:
    yield ",".join(_HEADER)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="")
    for request in requests:
        writer.writerow(
            (
                repr(request.arrival_s),
                request.input_tokens,
                request.output_tokens,
                model_cell(request),
                " ".join(map(str, request.prefix_blocks)),
            )
        )
        yield text.getvalue()
        text.seek(0)
        text.truncate()


CSV = TraceFormat(
    "csv", "arrival_s,input_tokens,output_tokens[,model][,prefix_block_ids]", _recognises, _read, _write
)
