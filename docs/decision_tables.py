"""Tables of docs/performance.md from recorded results: times of rankings and of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["decision_table", "ranking_table"]

Row = dict[str, Any]


def ranking_table(rows: Sequence[Row]) -> str:
    """Return what each case of ``tests.bench.rank`` took, and where."""
    lines = ["| case | feasible | median | 90% below | best |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row['case']} | {row['num_feasible']:,} | {_ms(row['median_s'])} | {_ms(row['p90_s'])} "
        f"| {_ms(row['best_s'])} |"
        for row in rows
    ]
    return "\n".join([*lines, "", _where(rows, f"{rows[0]['repeats']} runs of each")])


def decision_table(rows: Sequence[Row]) -> str:
    """Return what each case of ``tests.bench.decide`` took, and where."""
    lines = ["| decision | median | 90% below |", "|---|--:|--:|"]
    lines += [f"| {row['case']} | {_ms(row['median_s'])} | {_ms(row['p90_s'])} |" for row in rows]
    first = rows[0]
    each = f"{first['clusters']} decisions of each, of each the least of {first['repeats']}"
    return "\n".join([*lines, "", _where(rows, each)])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _where(rows: Sequence[Row], what: str) -> str:
    """Return what was recorded, on which machine, when, and what else the machine did."""
    machines, days = ({row[key] for row in rows} for key in ("machine", "recorded_on"))
    assert len(machines) == len(days) == 1, "a file is of one call"
    low, high = (f"{of(row['load'] for row in rows):.1f}" for of in (min, max))
    load = low if low == high else f"{low} to {high}"
    return f"CPU time; {what}; {machines.pop()}; load average {load}; {days.pop()}."
