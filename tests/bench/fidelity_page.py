"""Both curves of every load as one HTML page, in the style of the other reports."""

from __future__ import annotations

from collections.abc import Sequence

from iserve.report.charts import Line, line_chart
from iserve.report.page_frame import environment, render
from iserve.report.run_charts import Figure
from tests.bench.fidelity_compare import Comparison
from traces.timeline import CurvePoint

__all__ = ["render_fidelity"]

_PAGE = """
{% extends "page.html" %}
{% import "parts.html" as parts %}
{% block head %}<h1>{{ title }}</h1>{{ parts.facts(about) }}{% endblock %}
{% block body %}
{% for name, found in loads %}
<section><h2>{{ name }}</h2>
<p>{{ found.completed|thousands }} of {{ found.requests|thousands }} requests completed; \
{{ found.offered_requests_per_s|number }} requests/s, {{ found.mean_running|number }} at once on average; \
the sender was late by {{ found.lateness_p99_s|seconds }} at P99.</p>
{% call parts.table(["step times from", "", "P50", "simulated", "error", "P90", "simulated", "error", "P99",
                     "simulated", "error"], left=(0, 1)) %}
{% for predicted in found.predictions %}{% for metric in predicted.metrics %}
<tr>{{ parts.cells([predicted.source, metric.name], "l") }}
{% for real_s in metric.real_s %}{% set i = loop.index0 %}
{{ parts.cells([real_s|seconds, metric.simulated_s[i]|seconds, "{:+.0%}".format(metric.errors[i])]) }}
{% endfor %}</tr>
{% endfor %}{% endfor %}
{% endcall %}
{{ parts.panels(curves(found)) }}
</section>
{% endfor %}
{{ parts.bullets([
  "Both sides are the same requests: the simulated ones arrive when the real ones were sent, and times count from \
there.",
  "An error is simulated over measured, less 1.",
  "Utilisation is the offered rate over the rate at which the endpoint served a burst of the same trace.",
]) }}
{% endblock %}
"""


def render_fidelity(title: str, about: Sequence[tuple[str, str]], loads: Sequence[tuple[str, Comparison]]) -> str:
    """Works from a file, offline. ``loads``: name and what was found."""
    return render(environment().from_string(_PAGE), title=title, about=about, loads=loads, curves=_curves)


def _curves(found: Comparison) -> list[Figure]:
    return [_figure(found, metric.name) for metric in found.predictions[0].metrics]


def _figure(found: Comparison, name: str) -> Figure:
    lines = [Line("measured", "s-0", _points(found.predictions[0].metric(name).real_curve))]
    lines += [
        Line(f"simulated: {p.source}", f"s-{number}", _points(p.metric(name).simulated_curve), dashed=True)
        for number, p in enumerate(found.predictions, start=1)
    ]
    drawn = line_chart(lines, name=f"{name} by percentile", x_name="percentile", logarithmic=True, dots=False)
    return Figure(name, drawn, tuple(lines))


def _points(curve: tuple[CurvePoint, ...]) -> tuple[tuple[float, float | None], ...]:
    return tuple((point.percent, point.value_s) for point in curve)
