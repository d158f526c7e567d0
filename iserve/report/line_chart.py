"""Lines over percentiles or over time, as SVG in the style of the project's other reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from iserve.report.axes import Scale, linear
from iserve.report.markup import Child, Markup, el
from iserve.report.svg import corners, drawing, line, words
from iserve.report.text import number, seconds, tick_label, time_unit

__all__ = ["Line", "line_chart"]

_WIDTH, _HEIGHT = 360.0, 210.0
_LOG_FROM = 20.0  # largest over smallest value from which a logarithmic axis reads better


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
    y_name: str,
    in_seconds: bool,
    logarithmic: bool = False,
    dots: bool = True,
) -> Markup:
    """Return a chart of every line over the same axes; a time axis gets the unit that suits it.

    Args:
        dots: mark every point, with its numbers when pointed at.
        logarithmic: let the vertical axis be so where the values span a lot and none is 0.
    """
    xs = [x for each in lines for x, _ in each.points]
    ys = [y for each in lines for _, y in each.points if y is not None]
    x = linear(min(xs), max(xs), 56, _WIDTH - 12)
    y = _vertical(ys, logarithmic)
    scale, unit = time_unit(y.high) if in_seconds else (1.0, "")
    parts: list[Child] = []
    for tick in y.ticks(5):
        parts.append(line(x.start, y(tick), x.end, y(tick), "grid"))
        parts.append(words(x.start - 5, y(tick) + 3.5, tick_label(tick / scale), "end"))
    for tick in x.ticks(5):
        parts.append(line(x(tick), y.start, x(tick), y.start + 4, "axis"))
        parts.append(words(x(tick), y.start + 16, tick_label(tick)))
    parts.append(line(x.start, y.start, x.end, y.start, "axis"))
    said = ", ".join(filter(None, (unit or y_name, "logarithmic" if y.logarithmic else "")))
    parts.append(words((x.start + x.end) / 2, _HEIGHT - 4, f"{x_name} (vertical axis: {said})", class_="name"))
    parts += [_drawn(each, x, y, x_name, in_seconds, dots=dots) for each in lines]
    return drawing(_WIDTH, _HEIGHT, name, parts)


def _vertical(values: Sequence[float], logarithmic: bool) -> Scale:
    low, high = min(values), max(values)
    if logarithmic and low > 0 and high / low >= _LOG_FROM:
        return Scale(low / 1.1, high * 1.1, _HEIGHT - 36, 10, logarithmic=True)
    return linear(0, high * 1.06 or 1.0, _HEIGHT - 36, 10)


def _drawn(each: Line, x: Scale, y: Scale, x_name: str, in_seconds: bool, *, dots: bool) -> Markup:
    parts: list[Child] = []
    for run in _unbroken(each.points):
        class_ = "fit beyond" if each.dashed else "fit"
        parts.append(el("polyline", points=corners([(x(at), y(value)) for at, value in run]), class_=class_))
        parts += [
            el(
                "circle",
                el("title", f"{each.name}, {x_name} {at:g}: {seconds(value) if in_seconds else number(value)}"),
                cx=x(at),
                cy=y(value),
                r=1.6,
                class_="dot",
            )
            for at, value in run
            if dots
        ]
    return el("g", parts, class_=each.color)


def _unbroken(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if value is not None:
            runs[-1].append((at, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
