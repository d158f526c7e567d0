"""The Pareto front of a plan as a picture of characters: cost of a request against its end-to-end latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from iserve.cli.render import console, seconds, short
from iserve.report.charts import pareto_front
from iserve.report.svg import Scale, spread

if TYPE_CHECKING:
    from iserve.planning.document import PlanDocument

__all__ = ["LEAST_WIDTH", "pareto_picture", "print_pareto"]

LEAST_WIDTH = 60
_MOST_WIDTH, _HEIGHT = 100, 16
_LABEL_WIDTH = 9
_NUMBERS = "123456789abcdefghijklmnopqrstuvwxyz"
_STYLES = {".": "dim", "o": ""}  # refused, would work; the front has numbers


@dataclass(frozen=True, slots=True)
class _Point:
    cost: float
    e2e_s: float
    feasible: bool
    words: str


def print_pareto(document: PlanDocument) -> None:
    """Print to standard output; a narrow terminal gets a line instead of the picture."""
    out = console()
    if out.width < LEAST_WIDTH:
        out.print(f"no picture: it takes a terminal of {LEAST_WIDTH} columns, this one has {out.width}")
        return
    for line in pareto_picture(document, out.width):
        out.print(line)


def pareto_picture(document: PlanDocument, width: int) -> list[Text]:
    """Return lines of at most ``width`` characters, which must be ``LEAST_WIDTH`` or more.

    There are none where nothing has both figures. The front is that of the configurations that would work,
    numbered from the cheapest.
    """
    points = [
        _Point(c.estimate.cost, c.estimate.e2e_s.value, c.feasible, f"{short(c.config)} on {c.config.engine}")
        for c in document.candidates
        if c.estimate is not None and c.estimate.cost is not None and c.estimate.cost > 0
    ]
    if not points:
        return []
    feasible = [point for point in points if point.feasible]
    front = [feasible[i] for i in pareto_front([(point.cost, point.e2e_s) for point in feasible])]
    lines = [Text(f"end-to-end latency over the cost of a request ({document.cost_unit})")]
    lines += _plot(points, front, min(width, _MOST_WIDTH))
    said = "o would work, . refused; the front, cheapest first:" if front else ". refused; none would work"
    lines.append(Text(said))
    for number, point in zip(_NUMBERS, front, strict=False):
        figures = f"{point.cost:.4g} {document.cost_unit}, {seconds(point.e2e_s)}"
        line = Text.assemble((f"  {number}", "bold green"), f"  {figures}: {point.words}")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(front) > len(_NUMBERS):
        lines.append(Text(f"  ... and {len(front) - len(_NUMBERS)} more"))
    return lines


def _plot(points: Sequence[_Point], front: Sequence[_Point], width: int) -> list[Text]:
    columns = width - _LABEL_WIDTH - 2
    x = spread([point.cost for point in points], 0, columns - 1)
    y = spread([point.e2e_s for point in points], _HEIGHT - 1, 0)
    cells = [[" "] * columns for _ in range(_HEIGHT)]
    ordered = sorted(points, key=lambda point: point.feasible)  # of two in one place the one that would work shows
    for point in ordered:
        cells[round(y(point.e2e_s))][round(x(point.cost))] = "o" if point.feasible else "."
    for number, point in reversed(list(zip(_NUMBERS, front, strict=False))):
        cells[round(y(point.e2e_s))][round(x(point.cost))] = number
    ticks = {round(y(value)): seconds(value) for value in reversed(y.ticks(4))}
    lines = []
    for row, cell in enumerate(cells):
        label = ticks.get(row, "")
        line = Text(f"{label:>{_LABEL_WIDTH}} {'+' if label else '|'}")
        for mark in cell:
            line.append(mark, _STYLES.get(mark, "bold green") if mark != " " else None)
        line.rstrip()
        lines.append(line)
    return [*lines, *_bottom(x, columns)]


def _bottom(x: Scale, columns: int) -> list[Text]:
    """Return the axis of costs and its labels, those that would run into each other left out."""
    axis, labels = ["-"] * columns, [" "] * (columns + _LABEL_WIDTH)
    free_from = 0
    for value in x.ticks(5):
        text, at = f"{value:.4g}", round(x(value))
        begin = max(0, at - len(text) // 2)
        if begin >= free_from and begin + len(text) <= len(labels):
            axis[at] = "+"
            labels[begin : begin + len(text)] = text
            free_from = begin + len(text) + 2
    indent = " " * (_LABEL_WIDTH + 1)
    return [Text(f"{indent}+{''.join(axis)}"), Text(f"{indent} {''.join(labels).rstrip()}")]
