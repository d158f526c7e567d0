"""Charts as SVG, from values to markup; no plotting library.

Colours are classes (``c-16bit``, ``m-weights``) that the page's style sheet gives a light and a dark value. Every
mark carries a ``<title>``, every chart a name; a table next to it has the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fingerprint.estimates import StageMemory
from fingerprint.estimators.linear import Interval
from iserve.report.axes import Scale, linear, spread
from iserve.report.latency_fit import MeasuredTime, TimePanel, TimeSeries
from iserve.report.markup import Child, Markup, el
from iserve.report.svg import corners, diamond, dot, drawing, line, words
from iserve.report.text import gib, seconds, tick_label, time_unit

__all__ = [
    "MEMORY_PARTS",
    "ParetoPoint",
    "error_bar",
    "memory_bar",
    "pareto_chart",
    "pareto_front",
    "time_chart",
    "whisker",
]

MEMORY_PARTS = (
    ("weights", "weights"),
    ("kv", "KV cache"),
    ("activation", "activations"),
    ("pp_buffer", "pipeline buffers"),
    ("runtime", "runtime"),
)


# Time against layers


def time_chart(
    panel: TimePanel,
    *,
    num_layers: int,
    most_s: float,
    truths: Sequence[tuple[str, float, float]] = (),
    width: float = 330,
    height: float = 210,
) -> Markup:
    """Draw measured depths with their spread, the fitted lines on to the whole model, their 90% bands.

    Args:
        most_s: top of the time axis, so that neighbouring panels can share it.
        truths: (weight format, seconds, layers) measured on the full model, drawn as diamonds.
    """
    scale, unit = time_unit(most_s)
    x = linear(0, num_layers * 1.04, 44, width - 8)
    y = linear(0, most_s, height - 34, 12)
    axes: list[Child] = []
    for tick in y.ticks(4):
        axes.append(line(x.start, y(tick), x.end, y(tick), "grid"))
        axes.append(words(x.start - 5, y(tick) + 3.5, tick_label(tick / scale), "end"))
    for layers in _layer_ticks(num_layers):
        axes.append(words(x(layers), y.start + 15, str(layers)))
    axes.append(line(x.start, y.start, x.end, y.start, "axis"))
    axes.append(words((x.start + x.end) / 2, height - 4, f"layers (vertical axis: {unit})", class_="name"))
    marks = [_time_series(series, x, y, index) for index, series in enumerate(panel.series)]
    diamonds = [
        diamond(x(at), y(value), f"c-{w}", f"full model measured, {w}: {seconds(value)}")
        for w, value, at in truths
    ]
    name = f"{panel.quantity.removesuffix('_s').upper()} against layers at tp={panel.tp} pp={panel.pp}"
    return drawing(width, height, name, axes, marks, diamonds)


def _time_series(series: TimeSeries, x: Scale, y: Scale, index: int) -> Markup:
    color = f"c-{series.weights}"
    parts: list[Child] = []
    if series.line:
        upper = [(x(p.num_layers), y(p.high_s)) for p in series.line]
        lower = [(x(p.num_layers), y(p.low_s)) for p in reversed(series.line)]
        parts.append(el("polygon", points=corners(upper + lower), class_="band"))
        deepest = series.points[-1].num_layers
        for class_, part in (
            ("fit", [p for p in series.line if p.num_layers <= deepest]),
            ("fit beyond", [p for p in series.line if p.num_layers >= deepest]),
        ):
            parts.append(
                el("polyline", points=corners([(x(p.num_layers), y(p.value_s)) for p in part]), class_=class_)
            )
        end = series.line[-1]
        parts.append(dot(x(end.num_layers), y(end.value_s), "end", _said(series, end, "predicted")))
    shift = 3.0 * index  # two formats at one depth would hide each other
    for point in series.points:
        at = x(point.num_layers) + shift
        parts.append(line(at, y(point.low_s), at, y(point.high_s), "whisker"))
        parts.append(dot(at, y(point.value_s), "dot", _said(series, point, f"measured, {point.num_runs} runs")))
    return el("g", parts, class_=color)


def _said(series: TimeSeries, time: MeasuredTime, how: str) -> str:
    return (
        f"{series.weights} weights, {time.num_layers:g} layers: {seconds(time.value_s)} "
        f"({seconds(time.low_s)} to {seconds(time.high_s)}), {how}"
    )


def _layer_ticks(num_layers: int) -> list[int]:
    """Round numbers of layers, and the whole model's."""
    scale = linear(0, num_layers, 0, 1)
    rounds = {round(tick) for tick in scale.ticks(6) if tick >= 1 and abs(tick - round(tick)) < 1e-9}
    return sorted({tick for tick in rounds if num_layers - tick > num_layers / 12} | {1, num_layers})


# One layer's time


def whisker(interval: Interval, most: float, least: float, title: str) -> Markup:
    """Draw a value with its interval on a line that shows where zero is; it stretches to its table cell."""
    x = linear(min(least, 0.0), most, 1, 199)
    return _span(interval, x, title, "unresolved" if interval.low <= 0 else "resolved")


def error_bar(error: Interval, limit: float, title: str, *, inside: bool) -> Markup:
    """Draw a prediction's error and its interval about the measured value, which is the line; cut at ``limit``."""
    value, low, high = (min(max(end, -limit), limit) for end in (error.value, error.low, error.high))
    x = linear(-limit, limit, 1, 199)
    return _span(Interval(value, low, high), x, title, "resolved" if inside else "unresolved")


