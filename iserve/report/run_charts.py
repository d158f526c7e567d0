"""Small charts of a run, measured or simulated: its latencies by percentile, and its course over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from iserve.report.charts import Line, line_chart
from traces.timeline import Bin, CurvePoint

__all__ = ["Figure", "over_time", "quantiles"]


@dataclass(frozen=True, slots=True)
class Figure:
    """Chart of lines that share their axes."""

    name: str
    chart: Markup
    lines: tuple[Line, ...]

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        """Return the legend's (colour, shape, words)."""
        return [(line.color, "", line.name) for line in self.lines]


def quantiles(name: str, lines: Sequence[tuple[str, str, tuple[CurvePoint, ...]]]) -> Figure | None:
    """Chart latencies by percentile, each line a name, a colour and its points; None where no line has any."""
    drawn = tuple(
        Line(said, color, tuple((point.percent, point.value_s) for point in points), dashed=number > 0)
        for number, (said, color, points) in enumerate(lines)
        if points
    )
    if not drawn:
        return None
    chart = line_chart(drawn, name=f"{name} by percentile", x_name="percentile", logarithmic=True)
    return Figure(name, chart, drawn)


def over_time(bins: Sequence[Bin], requests: str) -> list[Figure]:
    """Chart rates, requests in flight, output and TTFT over time; empty where the run is too short.

    Args:
        requests: name of the chart of their rate.
    """

    def line(name: str, color: str, of: Callable[[Bin], float | None]) -> Line:
        return Line(name, color, tuple((b.start_s, of(b)) for b in bins))

    def figure(name: str, unit: str, *lines: Line) -> Figure:
        chart = line_chart(lines, name=name, x_name="seconds", y_name=unit, logarithmic=not unit)
        return Figure(name, chart, lines)

    if len(bins) < 2:
        return []
    rates = (
        line("scheduled", "s-0", lambda b: b.scheduled / b.width_s),
        line("failed", "s-1", lambda b: b.failed / b.width_s),
    )
    flight = line("in flight", "s-2", lambda b: float(b.in_flight))
    tokens = line("tokens", "s-3", lambda b: b.output_tokens_per_s)
    ttfts = line("p50", "s-0", lambda b: b.ttft_p50_s), line("p99", "s-1", lambda b: b.ttft_p99_s)
    figures = [
        figure(requests, "requests/s", *rates),
        figure("In flight, of those that completed", "requests", flight),
        figure("Output of requests that ended then", "tokens/s", tokens),
    ]
    if any(b.ttft_p50_s is not None for b in bins):
        figures.append(figure("TTFT of requests that arrived then", "", *ttfts))
    return figures
