"""Waits of requests for loads of variants that run next to the steps of a worker, by its rate. Columns, pure.

Where a load stops no step it delays the requests for its variant alone. How many wait, and how long, depends on the
rate, which an estimate does not know: it has a table over the requests that arrive in the seconds of a load
(``planner.variant_cache`` makes it), and the law of load (``fingerprint.queueing``) reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["OFFERED", "LoadColumns", "LoadWait", "LoadWaits"]

Column = npt.NDArray[np.float64]

_FIRST, _LAST, _PER_OCTAVE = -5, 6, 8
OFFERED = tuple(2.0 ** (step / _PER_OCTAVE) for step in range(_FIRST * _PER_OCTAVE, _LAST * _PER_OCTAVE + 1))
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWaits:
    """Waits for loads at a worker that loads one variant at a time, next to its steps.

    Numbers are at rates of which 1/32 to 64 requests arrive in the seconds of a load, eight for each doubling
    (``OFFERED``).
    """

    load_s: float
    """Seconds of a load."""
    shares: tuple[float, ...]
    """Share of the requests that wait for a load."""
    means: tuple[float, ...]
    """Mean wait of these, the load included, in loads."""
    deviations: tuple[float, ...]
    """Standard deviation of these waits, in loads."""

    def at(self, rate_per_s: float) -> tuple[float, float]:
        """Return the share of the requests that wait at a rate, and the mean seconds that these wait."""
        columns = LoadColumns.of([self])
        assert columns is not None, "there is a row"
        wait = columns.at(np.array([rate_per_s]))
        return float(wait.share[0]), float(wait.mean_s[0])


class LoadWait(NamedTuple):
    """Wait that ``share`` of the requests have: ``least_s``, and an exponential time with ``further_s`` on top."""

    share: Column
    least_s: Column
    further_s: Column

    @property
    def mean_s(self) -> Column:
        """Mean over those that wait."""
        return self.least_s + self.further_s

    @property
    def of_all_s(self) -> Column:
        """Mean over all requests."""
        return self.share * self.mean_s

    def quantile_s(self, share: float) -> Column:
        """Return the wait that is not exceeded by ``share`` of those that wait."""
        return np.asarray(self.least_s - self.further_s * np.log1p(-share))


@dataclass(frozen=True)
class LoadColumns:
    """Waits for loads as columns, a row per replica; of one without such loads the share is 0."""

    load_s: Column
    shares: Column
    """[knots, rows], as the next two."""
    log_means: Column
    deviations: Column

    @classmethod
    def of(cls, waits: Sequence[LoadWaits | None]) -> LoadColumns | None:
        """Return the columns of replicas; None: none of them has loads next to its steps."""
        if not any(waits):
            return None
        none = LoadWaits(load_s=0.0, shares=(0.0,) * len(OFFERED), means=(1.0,) * len(OFFERED),
                         deviations=(0.0,) * len(OFFERED))  # fmt: skip
        rows = [one or none for one in waits]
        return cls(
            load_s=np.array([row.load_s for row in rows]),
            shares=np.array([row.shares for row in rows]).T,
            log_means=np.log(np.array([row.means for row in rows]).T),
            deviations=np.array([row.deviations for row in rows]).T,
        )

    def take(self, rows: npt.NDArray[np.intp]) -> LoadColumns:
        return LoadColumns(
            self.load_s[rows], self.shares[:, rows], self.log_means[:, rows], self.deviations[:, rows]
        )

    def at(self, rate_per_s: Column) -> LoadWait:
        """Return the waits at rates [..., rows] of one replica each."""
        last = len(OFFERED) - 1
        place = (np.log2(np.maximum(rate_per_s * self.load_s, _TINY)) - _FIRST) * _PER_OCTAVE
        place = np.clip(place, 0.0, last)
        low = np.minimum(place.astype(np.intp), last - 1)
        along, rows = place - low, np.arange(len(self.load_s))

        def between(knots: Column) -> Column:
            return np.asarray(knots[low, rows] + along * (knots[low + 1, rows] - knots[low, rows]))

        mean = np.exp(between(self.log_means))
        further = np.minimum(between(self.deviations), mean)
        return LoadWait(between(self.shares), (mean - further) * self.load_s, further * self.load_s)
