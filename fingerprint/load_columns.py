"""Waits for loads of variants next to the steps as columns, a row per replica, at given rates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.load_waits import FIRST_OCTAVE, OFFERED, PER_OCTAVE, LoadWaits

__all__ = ["LoadColumns", "LoadWait", "load_wait_at"]

Column = npt.NDArray[np.float64]

_TINY = 1e-300


class LoadWait(NamedTuple):
    """Wait that ``share`` of the requests have.

    That of ``shorter`` of these is even between 0 and ``least_s``, that of the rest ``least_s`` and an exponential
    time.
    """

    share: Column
    mean_s: Column
    """Mean over those that wait."""
    least_s: Column
    shorter: Column

    @property
    def of_all_s(self) -> Column:
        """Mean over all requests."""
        return self.share * self.mean_s

    def up_to_s(self, most_s: Column) -> Column:
        """Return the mean over those that wait, longer waits counted as ``most_s``."""
        within_s, beyond_s = np.minimum(most_s, self.least_s), np.maximum(most_s - self.least_s, 0.0)
        further_s = np.maximum(self._further_s, _TINY)
        even_s = within_s * (1 - self.shorter * within_s / np.maximum(2 * self.least_s, _TINY))
        return np.asarray(even_s - (1 - self.shorter) * further_s * np.expm1(-beyond_s / further_s))

    @property
    def _further_s(self) -> Column:
        """Mean of the exponential time."""
        return (self.mean_s - self.shorter * self.least_s / 2) / (1 - self.shorter) - self.least_s

    def quantile_s(self, share: float) -> Column:
        """Return the wait that is not exceeded by ``share`` of those that wait."""
        return np.where(
            share < self.shorter,
            self.least_s * share / np.maximum(self.shorter, _TINY),
            self.least_s - self._further_s * np.log(np.minimum((1 - share) / (1 - self.shorter), 1.0)),
        )


@dataclass(frozen=True)
class LoadColumns:
    """Waits for loads as columns, a row per replica; of one without such loads the share is 0."""

    load_s: Column
    tables: Column
    """[4, knots, kinds]: shares, means, least waits, shorter ones."""
    kind: npt.NDArray[np.intp]
    """Table of each row: estimates of one plan share a few."""

    @classmethod
    def of(cls, waits: Sequence[LoadWaits | None]) -> LoadColumns | None:
        """Return the columns of replicas; None: none of them has loads next to its steps."""
        if not any(waits):
            return None
        found = {id(one): one for one in waits}
        numbers = {key: number for number, key in enumerate(found)}
        return cls(
            load_s=np.array([0.0 if one is None else one.load_s for one in waits]),
            tables=np.stack([_table(one) for one in found.values()], axis=2),
            kind=np.array([numbers[id(one)] for one in waits], np.intp),
        )

    def take(self, rows: npt.NDArray[np.intp]) -> LoadColumns:
        return LoadColumns(self.load_s[rows], self.tables, self.kind[rows])

    def at(self, rate_per_s: Column) -> LoadWait:
        """Return the waits at rates [..., rows] of one replica each."""
        last = len(OFFERED) - 1
        place = (np.log2(np.maximum(rate_per_s * self.load_s, _TINY)) - FIRST_OCTAVE) * PER_OCTAVE
        place = np.clip(place, 0.0, last)
        low = np.minimum(place.astype(np.intp), last - 1)
        along = place - low
        below, above = self.tables[:, low, self.kind], self.tables[:, low + 1, self.kind]
        share, mean, least, shorter = below + along * (above - below)
        # Where the wait jumps between two knots these are of no one wait: the mean counts.
        least = np.minimum(least, mean / (1 - shorter / 2))
        return LoadWait(share, mean * self.load_s, least * self.load_s, shorter)


@lru_cache(maxsize=64)
def _table(waits: LoadWaits | None) -> Column:
    """Return [4, knots]: in a search for a fleet plan the same few are asked for thousands of times."""
    if waits is None:
        return np.repeat([[0.0], [1.0], [1.0], [0.0]], len(OFFERED), axis=1)
    return np.array([waits.shares, waits.means, waits.least, waits.shorter])


def load_wait_at(waits: LoadWaits, rate_per_s: float) -> tuple[float, float]:
    """Return the share of the requests that wait at a rate, and the mean seconds that these wait."""
    columns = LoadColumns.of([waits])
    assert columns is not None, "there is a row"
    wait = columns.at(np.array([rate_per_s]))
    return float(wait.share[0]), float(wait.mean_s[0])
