"""A column of numbers of which most are never read: each is worked out when it is asked for, once.

A queue's quantile takes some twenty times as long as the question whether a limit is kept, and of ten thousand
candidates a plan tells a few. Until a number is worked out a bound stands for it, and a search for the smallest
works out only those that can be it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Cells", "Column", "Mask", "Rows", "smallest"]

Column = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

_BATCH = 16  # rows that are worked out at once: what one costs
_SLACK = 1e-9  # for the rounding on the way to a number


class Work(Protocol):
    """Source of a column's numbers."""

    def find(self, rows: Rows) -> Column:
        """Return the numbers of ``rows``, which do not depend on the rows asked for together."""
        ...

    def reaches(self, rows: Rows, values: Column) -> Mask:
        """False only where the number is surely farther off than the value; cheaper than ``find``."""
        ...


class Cells:
    """A number per row.

    Args:
        values: the numbers. Of ``open`` rows a bound that the number is not nearer than.
        work: finds those of the open rows.
        upward: nearer is larger, as of a rate; else smaller, as of a time or a cost.
    """

    def __init__(
        self, values: Column, work: Work | None = None, open_rows: Mask | None = None, *, upward: bool = False
    ) -> None:
        self._values = values if work is None else values.copy()
        self._work, self._upward = work, upward
        self._open = np.zeros(len(values), np.bool_) if open_rows is None else open_rows.copy()

    def __len__(self) -> int:
        return len(self._values)

    def of(self, rows: Rows) -> Column:
        """The numbers themselves."""
        wanted = rows[self._open[rows]]
        if len(wanted) and self._work is not None:
            self._values[wanted] = self._work.find(wanted)
            self._open[wanted] = False
        return self._values[rows]

    def at(self, row: int) -> float:
        """Return the number of one row; finds all of an open column, since together they cost little more."""
        if self._open[row]:
            self.of(np.arange(len(self)))
        return float(self._values[row])

    def bounds(self, rows: Rows) -> Column:
        """Return what is known without work."""
        return self._values[rows]

    def reach(self, rows: Rows, values: Column) -> Mask:
        """Return whether the numbers may be as near as ``values``."""
        slack = values * (1 - _SLACK if self._upward else 1 + _SLACK)
        may = self._values[rows] >= slack if self._upward else self._values[rows] <= slack
        asked = np.flatnonzero(may & self._open[rows])
        if len(asked) and self._work is not None:
            may[asked] = self._work.reaches(rows[asked], slack[asked])
        return np.asarray(may)


def smallest(
    rows: Rows,
    bounds: Column,
    exact: Callable[[Rows], Column],
    reach: Callable[[Rows, float], Mask],
    admits: Callable[[int], bool],
) -> int | None:
    """Return which of the ``rows`` that are admitted has the smallest number; of equals the first.

    Args:
        bounds: of each row, not above its number.
        exact: the numbers.
        reach: False only where the number is above the value.
    """
    places = np.argsort(bounds, kind="stable")
    best: tuple[float, int] | None = None
    while len(places):
        if best is not None:
            places = places[bounds[places] <= best[0]]
            if best[0] < np.inf:  # nothing is above that
                places = places[reach(rows[places], best[0])]
        batch = np.array([place for place in places[:_BATCH].tolist() if admits(int(rows[place]))], np.intp)
        places = places[_BATCH:]
        if len(batch):
            found = min(zip(exact(rows[batch]).tolist(), batch.tolist(), strict=True))
            best = found if best is None else min(best, found)
    return None if best is None else int(rows[best[1]])
