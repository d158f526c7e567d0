"""Charts of the pages, from values to SVG; no plotting library.

Colours are classes (``c-16bit``, ``m-weights``) that the pages' style sheet gives a light and a dark value. Every
mark carries a ``<title>``, every chart a name; a table next to it has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from iserve.report.svg import (
    Point,
    Scale,
    axes,
    diamond,
    dot,
    drawing,
    element,
    line,
    linear,
    path,
    spread,
    words,
)
from iserve.report.text import gib, number, range_of, seconds, tick_label, time_unit

if TYPE_CHECKING:  # what fits curves takes a second to import, and only the report needs it
    from fingerprint.estimates import Quantity, StageMemory
    from fingerprint.estimators.linear import Interval
    from iserve.report.full_model import DecodeStep
    from iserve.report.latency_fit import MeasuredTime, TimePanel, TimeSeries

__all__ = [
    "MEMORY_PARTS",
    "STEP_PARTS",
    "BatchCurve",
    "Line",
    "ParetoPoint",
    "batch_chart",
    "error_bar",
    "line_chart",
    "memory_bar",
    "pareto_chart",
    "pareto_front",
    "step_bar",
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
# (class, words, field of DecodeStep), in the order of the GPU's timeline
STEP_PARTS = (
    ("gap", "gap: the GPU waits for the host", "gap_s"),
    ("lead", "lead: inputs are made", "lead_s"),
    ("forward", "forward: the layers", "layers_s"),
    ("repeats", "the cost of repeating it, taken off", "repeats_s"),
    ("tail", "tail: logits and sampling", "tail_s"),
)


# Time against layers


def time_chart(
    panel: TimePanel, *, num_layers: int, most_s: float, truths: Sequence[tuple[str, float, float]] = ()
) -> Markup:
    """Draw measured depths with their spread, the fitted lines on to the whole model, their 90% bands.

    Args:
        most_s: top of the time axis, so that neighbouring panels can share it.
        truths: (weight format, seconds, layers) measured on the full model, drawn as diamonds.
    """
    width, height = 330.0, 210.0
    x, y = linear(0, num_layers * 1.04, 44, width - 8), linear(0, most_s, height - 36, 12)
    scale, unit = time_unit(most_s)
    depths = [(float(layers), str(layers)) for layers in _layer_ticks(num_layers)]
    times = [(tick, tick_label(tick / scale)) for tick in y.ticks(4)]
    diamonds = [
        diamond((x(at), y(value)), f"c-{w}", f"full model measured, {w}: {seconds(value)}")
        for w, value, at in truths
    ]
    return drawing(
        width,
        height,
        f"{panel.name} against layers at tp={panel.tp} pp={panel.pp}",
        *axes(x, y, depths, times, f"layers (vertical axis: {unit})"),
        *(_time_series(series, x, y, index) for index, series in enumerate(panel.series)),
        *diamonds,
    )


def _time_series(series: TimeSeries, x: Scale, y: Scale, index: int) -> Markup:
    def title(time: MeasuredTime, how: str) -> str:
        interval = f"{seconds(time.low_s)} to {seconds(time.high_s)}"
        return f"{series.weights} weights, {time.num_layers:g} layers: {seconds(time.value_s)} ({interval}), {how}"

    parts: list[Markup] = []
    if series.line:
        parts.append(_band([(x(p.num_layers), y(p.low_s), y(p.high_s)) for p in series.line]))
        deepest = series.points[-1].num_layers
        for class_, part in (
            ("fit", [p for p in series.line if p.num_layers <= deepest]),
            ("fit beyond", [p for p in series.line if p.num_layers >= deepest]),
        ):
            parts.append(path([(x(p.num_layers), y(p.value_s)) for p in part], class_))
        end = series.line[-1]
        parts.append(dot((x(end.num_layers), y(end.value_s)), "end", title(end, "predicted")))
    shift = 3.0 * index  # two formats at one depth would hide each other
    for point in series.points:
        at = x(point.num_layers) + shift
        parts.append(line(at, y(point.low_s), at, y(point.high_s), "whisker"))
        parts.append(dot((at, y(point.value_s)), "dot", title(point, f"measured, {point.num_runs} runs")))
    return element("g", *parts, class_=f"c-{series.weights}")


def _band(ends: Sequence[tuple[float, float, float]], class_: str = "band") -> Markup:
    """Return the area between the (x, low, high) positions."""
    upper, lower = [(x, high) for x, _, high in ends], [(x, low) for x, low, _ in reversed(ends)]
    return path(upper + lower, class_, tag="polygon")


def _layer_ticks(num_layers: int) -> list[int]:
    """Round numbers of layers, and the whole model's."""
    scale = linear(0, num_layers, 0, 1)
    rounds = {round(tick) for tick in scale.ticks(6) if tick >= 1 and abs(tick - round(tick)) < 1e-9}
    return sorted({tick for tick in rounds if num_layers - tick > num_layers / 12} | {1, num_layers})


