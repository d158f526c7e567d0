"""Reproduced figure: tables, and findings next to the paper's. Printed as text, kept as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NOT_GIVEN", "NOT_MEASURED", "Chart", "Figure", "Finding", "Table", "shown"]

NOT_GIVEN = "not given"  # in the paper's text
NOT_MEASURED = "not measured"
_WIDTHS = (38, 40, 40)

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Finding:
    """Number of the paper, and ours."""

    what: str
    paper: str
    ours: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind; None is what there is no number for."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Bars: a group for every label (its lines divided by newlines), in it one of every series."""

    title: str
    unit: str
    labels: tuple[str, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Figure of the paper. ``source``: how our numbers were obtained."""

    number: str
    title: str
    source: str
    tables: tuple[Table, ...]
    findings: tuple[Finding, ...]
    charts: tuple[Chart, ...] = ()


def shown(figure: Figure) -> str:
    """The figure as text, for a notebook."""
    lines = [f"Figure {figure.number}. {figure.title}", f"ours: {figure.source}"]
    for table in figure.tables:
        lines += ["", table.title, *_aligned((table.columns, *(tuple(map(_cell, row)) for row in table.rows)))]
    if figure.findings:
        lines += ["", *_beside(figure.findings)]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            (text.ljust if i == 0 else text.rjust)(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _beside(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for row in (Finding("", "the paper", "ours"), *findings):
        cells = [
            textwrap.wrap(text, width) or [""]
            for text, width in zip((row.what, row.paper, row.ours), _WIDTHS, strict=True)
        ]
        for i in range(max(map(len, cells))):
            parts = [
                (cell[i] if i < len(cell) else "").ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)
            ]
            lines.append("  ".join(parts))
    return lines
