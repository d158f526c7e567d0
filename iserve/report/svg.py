"""The marks that charts are made of. Sizes and positions are in units of a drawing's own box."""

from __future__ import annotations

from collections.abc import Sequence

from iserve.report.markup import Child, Markup, el

__all__ = ["corners", "diamond", "dot", "drawing", "line", "words"]


def drawing(width: float, height: float, name: str, *children: Child, class_: str = "chart") -> Markup:
    """Return an image with a name, for those who see it and those who do not."""
    box = f"0 0 {width:g} {height:g}"
    return el("svg", el("title", name), *children, viewBox=box, role="img", class_=class_, aria_label=name)


def words(x: float, y: float, text: str, anchor: str = "middle", class_: str = "tick") -> Markup:
    return el("text", text, x=float(x), y=float(y), text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return el("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def corners(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the ``points`` of a polygon or polyline."""
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in pairs)


def dot(x: float, y: float, class_: str, title: str) -> Markup:
    return el("circle", el("title", title), cx=float(x), cy=float(y), r=3.2, class_=class_)


def diamond(x: float, y: float, color: str, title: str) -> Markup:
    """Draw a measured value next to its prediction; with the class ``open`` a dot below it stays visible."""
    shape = corners([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)])
    return el("polygon", el("title", title), points=shape, class_=f"truth {color}")
