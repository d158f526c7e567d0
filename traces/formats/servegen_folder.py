"""Data of ServeGen as published: a folder with two files for each client.

The folder holds no single requests; reading it makes them (``traces.servegen``), always with seed 0.

* ``chunk-N-trace.csv``, without a header: ``time s, rate, cv, law, shape, scale`` of each slot of 600 s, an empty
  law where the client was idle.
* ``chunk-N-dataset.json``: ``{"time s": {"input_tokens": "{tokens: share, ...}", "output_tokens": ...}}``, a
  window's lengths; ``{}`` where not known. A client without lengths takes those of the clients with some, by their
  rates.

All lengths are held in memory (m-large: 217 MiB).

Source: README of the data and the publisher's loader; run on commit f891d11's m-small and m-large.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import BadInputError
from traces.formats.base import TraceFormat, csv_rows
from traces.formats.servegen_values import (
    SIDES,
    SLOT_S,
    gap_law,
    lengths_of_others,
    number_above_0,
    number_at_least_0,
)
from traces.lengths import HistogramLengths, LengthModel, Tokens
from traces.request import Request
from traces.servegen import Client, ClientSlot, GapLaw, LengthWindow, client_requests
from traces.text_reader import Lines

__all__ = ["SERVEGEN_FOLDER", "is_servegen_folder", "read_folder"]

_MAX_DATASET_BYTES = 256 * 1024 * 1024


def is_servegen_folder(path: Path) -> bool:
    """Return whether the folder has files of clients in the publisher's naming."""
    return path.is_dir() and any(path.glob("chunk-*-trace.csv"))


def read_folder(path: Path) -> tuple[Client, ...]:
    """Return all clients of a folder of the publisher's.

    Raises:
        BadInputError: no clients in it, or a file or row that is wrong; no client has lengths.
    """
    parts = []
    for trace in sorted(path.glob("chunk-*-trace.csv"), key=lambda file: (len(file.name), file.name)):
        windows = _dataset(trace.with_name(trace.name.replace("-trace.csv", "-dataset.json")))
        parts.append((trace.name.removesuffix("-trace.csv"), _slot_rows(trace), windows))
    if not parts:
        raise BadInputError(f"{path} has no chunk-N-trace.csv; a ServeGen folder has one for each client")
    known = [
        (row.rate_per_s, _lengths_at(windows, row.start_s))
        for _, rows, windows in parts
        for row in rows
        if row.law
    ]
    others = lengths_of_others(known, path)
    return tuple(
        Client(
            name,
            tuple(
                ClientSlot(row.start_s, row.duration_s, row.rate_per_s, row.law, row.shape, lengths)
                for row in rows
                if row.law
                for lengths in [_lengths_at(windows, row.start_s) or others]
            ),
        )
        for name, rows, windows in parts
    )


@dataclass(frozen=True)
class _SlotRow:
    start_s: float
    duration_s: float
    rate_per_s: float
    law: GapLaw | None  # None: idle
    shape: float


def _slot_rows(path: Path) -> list[_SlotRow]:
    lines = Lines(path)
    found: list[tuple[float, float, GapLaw | None, float]] = []
    for row in csv_rows(lines, iter(lines), 6):
        start_s = number_at_least_0(row[0], "time", lines)
        if found and start_s <= found[-1][0]:
            raise lines.error("slots must ascend in time")
        if row[3].strip():
            rate, shape = number_at_least_0(row[1], "rate", lines), number_above_0(row[4], "shape", lines)
            found.append((start_s, rate, gap_law(row[3], lines), shape))
        else:
            found.append((start_s, 0.0, None, 1.0))
    if not found:
        raise BadInputError(f"{path} is empty")
    ends = [start for start, *_ in found[1:]] + [found[-1][0] + SLOT_S]
    return [_SlotRow(row[0], end - row[0], *row[1:]) for row, end in zip(found, ends, strict=True)]


def _dataset(path: Path) -> list[LengthWindow]:
    """Return the windows of lengths that are known, ascending; none where the client has no such file."""
    try:
        if path.stat().st_size > _MAX_DATASET_BYTES:
            raise BadInputError(f"{path} is over {_MAX_DATASET_BYTES} bytes; leave the client out")
        content = json.loads(path.read_bytes())
        windows = {float(start): sides for start, sides in content.items()}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise BadInputError(f"{path} is not a ServeGen dataset: {error}") from error
    found = []
    for start_s, sides in sorted(windows.items()):
        if not isinstance(sides, dict) or not set(SIDES) <= set(sides):
            raise BadInputError(f"{path}: the window at {start_s:g} s needs {' and '.join(SIDES)}")
        histograms = [_histogram(sides[side], path) for side in SIDES]
        if histograms[0] and histograms[1]:
            found.append(LengthWindow(start_s, HistogramLengths(histograms[0], histograms[1])))
    return found


_PAIR = re.compile(r"\s*(\d{1,9})\s*:\s*([0-9.eE+-]{1,40})\s*")


def _histogram(text: object, path: Path) -> tuple[Tokens, NDArray[np.float64]] | None:
    """Parse ``{tokens: share, ...}`` as Python writes it, without running it; return None where it is empty."""
    if not isinstance(text, str) or not (text.startswith("{") and text.endswith("}")):
        raise BadInputError(f"{path}: a histogram must be a text {{tokens: share, ...}}, got {str(text)[:40]!r}")
    if not text[1:-1].strip():
        return None
    shares: dict[int, float] = {}
    for part in text[1:-1].split(","):
        pair = _PAIR.fullmatch(part)
        try:
            share = float(pair[2]) if pair else -1.0
        except ValueError:
            share = -1.0
        if pair is None or not 0 <= share <= 1.000001:
            raise BadInputError(f"{path}: {part[:40]!r} in a histogram is not tokens: share")
        shares[max(1, int(pair[1]))] = shares.get(max(1, int(pair[1])), 0.0) + share
    values = np.array(sorted(shares), dtype=np.int64)
    upto = np.cumsum([shares[value] for value in values.tolist()])
    if upto[-1] <= 0:
        return None
    return values, upto


def _lengths_at(windows: list[LengthWindow], start_s: float) -> LengthModel | None:
    """Return the lengths of the last window that has begun, or of the first one before that."""
    begun = [window for window in windows if window.start_s <= start_s]
    chosen = begun[-1:] or windows[:1]
    return chosen[0].lengths if chosen else None


def _requests_of_folder(header: str, lines: Lines, rest: Iterator[str]) -> Iterator[Request]:
    yield from client_requests(read_folder(lines.path), seed=0)


SERVEGEN_FOLDER = TraceFormat(
    "servegen",
    "ServeGen folder of clients: chunk-N-trace.csv, chunk-N-dataset.json",
    lambda header: False,
    _requests_of_folder,
    None,
)
