"""Charts of what was measured over the batch: times as one line per input length, a decode step as a bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fingerprint.estimates import Quantity
from iserve.report.axes import Scale, linear
from iserve.report.full_model import DecodeStep
from iserve.report.markup import Child, Markup, el
from iserve.report.svg import corners, diamond, dot, drawing, line, words
from iserve.report.text import range_of, seconds, tick_label, time_unit

__all__ = ["STEP_PARTS", "BatchCurve", "batch_chart", "step_bar"]

# (class, words, field of DecodeStep), in the order of the GPU's timeline
STEP_PARTS = (
    ("gap", "gap: the GPU waits for the host", "gap_s"),
    ("lead", "lead: inputs are made", "lead_s"),
    ("forward", "forward: the layers", "layers_s"),
    ("repeats", "what repeating it cost beside them, taken off", "repeats_s"),
    ("tail", "tail: logits and sampling", "tail_s"),
)
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
    batches = sorted({batch for curve in curves for batch, _ in curve.estimated})
    times = [found for curve in curves for _, found in curve.estimated]
    true = [value for curve in curves for _, value in curve.truths]
    low, high = min([t.low for t in times] + true), max([t.high for t in times] + true)
    x = _over_batches(batches, 52, width - _LABEL_WIDTH - 14)
    y = (
        Scale(low / 1.05, high * 1.05, height - 36, 10, logarithmic=True)
        if logarithmic and low > 0
        else linear(0, high * 1.04, height - 36, 10)
    )
    axes = _axes(x, y, sorted({b for curve in curves for b in curve.ran}), height)
    ends = [(x(curve.estimated[-1][0]), y(curve.estimated[-1][1].value), curve) for curve in curves]
    labels = [
        words(at + 8, up + 3.5, f"{curve.input_tokens} in", "start", f"end-label {curve.color}")
        for at, up, curve in _apart(ends, y.start)
    ]
    bands = [_band(curve, x, y) for curve in curves]
    lines = [_curve(curve, x, y) for curve in curves]
    diamonds = [
        diamond(
            x(b),
            y(value),
            f"open {curve.color}",
            f"whole model measured, batch {b}, {curve.input_tokens} in: {seconds(value)}",
        )
        for curve in curves
        for b, value in curve.truths
    ]
    return drawing(width, height, name, axes, bands, lines, diamonds, labels)


def _over_batches(batches: Sequence[int], start: float, end: float) -> Scale:
    low, high = batches[0], batches[-1]
    return Scale(low, high, start + 8, end, logarithmic=True) if high > low else linear(low, high, start, end)


def _axes(x: Scale, y: Scale, ran: Sequence[int], height: float) -> list[Child]:
    left = x.start - 8
    parts: list[Child] = []
    for tick in y.ticks(5):
        parts.append(line(left, y(tick), x.end, y(tick), "grid"))
        parts.append(words(left - 5, y(tick) + 3.5, _tick(tick), "end"))
    last = float("-inf")
    for batch in ran:
        parts.append(line(x(batch), y.start, x(batch), y.start + 4, "axis"))
        if x(batch) - last > 7 * len(str(batch)) + 4:
            parts.append(words(x(batch), y.start + 16, str(batch)))
            last = x(batch)
    parts.append(line(left, y.start, x.end, y.start, "axis"))
    name = "batch (both axes logarithmic)" if y.logarithmic else "batch (logarithmic)"
    parts.append(words((x.start + x.end) / 2, height - 4, name, class_="name"))
    return parts


def _tick(value_s: float) -> str:
    """Return the label in its own unit: an axis may reach from milliseconds to seconds."""
    if value_s == 0:
        return "0"
    scale, unit = time_unit(value_s)
    return f"{tick_label(value_s / scale)} {unit}"


def _band(curve: BatchCurve, x: Scale, y: Scale) -> Markup:
    upper = [(x(batch), y(found.high)) for batch, found in curve.estimated]
    lower = [(x(batch), y(found.low)) for batch, found in reversed(curve.estimated)]
    return el("g", el("polygon", points=corners(upper + lower), class_="band thin"), class_=curve.color)


def _curve(curve: BatchCurve, x: Scale, y: Scale) -> Markup:
    parts: list[Child] = [
        el("polyline", points=corners([(x(b), y(found.value)) for b, found in curve.estimated]), class_="fit")
    ]
    for batch, found in curve.estimated:
        if batch in curve.ran:
            said = f"batch {batch}, {curve.input_tokens} in: {seconds(found.value)} ({range_of(found)})"
            parts.append(dot(x(batch), y(found.value), "dot", said))
    return el("g", parts, class_=curve.color)


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


def step_bar(step: DecodeStep, most_s: float, name: str) -> Markup:
    """Draw a decode step's parts, one after the other; ``most_s`` long at most."""
    x, parts = 0.0, []
    for class_, said, field in STEP_PARTS:
        part_s = float(getattr(step, field))
        width = 1000 * part_s / most_s
        told = el("title", f"{said}: {seconds(part_s)}")
        parts.append(el("rect", told, x=x, y=0, width=width, height=14, class_=f"p-{class_}"))
        x += width
    title = f"{name}: {seconds(step.total_s)}"
    return el(
        "svg",
        el("title", title),
        parts,
        viewBox="0 0 1000 14",
        preserveAspectRatio="none",
        role="img",
        class_="bar",
        aria_label=title,
    )
