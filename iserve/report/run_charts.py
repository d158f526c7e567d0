"""Small charts of a run, measured or simulated: its latencies by percentile, and what went on over time."""

from __future__ import annotations

from collections.abc import Sequence

from iserve.report.line_chart import Line, line_chart
from iserve.report.markup import Markup, el
from iserve.report.tables import legend
from traces.summary import Summary
from traces.timeline import Bin, CurvePoint

__all__ = ["outcome_line", "over_time", "quantiles", "tiles"]


def outcome_line(words: str, summary: Summary) -> Markup:
    """Return the first line of a page: ``words`` on the requests' outcome, coloured where some failed."""
    failed = summary.completed < summary.requests
    return el("p", el("b", f"{words[0].upper()}{words[1:]}.", class_="bad" if failed else "good"), class_="lead")


def tiles(figures: Sequence[tuple[str, str]]) -> Markup:
    """Return a panel of names and figures, each in a box of its own."""
    made = [el("div", el("b", value), el("span", name), class_="tile") for name, value in figures]
    return el("div", made, class_="tiles")


def quantiles(name: str, lines: Sequence[tuple[str, str, tuple[CurvePoint, ...]]]) -> Markup | None:
    """Chart latencies by percentile, each line a name, a colour and its points; None where no line has any."""
    drawn = [
        Line(said, color, tuple((point.percent, point.value_s) for point in points), dashed=number > 0)
        for number, (said, color, points) in enumerate(lines)
        if points
    ]
    if not drawn:
        return None
    chart = line_chart(
        drawn, name=f"{name} by percentile", x_name="percentile", y_name="", in_seconds=True, logarithmic=True
    )
    return _figure(name, chart, drawn)


def _figure(name: str, chart: Markup, lines: Sequence[Line]) -> Markup:
    keys = legend([(each.color, "", each.name) for each in lines]) if len(lines) > 1 else None
    return el("figure", chart, el("figcaption", name), keys)


def over_time(bins: Sequence[Bin], requests: str) -> Markup | None:
    """Chart rates, requests in flight, output and TTFT over time; None where the run is too short.

    Args:
        requests: what the panel of their rate is called.
    """
    if len(bins) < 2:
        return None
    at = [b.start_s for b in bins]
    rates = [
        Line("scheduled", "s-0", tuple(zip(at, (b.scheduled / b.width_s for b in bins), strict=True))),
        Line("failed", "s-1", tuple(zip(at, (b.failed / b.width_s for b in bins), strict=True))),
    ]
    ttfts = [
        Line("p50", "s-0", tuple(zip(at, (b.ttft_p50_s for b in bins), strict=True))),
        Line("p99", "s-1", tuple(zip(at, (b.ttft_p99_s for b in bins), strict=True))),
    ]
    flight = [Line("in flight", "s-2", tuple(zip(at, (float(b.in_flight) for b in bins), strict=True)))]
    tokens = [Line("tokens", "s-3", tuple(zip(at, (b.output_tokens_per_s for b in bins), strict=True)))]
    panels = [
        (requests, rates, "requests/s", False),
        ("In flight, of those that completed", flight, "requests", False),
        ("Output of requests that ended then", tokens, "tokens/s", False),
    ]
    if any(b.ttft_p50_s is not None for b in bins):
        panels.append(("TTFT of requests that came then", ttfts, "", True))
    return el(
        "div",
        [
            _figure(
                name,
                line_chart(lines, name=name, x_name="seconds", y_name=unit, in_seconds=time, logarithmic=time),
                lines,
            )
            for name, lines, unit, time in panels
        ],
        class_="panels",
    )
