"""Drawings as SVG: elements, scales with round ticks, axes. Positions are in units of a drawing's own box."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from iserve.report.text import page_text

__all__ = [
    "Point",
    "Scale",
    "axes",
    "diamond",
    "dot",
    "drawing",
    "element",
    "line",
    "linear",
    "linear_ticks",
    "log_ticks",
    "path",
    "spread",
    "words",
]

Point = tuple[float, float]
_LOG_FROM = 8.0  # largest over smallest value from which a logarithmic axis reads better


def element(tag: str, *children: str, **attributes: str | float) -> Markup:
    """Return an element; text is escaped. ``class_`` is ``class``, ``aria_label`` is ``aria-label``."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_escaped(value)}"' for name, value in attributes.items()
    )
    inside = "".join(map(_escaped, children))
    return Markup(f"<{tag}{given}>{inside}</{tag}>" if inside else f"<{tag}{given}/>")


def _escaped(value: str | float) -> str:
    if isinstance(value, Markup):
        return value
    plain = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return escape(page_text(plain))


def drawing(width: float, height: float, name: str, *marks: Markup, class_: str = "chart") -> Markup:
    """Return an image with a name, for those who see it and those who do not; a chart keeps its proportions."""
    stretched = {} if class_ == "chart" else {"preserveAspectRatio": "none"}
    box = f"0 0 {width:g} {height:g}"
    title = element("title", name)
    return element("svg", title, *marks, viewBox=box, role="img", class_=class_, aria_label=name, **stretched)


def words(x: float, y: float, text: str, anchor: str = "middle", class_: str = "tick") -> Markup:
    return element("text", text, x=float(x), y=float(y), text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def path(points: Iterable[Point], class_: str, tag: str = "polyline") -> Markup:
    return element(tag, points=" ".join(f"{x:.2f},{y:.2f}" for x, y in points), class_=class_)


def dot(at: Point, class_: str, title: str, radius: float = 3.2) -> Markup:
    return element("circle", element("title", title), cx=at[0], cy=at[1], r=radius, class_=class_)


def diamond(at: Point, color: str, title: str) -> Markup:
    """Draw a measured value next to its prediction; with the class ``open`` a dot below it stays visible."""
    x, y = at
    shape = " ".join(f"{a:.2f},{b:.2f}" for a, b in ((x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)))
    return element("polygon", element("title", title), points=shape, class_=f"truth {color}")


@dataclass(frozen=True, slots=True)
class Scale:
    """Values ``low..high`` on positions ``start..end`` (SVG: a vertical one runs downwards)."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the position; a value outside is drawn at the edge."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside, about ``count``."""
        if self.logarithmic:
            return log_ticks(self.low, self.high, count)
        return linear_ticks(self.low, self.high, count)


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Return a linear scale; equal ends are spread, so that it can always be drawn."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    return Scale(low, high, start, end)


def spread(values: list[float], start: float, end: float) -> Scale:
    """Return a scale around positive ``values`` with some air: logarithmic when they span a lot, else linear."""
    low, high = min(values), max(values)
    if high / low >= _LOG_FROM:
        air = (high / low) ** 0.06
        return Scale(low / air, high * air, start, end, logarithmic=True)
    air = 0.08 * (high - low) or 0.3 * high
    return Scale(max(low - air, 0.0), high + air, start, end)


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten inside ``low..high``."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Return powers of ten inside, with their twos and fives where there is room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(found) <= count + 2:
            return found
    return found[:: math.ceil(len(found) / count)]


def axes(
    x: Scale,
    y: Scale,
    x_ticks: Iterable[tuple[float, str]],
    y_ticks: Iterable[tuple[float, str]],
    name: str,
    *,
    left: float | None = None,
    grid: bool = False,
) -> list[Markup]:
    """Return both axes: ticks with their labels, horizontal grid lines, and a name below.

    Args:
        left: where the vertical axis is; by default where ``x`` starts.
        grid: draw the vertical axis too, and vertical grid lines.
    """
    left = x.start if left is None else left
    parts: list[Markup] = []
    for value, label in y_ticks:
        parts += [line(left, y(value), x.end, y(value), "grid"), words(left - 5, y(value) + 3.5, label, "end")]
    for value, label in x_ticks:
        end, class_ = (y.end, "grid") if grid else (y.start + 4, "axis")
        parts.append(line(x(value), y.start, x(value), end, class_))
        parts += [words(x(value), y.start + 16, label)] if label else []
    parts += [line(left, y.start, left, y.end, "axis")] if grid else []
    parts.append(line(left, y.start, x.end, y.start, "axis"))
    parts.append(words((x.start + x.end) / 2, y.start + 32, name, class_="name"))
    return parts