# Bars in a table's cell


def whisker(interval: Interval, most: float, least: float, title: str) -> Markup:
    """Draw a value with its interval on a line that shows where zero is; it stretches to its table cell."""
    ends = (interval.value, interval.low, interval.high)
    return _interval_bar(ends, min(least, 0.0), most, title, resolved=interval.low > 0)


def error_bar(error: Interval, limit: float, title: str, *, inside: bool) -> Markup:
    """Draw a prediction's error and its interval about the measured value, which is the line; cut at ``limit``."""
    ends = tuple(min(max(end, -limit), limit) for end in (error.value, error.low, error.high))
    return _interval_bar(ends, -limit, limit, title, resolved=inside)


def _interval_bar(ends: Iterable[float], least: float, most: float, title: str, *, resolved: bool) -> Markup:
    x = linear(least, most, 1, 199)
    value, low, high = map(x, ends)
    mark = element("rect", x=value - 1.5, y=3, width=3, height=10)
    span = element("g", line(low, 8, high, 8, "span"), mark, class_="resolved" if resolved else "unresolved")
    return drawing(200, 16, title, line(x(0), 0, x(0), 16, "zero"), span, class_="whiskers")


def memory_bar(stage: StageMemory, most_bytes: int, name: str, *, with_runtime: bool = True) -> Markup:
    """Draw a configuration's bytes on its fullest GPU as a stacked bar, ``most_bytes`` long at most."""
    shown = MEMORY_PARTS if with_runtime else MEMORY_PARTS[:-1]
    sizes = [(f"m-{part}", said, getattr(stage, f"{part}_bytes")) for part, said in shown]
    total, parts = gib(sum(size for _, _, size in sizes)), [part for part in sizes if part[2]]
    title = f"{name}: {total} on the fullest GPU{'' if with_runtime else ' without the runtime'}"
    return _stacked_bar(parts, max(most_bytes, 1), title, gib, "bar" if with_runtime else "bar counted")


def step_bar(step: DecodeStep, most_s: float, name: str) -> Markup:
    """Draw a decode step's parts, one after the other; ``most_s`` long at most."""
    parts = [(f"p-{class_}", said, getattr(step, field)) for class_, said, field in STEP_PARTS]
    return _stacked_bar(parts, most_s, f"{name}: {seconds(step.total_s)}", seconds)


def _stacked_bar(
    parts: Iterable[tuple[str, str, float]],
    most: float,
    title: str,
    shown: Callable[[float], str],
    class_: str = "bar",
) -> Markup:
    x, bars = 0.0, []
    for color, said, size in parts:
        width, part = 1000 * size / most, element("title", f"{said}: {shown(size)}")
        bars.append(element("rect", part, x=x, y=0, width=width, height=14, class_=color))
        x += width
    return drawing(1000, 14, title, *bars, class_=class_)


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
    scales = " and ".join(s for s, log in (("cost", x.logarithmic), ("latency", y.logarithmic)) if log)
    name = f"cost per request ({cost_unit}) →; ↑ E2E latency ({unit})"
    costs = [(tick, tick_label(tick)) for tick in x.ticks(max(3, int(width / 110)))]
    times = [(tick, tick_label(tick / scale)) for tick in y.ticks(6)]
    front = sorted((p for p in points if p.number is not None), key=lambda p: p.cost)
    return drawing(
        width,
        height,
        "E2E latency against cost of every configuration",
        *axes(x, y, costs, times, f"{name}; {scales} logarithmic" if scales else name, grid=True),
        *([path(_steps(front, x, y), "front")] if front else []),
        *(_pareto_mark(p, x, y) for p in sorted(points, key=lambda p: (p.number is not None, p.feasible))),
    )  # the front on top


