"""A trace's statistics as people read them in a terminal, with a small picture of its rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iserve.cli.render import console, print_rows
from traces.reading import OpenTrace

if TYPE_CHECKING:
    from traces.request import RequestStream
    from traces.statistics import LengthStatistics, RateCurve, TraceStatistics

__all__ = ["print_statistics", "sparkline"]

_COLUMNS = 72
_LEVELS = "▁▂▃▄▅▆▇█"
_MODELS = 12


def print_statistics(name: str, requests: RequestStream, found: TraceStatistics) -> None:
    """Print rate, gaps, counts in bins, lengths, models, and the rate over time."""
    out = console()
    known = f" ({requests.format.name})" if isinstance(requests, OpenTrace) else ""
    rate = "" if found.rate_per_s is None else f", {found.rate_per_s:.4g} requests/s"
    out.print(f"{name}{known}: {found.requests:,} requests in {found.span_s:,.1f} s{rate}")
    if isinstance(requests, OpenTrace) and requests.skipped:
        out.print(f"rows without input or output tokens, left out: {requests.skipped:,}")
    cv = "-" if found.cv is None else f"{found.cv:.2f}"
    out.print(f"gaps: CV {cv} (1 = Poisson), longest {found.longest_gap_s:,.1f} s")
    out.print(f"requests at the very time of the one before: {found.same_times:,}")
    print_rows(
        ("bins of", "peak requests/s", "IoD", "empty"),
        [
            (
                f"{one.width_s} s",
                f"{one.peak_per_s:.4g}",
                _or_dash(one.iod, ".3g"),
                _or_dash(one.empty_fraction, ".0%"),
            )
            for one in found.bins
        ],
    )
    sides = (("input", found.input_tokens), ("output", found.output_tokens))
    print_rows(
        ("tokens", "mean", "p50", "p95", "p99", "max"), [(side, *_length_cells(one)) for side, one in sides]
    )
    out.print(f"correlation of input and output: {found.correlation:.2f}")
    if found.models != (("", found.requests),):
        shown = ", ".join(
            f"{model or '(none)'} {count / found.requests:.1%}" for model, count in found.models[:_MODELS]
        )
        more = f" and {len(found.models) - _MODELS} more" if len(found.models) > _MODELS else ""
        out.print(f"models: {shown}{more}")
    picture, column_s, peak = sparkline(found.curve)
    out.print(picture)
    out.print(f"rate over time: a column is {column_s:,.4g} s, the highest {peak:.4g} requests/s")


def sparkline(curve: RateCurve, columns: int = _COLUMNS) -> tuple[str, float, float]:
    """Return the rate in up to ``columns`` characters, blank without requests; a column's seconds; the highest
    rate.
    """
    slots = len(curve.rates_per_s)
    width = -(-slots // columns)
    rates = [
        sum(part) / len(part) for part in (curve.rates_per_s[at : at + width] for at in range(0, slots, width))
    ]
    peak = max(rates)
    picture = "".join(" " if rate == 0 else _LEVELS[min(7, int(rate / peak * 8))] for rate in rates)
    return picture, width * curve.slot_s, peak


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _length_cells(one: LengthStatistics) -> tuple[str, ...]:
    return (f"{one.mean:,.1f}", *(f"{value:,}" for value in (one.p50, one.p95, one.p99, one.max)))
