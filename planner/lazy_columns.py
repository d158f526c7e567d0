"""Column of numbers of which most are never read: each is found when it is first asked for.

A quantile under load takes some fifty times as long as the share that keeps a limit, and a plan reports few.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fingerprint.queueing import Column, Rows

__all__ = ["Column", "LazyColumn", "Mask", "Rows"]

Mask = npt.NDArray[np.bool_]

_BLOCK = 64  # rows that are found together: little more than what one costs


class LazyColumn:
    """Number per row.

    Args:
        values: the numbers; NaN where ``find`` is to be asked.
        find: returns the numbers of given rows, none NaN, each whatever the other rows are; None: all are known.
    """

    def __init__(self, values: Column, find: Callable[[Rows], Column] | None = None) -> None:
        self._values = values if find is None else values.copy()
        self._find = find

    def __len__(self) -> int:
        return len(self._values)

    def of(self, rows: Rows) -> Column:
        """Return the numbers of ``rows``."""
        open_rows = rows[np.isnan(self._values[rows])]
        if self._find is not None and len(open_rows):
            self._values[open_rows] = self._find(open_rows)
        return self._values[rows]

    def at(self, row: int) -> float:
        """Return the number of one row, and find those next to it."""
        first = row - row % _BLOCK
        return float(self.of(np.arange(first, min(first + _BLOCK, len(self))))[row - first])