def _steps(front: Sequence[ParetoPoint], x: Scale, y: Scale) -> list[Point]:
    """Return the corners of the line above and right of which all is worse than some point of the front."""
    corners = [(x(front[0].cost), y.end)]
    for here, after in zip(front, [*front[1:], None], strict=True):
        corners.append((x(here.cost), y(here.e2e_s)))
        corners.append((x(after.cost) if after else x.end, y(here.e2e_s)))
    return corners


def _pareto_mark(point: ParetoPoint, x: Scale, y: Scale) -> Markup:
    at, up = x(point.cost), y(point.e2e_s)
    if not point.feasible:
        kind, marks = "refused", [element("path", d=f"M{at - 3.5:.2f} {up - 3.5:.2f}l7 7m0 -7l-7 7")]
    elif point.number is None:
        kind, marks = "feasible", [element("circle", cx=at, cy=up, r=4)]
    else:
        interval = line(at, y(point.e2e_low_s), at, y(point.e2e_high_s), "whisker")
        named = words(at, up + 3.8, str(point.number), class_="number")
        kind, marks = "best", [interval, element("circle", cx=at, cy=up, r=8.5), named]
    return element("g", element("title", point.title), *marks, class_=f"{kind} c-{point.weights}")


# Times over the batch

_LABEL_HEIGHT = 11.0
_LABEL_WIDTH = 44.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCurve:
    """Line of a chart: a quantity of one input length."""

    input_tokens: int
    color: str  # a class of the style sheet
    estimated: tuple[tuple[int, Quantity], ...]  # (batch, time), by batch
    ran: tuple[int, ...]  # batches that were run
    truths: tuple[tuple[int, float], ...] = ()  # (batch, seconds) of the whole model


def batch_chart(
    curves: Sequence[BatchCurve], *, name: str, logarithmic: bool, width: float, height: float
) -> Markup:
    """Draw lines over the batch with 90% bands, dots where it was run, diamonds where the truth is known.

    Args:
        logarithmic: the time axis; otherwise it begins at 0.
    """
    batches = [batch for curve in curves for batch, _ in curve.estimated]
    times = [found for curve in curves for _, found in curve.estimated]
    true = [value for curve in curves for _, value in curve.truths]
    low, high = min([t.low for t in times] + true), max([t.high for t in times] + true)
    x = linear(min(batches), max(batches), 52, width - _LABEL_WIDTH - 14)
    if max(batches) > min(batches):
        x = Scale(x.low, x.high, 60, x.end, logarithmic=True)
    y = linear(0, high * 1.04, height - 36, 10)
    if logarithmic and low > 0:
        y = Scale(low / 1.05, high * 1.05, y.start, y.end, logarithmic=True)
    ends = [(x(curve.estimated[-1][0]), y(curve.estimated[-1][1].value), curve) for curve in curves]
    bands = [
        element("g", _band([(x(b), y(t.low), y(t.high)) for b, t in c.estimated], "band thin"), class_=c.color)
        for c in curves
    ]
    labels = [
        words(at + 8, up + 3.5, f"{curve.input_tokens} in", "start", f"end-label {curve.color}")
        for at, up, curve in _apart(ends, y.start)
    ]
    diamonds = [
        diamond(
            (x(batch), y(value)),
            f"open {c.color}",
            f"whole model measured, batch {batch}, {c.input_tokens} in: {seconds(value)}",
        )
        for c in curves
        for batch, value in c.truths
    ]
    return drawing(
        width,
        height,
        name,
        *axes(
            x,
            y,
            _batch_ticks(x, sorted({b for c in curves for b in c.ran})),
            [(tick, _own_unit(tick)) for tick in y.ticks(5)],
            "batch (both axes logarithmic)" if y.logarithmic else "batch (logarithmic)",
            left=52,
        ),
        *bands,
        *(_curve(curve, x, y) for curve in curves),
        *diamonds,
        *labels,
    )


