"""Preference of measured configurations over predicted ones, and sets that intervals cannot distinguish.

A configuration that was not run on this machine is estimated from another one by the ratio of two rooflines, and
may be wrong by a factor. So it takes the place of a measured one only where no truth within their intervals speaks
against it: its whole interval of what is ranked by is better than that of the best measured one, and it keeps
every limit at the upper end of its interval. Where nothing is measured, or everything, the better value decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from planner.lazy_columns import Column, Mask, Rows

__all__ = ["Ends", "Evidence", "indistinguishable", "preferred", "rivals"]


class Ends(NamedTuple):
    """Lower and upper end of the 90% interval of what is ranked by, a row each."""

    low: Column
    high: Column


class Evidence(NamedTuple):
    """Evidence of the choice between rows besides their order.

    Attributes:
        measured: the rows whose configuration was run.
        ends: of the given rows.
        surely_keeps: whether the given rows keep every limit at the upper ends of their intervals, where they are
            known to keep them by the rules for all.
    """

    measured: Mask
    ends: Callable[[Rows], Ends]
    surely_keeps: Callable[[Rows], Mask]
    maximize: bool


def preferred(rows: Rows, evidence: Evidence) -> int | None:
    """Return the row to choose.

    Args:
        rows: those that keep every limit and fit, best first.
    """
    if not len(rows):
        return None
    measured = np.flatnonzero(evidence.measured[rows])
    if not len(measured) or measured[0] == 0:
        return int(rows[0])
    best_measured = int(rows[measured[0]])
    better = rivals(rows[: measured[0]], best_measured, evidence)
    return int(better[0]) if len(better) else best_measured


def rivals(ahead: Rows, measured: int, evidence: Evidence) -> Rows:
    """Return the rows of ``ahead``, none of them measured, that are chosen before the ``measured`` row if they
    fit.
    """
    return ahead[_wholly_better(evidence, ahead, measured) & evidence.surely_keeps(ahead)]


def indistinguishable(rows: Rows, chosen: int, evidence: Evidence) -> Mask:
    """Return the ``rows`` whose interval has a value in common with that of ``chosen``, itself included."""
    (low,), (high,) = evidence.ends(np.array([chosen]))
    ends = evidence.ends(rows)
    return np.asarray((ends.low <= high) & (low <= ends.high))


def _wholly_better(evidence: Evidence, rows: Rows, than: int) -> Mask:
    (low,), (high,) = evidence.ends(np.array([than]))
    ends = evidence.ends(rows)
    return np.asarray(ends.low > high if evidence.maximize else ends.high < low)
