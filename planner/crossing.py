"""Search for the place up to which a condition holds, for many rows at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fingerprint.queueing import Column, Rows

__all__ = ["crossing"]

_ROUNDS, _SECTIONS = 8, 4  # of the largest step of a ladder, 1.5e-5 is left


def crossing(fine: Callable[[Column, Rows], npt.NDArray[np.bool_]], ladder: Column) -> Column:
    """Return the largest x on ``ladder`` [steps, rows], ascending, or between that is ``fine``, which ends once.

    -inf where none is; infinite where all are. What is done to a row does not depend on the other rows.

    Args:
        fine: of places [n] in rows [n]; a row may be there several times.
        ladder: its steps are a multiple of the sections.
    """
    every = np.arange(ladder.shape[1])

    def count_kept(rungs: Column) -> npt.NDArray[np.intp]:
        kept = fine(rungs.ravel(), np.tile(every, len(rungs))).reshape(rungs.shape)
        return np.where(kept.any(axis=0), len(rungs) - np.argmax(kept[::-1], axis=0), 0)

    top, coarse = len(ladder), ladder[_SECTIONS - 1 :: _SECTIONS]
    number = count_kept(coarse)
    first = np.minimum(number, len(coarse) - 1) * _SECTIONS
    between = count_kept(ladder[first + np.arange(_SECTIONS - 1)[:, None], every])
    count = np.where(number < len(coarse), first + between, top)
    found = np.where(count == 0, -np.inf, np.where(count == top, np.inf, 0.0))
    low, high = ladder[count - 1, every], ladder[np.minimum(count, top - 1), every]
    for _ in range(_ROUNDS):
        rungs = np.linspace(low, high, _SECTIONS + 1)
        count = count_kept(rungs[1:-1])
        low, high = rungs[count, every], rungs[count + 1, every]
    return np.where(found == 0, low, found)