def _batch_ticks(x: Scale, ran: Iterable[int]) -> list[tuple[float, str]]:
    """Return a tick for each batch, its label where it has room."""
    ticks, last = [], float("-inf")
    for batch in ran:
        fits = x(batch) - last > 7 * len(str(batch)) + 4
        last = x(batch) if fits else last
        ticks.append((float(batch), str(batch) if fits else ""))
    return ticks


def _own_unit(value_s: float) -> str:
    """Return the label in its own unit: an axis may reach from milliseconds to seconds."""
    if value_s == 0:
        return "0"
    scale, unit = time_unit(value_s)
    return f"{tick_label(value_s / scale)} {unit}"


def _curve(curve: BatchCurve, x: Scale, y: Scale) -> Markup:
    dots = [
        dot(
            (x(batch), y(found.value)),
            "dot",
            f"batch {batch}, {curve.input_tokens} in: {seconds(found.value)} ({range_of(found)})",
        )
        for batch, found in curve.estimated
        if batch in curve.ran
    ]
    fit = path([(x(batch), y(found.value)) for batch, found in curve.estimated], "fit")
    return element("g", fit, *dots, class_=curve.color)


_End = tuple[float, float, BatchCurve]  # where a line ends: right, down


def _apart(ends: Sequence[_End], lowest: float) -> list[_End]:
    """Move labels of lines that end close to each other until none covers another nor is below ``lowest``."""
    down: list[_End] = []
    for at, y, curve in sorted(ends, key=lambda end: end[1]):
        above = [other + _LABEL_HEIGHT for left, other, _ in down if abs(left - at) < _LABEL_WIDTH]
        down.append((at, max([y, *above]), curve))
    up: list[_End] = []
    for at, y, curve in reversed(down):
        below = [other - _LABEL_HEIGHT for left, other, _ in up if abs(left - at) < _LABEL_WIDTH]
        up.append((at, min([y, lowest, *below]), curve))
    return up


# Lines over percentiles or over time

_SPAN = 20.0  # largest over smallest value from which a logarithmic axis reads better


@dataclass(frozen=True, slots=True)
class Line:
    """(x, y) points; where y is None the line is broken."""

    name: str
    color: str  # a class of the style sheet
    points: tuple[tuple[float, float | None], ...]
    dashed: bool = False


def line_chart(
    lines: Sequence[Line],
    *,
    name: str,
    x_name: str,
    y_name: str = "",
    logarithmic: bool = False,
) -> Markup:
    """Return a chart of every line over the same axes.

    Args:
        y_name: unit of the values; without one they are seconds, shown in the unit that suits them.
        logarithmic: let the vertical axis be so where the values span a lot and none is 0.
    """
    width, height = 360.0, 210.0
    xs = [x for each in lines for x, _ in each.points]
    ys = [y for each in lines for _, y in each.points if y is not None]
    low, high = min(ys), max(ys)
    x, y = linear(min(xs), max(xs), 56, width - 12), linear(0, high * 1.06 or 1.0, height - 36, 10)
    if logarithmic and low > 0 and high / low >= _SPAN:
        y = Scale(low / 1.1, high * 1.1, y.start, y.end, logarithmic=True)
    scale, unit = (1.0, y_name) if y_name else time_unit(y.high)
    said = f"{x_name} (vertical axis: {unit}{', logarithmic' if y.logarithmic else ''})"
    x_ticks = [(tick, tick_label(tick)) for tick in x.ticks(5)]
    y_ticks = [(tick, tick_label(tick / scale)) for tick in y.ticks(5)]
    groups = []
    for each in lines:
        marks = []
        for run in _unbroken(each.points):
            marks.append(path([(x(at), y(value)) for at, value in run], "fit beyond" if each.dashed else "fit"))
            for at, value in run:
                title = f"{each.name}, {x_name} {at:g}: {number(value) if y_name else seconds(value)}"
                marks.append(dot((x(at), y(value)), "dot", title, 1.6))
        groups.append(element("g", *marks, class_=each.color))
    return drawing(width, height, name, *axes(x, y, x_ticks, y_ticks, said), *groups)


def _unbroken(points: Sequence[tuple[float, float | None]]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for at, value in points:
        if value is not None:
            runs[-1].append((at, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
