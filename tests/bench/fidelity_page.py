"""Both curves of every load as one HTML page, in the style of the other reports."""

from __future__ import annotations

from collections.abc import Sequence

from iserve.report.line_chart import Line, line_chart
from iserve.report.markup import Markup, el, join
from iserve.report.page_frame import html_page
from iserve.report.tables import bullets, facts, legend, table
from iserve.report.text import number, seconds
from tests.bench.fidelity_compare import Comparison, Metric
from traces.timeline import CurvePoint

__all__ = ["render_fidelity"]

_READING = (
    "Both sides are the same requests: the simulated ones arrive when the real ones were sent, and times count "
    "from there.",
    "An error is simulated over measured, less 1.",
    "Utilisation is the offered rate over the rate at which the endpoint served a burst of the same trace.",
)


def render_fidelity(title: str, about: Sequence[tuple[str, str]], loads: Sequence[tuple[str, Comparison]]) -> str:
    """Works from a file, offline. ``loads``: name and what was found."""
    sections = [el("section", el("h2", name), _load(found)) for name, found in loads]
    return html_page(title, el("main", el("h1", title), facts(about), sections, bullets(_READING)))


def _load(found: Comparison) -> Markup:
    lead = (
        f"{found.completed:,} of {found.requests:,} requests completed; {number(found.offered_requests_per_s)} "
        f"requests/s, {number(found.mean_running)} at once on average; the sender was late by "
        f"{seconds(found.lateness_p99_s)} at P99."
    )
    rows = [_row(p.source, metric) for p in found.predictions for metric in p.metrics]
    names = [metric.name for metric in found.predictions[0].metrics]
    return join(
        el("p", lead),
        table(("step times from", "", *_HEAD), rows, left=(0, 1)),
        el("div", [_curves(found, name) for name in names], class_="panels"),
    )


_HEAD = ("P50", "simulated", "error", "P90", "simulated", "error", "P99", "simulated", "error")


def _row(source: str, metric: Metric) -> Markup:
    cells = [
        text
        for real_s, model_s, error in zip(metric.real_s, metric.simulated_s, metric.errors, strict=True)
        for text in (seconds(real_s), seconds(model_s), f"{error:+.0%}")
    ]
    names = [el("td", text, class_="l") for text in (source, metric.name)]
    return el("tr", names, [el("td", text, class_="n") for text in cells])


def _curves(found: Comparison, name: str) -> Markup:
    lines = [Line("measured", "s-0", _points(found.predictions[0].metric(name).real_curve))]
    lines += [
        Line(f"simulated: {p.source}", f"s-{number}", _points(p.metric(name).simulated_curve), dashed=True)
        for number, p in enumerate(found.predictions, start=1)
    ]
    chart = line_chart(
        lines,
        name=f"{name} by percentile",
        x_name="percentile",
        y_name="",
        in_seconds=True,
        logarithmic=True,
        dots=False,
    )
    keys = legend([(line.color, "", line.name) for line in lines])
    return el("figure", chart, el("figcaption", name), keys)


def _points(curve: tuple[CurvePoint, ...]) -> tuple[tuple[float, float | None], ...]:
    return tuple((point.percent, point.value_s) for point in curve)