def _span(interval: Interval, x: Scale, title: str, class_: str) -> Markup:
    return el(
        "svg",
        el("title", title),
        line(x(0), 0, x(0), 16, "zero"),
        el(
            "g",
            line(x(interval.low), 8, x(interval.high), 8, "span"),
            el("rect", x=x(interval.value) - 1.5, y=3, width=3, height=10),
            class_=class_,
        ),
        viewBox="0 0 200 16",
        preserveAspectRatio="none",
        role="img",
        class_="whiskers",
        aria_label=title,
    )


# Memory


def memory_bar(stage: StageMemory, most_bytes: int, name: str, *, with_runtime: bool = True) -> Markup:
    """Draw a configuration's bytes on its fullest GPU as a stacked bar, ``most_bytes`` long at most."""
    x, parts = 0.0, []
    for part, said in MEMORY_PARTS if with_runtime else MEMORY_PARTS[:-1]:
        size = int(getattr(stage, f"{part}_bytes"))
        width = 1000 * size / max(most_bytes, 1)
        if size:
            parts.append(
                el(
                    "rect",
                    el("title", f"{said}: {gib(size)}"),
                    x=x,
                    y=0,
                    width=width,
                    height=14,
                    class_=f"m-{part}",
                )
            )
        x += width
    total = stage.total_bytes - (0 if with_runtime else stage.runtime_bytes)
    title = f"{name}: {gib(total)} on the fullest GPU{'' if with_runtime else ' without the runtime'}"
    return el(
        "svg",
        el("title", title),
        parts,
        viewBox="0 0 1000 14",
        preserveAspectRatio="none",
        role="img",
        class_="bar" if with_runtime else "bar counted",
        aria_label=title,
    )


# Latency against cost


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """Configuration in the plane of cost and latency. ``number``: on the front, counted from the cheapest."""

    cost: float
    e2e_s: float
    e2e_low_s: float
    e2e_high_s: float
    weights: str
    feasible: bool
    title: str
    number: int | None = None


def pareto_front(values: Sequence[tuple[float, float]]) -> list[int]:
    """Return indexes of the (cost, latency) points that no other dominates, cheapest first.

    A point dominates another when it is at most as large in both and smaller in one. Of equal points the first is
    kept.
    """
    front: list[int] = []
    best = float("inf")
    for index in sorted(range(len(values)), key=lambda i: (*values[i], i)):
        if values[index][1] < best:
            front.append(index)
            best = values[index][1]
    return front


def pareto_chart(points: Sequence[ParetoPoint], *, cost_unit: str, width: float, height: float) -> Markup:
    """Draw E2E latency against cost: feasible ones as discs, refused ones as crosses, the front as steps."""
    x = spread([p.cost for p in points], 54, width - 14)
    y = spread([p.e2e_s for p in points], height - 42, 12)
    scale, unit = time_unit(y.high)
    parts: list[Child] = []
    for tick in x.ticks(max(3, int(width / 110))):
        parts.append(line(x(tick), y.start, x(tick), y.end, "grid"))
        parts.append(words(x(tick), y.start + 16, tick_label(tick)))
    for tick in y.ticks(6):
        parts.append(line(x.start, y(tick), x.end, y(tick), "grid"))
        parts.append(words(x.start - 6, y(tick) + 3.5, tick_label(tick / scale), "end"))
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    parts.append(line(x.start, y.start, x.start, y.end, "axis"))
    scales = " and ".join(s for s, log in (("cost", x.logarithmic), ("latency", y.logarithmic)) if log)
    name = f"cost per request ({cost_unit}) →; ↑ E2E latency ({unit})" + (
        f"; {scales} logarithmic" if scales else ""
    )
    parts.append(words((x.start + x.end) / 2, height - 6, name, class_="name"))
    front = sorted((p for p in points if p.number is not None), key=lambda p: p.cost)
    if front:
        parts.append(el("polyline", points=corners(_steps(front, x, y)), class_="front"))
    for point in sorted(points, key=lambda p: (p.number is not None, p.feasible)):  # the front on top
        parts.append(_pareto_mark(point, x, y))
    return drawing(width, height, "E2E latency against cost of every configuration", parts)


def _steps(front: Sequence[ParetoPoint], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Return the corners of the line above and right of which all is worse than some point of the front."""
    corners = [(x(front[0].cost), y.end)]
    for here, after in zip(front, [*front[1:], None], strict=True):
        corners.append((x(here.cost), y(here.e2e_s)))
        corners.append((x(after.cost) if after else x.end, y(here.e2e_s)))
    return corners


def _pareto_mark(point: ParetoPoint, x: Scale, y: Scale) -> Markup:
    at, up = x(point.cost), y(point.e2e_s)
    title = el("title", point.title)
    if not point.feasible:
        cross = f"M{at - 3.5:.2f} {up - 3.5:.2f}l7 7m0 -7l-7 7"
        return el("g", title, el("path", d=cross), class_=f"refused c-{point.weights}")
    if point.number is None:
        return el("g", title, el("circle", cx=at, cy=up, r=4), class_=f"feasible c-{point.weights}")
    return el(
        "g",
        title,
        line(at, y(point.e2e_low_s), at, y(point.e2e_high_s), "whisker"),
        el("circle", cx=at, cy=up, r=8.5),
        words(at, up + 3.8, str(point.number), class_="number"),
        class_=f"best c-{point.weights}",
    )
