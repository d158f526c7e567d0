"""Both curves of every load as one HTML page, in the style of the other reports."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from fingerprint.report.markup import Markup, el, join
from fingerprint.report.tables import bullets, facts, legend, table
from fingerprint.report.text import number, seconds
from tests.bench.fidelity_compare import Comparison, Metric
from traces.replay.charts import Line, line_chart
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
    style = files("fingerprint.report").joinpath("report.css").read_text(encoding="utf-8")
    sections = [el("section", el("h2", name), _load(found)) for name, found in loads]
    page = el(
        "html",
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("title", title),
            el("style", Markup(style)),
        ),
        el("body", el("main", el("h1", title), facts(about), sections, bullets(_READING))),
        lang="en",
    )
    return str(join(Markup("<!DOCTYPE html>\n"), page, "\n"))


def _load(found: Comparison) -> Markup:
    lead = (
        f"{found.completed:,} of {found.requests:,} requests completed, {found.simulated_completed:,} simulated; "
        f"{number(found.offered_requests_per_s)} requests/s, {number(found.mean_running)} at once on average; the "
        f"sender was late by {seconds(found.lateness_p99_s)} at P99."
    )
    return join(
        el("p", lead),
        table(
            ("", "P50", "simulated", "error", "P90", "simulated", "error", "P99", "simulated", "error"),
            [_row(metric) for metric in found.metrics],
        ),
        el("div", [_curves(metric) for metric in found.metrics], class_="panels"),
    )


def _row(metric: Metric) -> Markup:
    cells = [
        text
        for real_s, model_s, error in zip(metric.real_s, metric.simulated_s, metric.errors, strict=True)
        for text in (seconds(real_s), seconds(model_s), f"{error:+.0%}")
    ]
    return el("tr", el("td", metric.name, class_="l"), [el("td", text, class_="n") for text in cells])


def _curves(metric: Metric) -> Markup:
    lines = [
        Line("measured", "s-0", _points(metric.real_curve)),
        Line("simulated", "s-1", _points(metric.simulated_curve), dashed=True),
    ]
    chart = line_chart(
        lines,
        name=f"{metric.name} by percentile",
        x_name="percentile",
        y_name="",
        in_seconds=True,
        logarithmic=True,
    )
    keys = legend([(line.color, "", line.name) for line in lines])
    return el("figure", chart, el("figcaption", metric.name), keys)


def _points(curve: tuple[CurvePoint, ...]) -> tuple[tuple[float, float | None], ...]:
    return tuple((point.percent, point.value_s) for point in curve)
