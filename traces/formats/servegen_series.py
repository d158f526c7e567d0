"""Series made of ServeGen's data: the rate, its lengths, the clients of the busiest slot.

None holds single requests; reading one makes them (``traces.servegen``), always with seed 0.

* ``*_clients_peak.csv``: the clients of one 600 s slot. Lengths from mean, median, p95 and p99: straight lines
  between the quantiles, the shortest chosen so that the mean is right, nothing above the p99, which is not known.
  A client without lengths takes those of the clients with some, by their rates.
* ``*_rate.csv``, with its ``*_lengths.csv`` in the same folder: Poisson arrivals of the summed rate; lengths from
  quantiles, nothing beyond the p1 and the p99.9, so that their mean is only about the published one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fingerprint.errors import BadInputError
from traces.arrivals import RateSeries
from traces.formats.base import Columns, TraceFormat, csv_rows, names_of, seconds_of
from traces.formats.servegen_values import (
    SIDES,
    SLOT_S,
    gap_law,
    lengths_of_others,
    number_above_0,
    number_at_least_0,
)
from traces.lengths import LengthModel, QuantileLengths
from traces.request import Request
from traces.servegen import Client, ClientSlot, GapLaw, LengthWindow, client_requests, series_requests
from traces.text_reader import Lines

__all__ = ["SERVEGEN_CLIENTS", "SERVEGEN_RATE", "read_clients", "read_length_windows", "read_rate_series"]

_CLIENT_COLUMNS = (
    *("client_id", "rate_rps", "pattern", "shape"),
    *(f"{side}_{what}" for side in ("in", "out") for what in ("mean", "p50", "p95", "p99")),
)
_RATE_COLUMNS = ("t_s", "rate_rps")
_LEVELS = {
    "p1": 0.01,
    "p5": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99.9": 0.999,
}


def read_rate_series(path: Path) -> RateSeries:
    """Return the rate over time, requests per second; slots with rate 0 are gaps in the source and stay.

    Raises:
        BadInputError: not such a file, a row that is wrong, or slots of unequal width.
    """
    lines = Lines(path)
    rest = iter(lines)
    return _rate_series(_header(rest, path), lines, rest)


def _rate_series(header: str, lines: Lines, rest: Iterator[str]) -> RateSeries:
    columns = Columns(header, _RATE_COLUMNS, lines)
    times, rates = [], []
    for row in csv_rows(lines, rest, columns.count):
        times.append(seconds_of(row[columns["t_s"]], "t_s", lines))
        rates.append(number_at_least_0(row[columns["rate_rps"]], "rate_rps", lines))
    widths = {later - earlier for earlier, later in pairwise(times)}
    if len(widths) != 1 or times[0] != 0 or min(widths) <= 0:
        raise BadInputError(f"{lines.path}: a rate series needs two slots or more, from 0 on, of one width")
    return RateSeries(widths.pop(), tuple(rates))


def read_length_windows(path: Path) -> tuple[LengthWindow, ...]:
    """Return lengths per window, from quantiles.

    Raises:
        BadInputError: not such a file, a row that is wrong, or a window that lacks one of the two sides.
    """
    lines = Lines(path)
    rest = iter(lines)
    columns = Columns(_header(rest, path), ("window_start_s", "field", *_LEVELS), lines)
    found: dict[float, dict[str, tuple[tuple[float, float], ...]]] = {}
    for row in csv_rows(lines, rest, columns.count):
        levels = [max(1.0, number_at_least_0(row[columns[name]], name, lines)) for name in _LEVELS]
        if levels != sorted(levels):
            raise lines.error("the quantiles do not ascend")
        knots = zip((0.0, *_LEVELS.values(), 1.0), (levels[0], *levels, levels[-1]), strict=True)
        start_s = seconds_of(row[columns["window_start_s"]], "window_start_s", lines)
        found.setdefault(start_s, {})[row[columns["field"]]] = tuple(knots)
    for start_s, sides in found.items():
        if set(sides) != set(SIDES):
            raise BadInputError(
                f"{path}: the window at {start_s:g} s needs {' and '.join(SIDES)}, has {sorted(sides)}"
            )
    return tuple(
        LengthWindow(start_s, QuantileLengths(sides[SIDES[0]], sides[SIDES[1]]))
        for start_s, sides in sorted(found.items())
    )


def _requests_of_rate(header: str, lines: Lines, rest: Iterator[str]) -> Iterator[Request]:
    name = lines.path.name
    if "_rate" not in name:
        raise BadInputError(f"{lines.path} has no lengths: name it ..._rate.csv, with ..._lengths.csv next to it")
    windows = read_length_windows(lines.path.with_name(name.replace("_rate", "_lengths")))
    yield from series_requests(_rate_series(header, lines, rest), windows, seed=0)


def read_clients(path: Path) -> tuple[Client, ...]:
    """Return the clients of one slot.

    Raises:
        BadInputError: not such a file, or a row that is wrong; no client has lengths.
    """
    lines = Lines(path)
    rest = iter(lines)
    return _clients(_header(rest, path), lines, rest)


def _clients(header: str, lines: Lines, rest: Iterator[str]) -> tuple[Client, ...]:
    columns = Columns(header, _CLIENT_COLUMNS, lines)
    rows: list[_ClientRow] = []
    for row in csv_rows(lines, rest, columns.count):
        rows.append(
            _ClientRow(
                row[columns["client_id"]],
                number_at_least_0(row[columns["rate_rps"]], "rate_rps", lines),
                gap_law(row[columns["pattern"]], lines),
                number_above_0(row[columns["shape"]], "shape", lines),
                _summary_lengths(row, columns, lines),
            )
        )
    others = lengths_of_others([(row.rate_per_s, row.lengths) for row in rows], lines.path)
    return tuple(
        Client(
            row.name,
            (ClientSlot(0.0, SLOT_S, row.rate_per_s, row.law, row.shape, row.lengths or others),),
        )
        for row in rows
    )


@dataclass(frozen=True)
class _ClientRow:
    name: str
    rate_per_s: float
    law: GapLaw
    shape: float
    lengths: LengthModel | None


def _summary_lengths(row: list[str], columns: Columns, lines: Lines) -> LengthModel | None:
    tables = []
    for side in ("in", "out"):
        texts = [row[columns[f"{side}_{what}"]] for what in ("mean", "p50", "p95", "p99")]
        if not all(texts):
            return None
        mean, p50, p95, p99 = (max(1.0, number_at_least_0(text, f"{side}_ lengths", lines)) for text in texts)
        if not p50 <= p95 <= p99:
            raise lines.error(f"the {side}_ quantiles do not ascend")
        above_median = 0.45 * (p50 + p95) / 2 + 0.04 * (p95 + p99) / 2 + 0.01 * p99
        shortest = min(p50, max(1.0, 4 * (mean - above_median) - p50))
        tables.append(((0.0, shortest), (0.5, p50), (0.95, p95), (0.99, p99), (1.0, p99)))
    return QuantileLengths(tables[0], tables[1])


def _header(rest: Iterator[str], path: Path) -> str:
    header = next(rest, None)
    if header is None:
        raise BadInputError(f"{path} is empty")
    return header


def _requests_of_clients(header: str, lines: Lines, rest: Iterator[str]) -> Iterator[Request]:
    yield from client_requests(_clients(header, lines, rest), seed=0)


SERVEGEN_RATE = TraceFormat(
    "servegen-rate",
    "ServeGen rate series, its lengths next to it: t_s,rate_rps",
    lambda header: set(_RATE_COLUMNS) <= set(names_of(header)),
    _requests_of_rate,
    None,
)
SERVEGEN_CLIENTS = TraceFormat(
    "servegen-clients",
    "ServeGen clients of one slot: client_id,rate_rps,pattern,shape,in_mean and so on",
    lambda header: set(_CLIENT_COLUMNS) <= set(names_of(header)),
    _requests_of_clients,
    None,
)
