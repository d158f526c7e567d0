"""Variable arrival rate: its levels, how long it stays at one, and the queue that a busy time leaves behind.

A path is given: the rate over its mean in windows that follow one another, again and again. With utilisation ``u``
on average a window of ``times`` the mean rate adds ``x = u times - 1`` windows of work, so that the work left at
the start of windows is ``W' = max(W + x, 0)``; a request that arrives at a share v of a window finds
``max(W + x v, 0)``. Only the variation of the rate is modelled here: random variation at a steady rate is
``fingerprint.queueing``'s.

*Levels* are windows sorted by their rates, with equally many requests each. *How long* the rate stays near one is
as many windows as make long sums vary as much as these do, ``1 + 2 sum(r_k)`` of the autocorrelations r at lags of
k windows, summed in pairs while they are positive, beyond which they are noise.

Sources: Newell, Applications of Queueing Theory, 1982 (queues of a moving rate as a fluid); Asmussen, Applied
Probability and Queues, 2003, III.6 (the recursion is Lindley's); Geyer, Practical Markov chain Monte Carlo, 1992
(the initial positive sequence). How well it does: docs/risk.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Level", "MovingRate", "moving_rate"]

Array = npt.NDArray[np.float64]

_LEVELS = 8
_LOADS = np.linspace(0.0, 0.999, 101)
_KNOTS = 96  # of what is found, closer together where it is little
_MOMENTS = (np.arange(8) + 0.5) / 8  # of a window


@dataclass(frozen=True, slots=True)
class Level:
    """Level of the rate: ``share`` of the requests arrive while the rate is ``relative_rate`` times its mean."""

    share: float
    """Share of the requests, from 0 to 1."""
    relative_rate: float
    """Rate over its mean while they arrive."""


@dataclass(frozen=True, eq=False)
class MovingRate:
    """Distribution of the work left by a path of rates.

    Args:
        stays: windows for which the rate stays near a level.
        most: [loads], the most windows of work that any request finds; 0 where none finds any.
        found: [levels, loads, knots], how many of those that arrive at a level find more than the knot, which is
            ``(knot / knots) ** 2`` of ``most``.
        means: [levels, loads], the windows of work that they find on average.
    """

    levels: tuple[Level, ...]
    stays: float
    most: Array
    found: Array
    means: Array

    def left_beyond(self, level: int, utilisation: Array, windows: Array) -> Array:
        """Return the share of requests at a level that find more than ``windows`` windows of work left.

        Args:
            utilisation: on average over all levels, below 1.
            windows: of the same shape.
        """
        load = np.clip(utilisation, 0.0, _LOADS[-1]) / _LOADS[1]
        low = np.minimum(load.astype(np.intp), len(_LOADS) - 2)
        along = load - low
        most = self.most[low] + along * (self.most[low + 1] - self.most[low])
        with np.errstate(divide="ignore", invalid="ignore"):
            knot = np.where(most > 0, np.sqrt(np.maximum(windows, 0.0) / most), 1.0) * _KNOTS
        knot = np.minimum(knot, _KNOTS)
        left = np.minimum(knot.astype(np.intp), _KNOTS - 1)
        over = knot - left
        found = self.found[level]
        below = found[low, left] + over * (found[low, left + 1] - found[low, left])
        above = found[low + 1, left] + over * (found[low + 1, left + 1] - found[low + 1, left])
        return np.asarray(below + along * (above - below))

    def mean_left(self, level: int, utilisation: Array) -> Array:
        """Return the windows of work that all requests at a level find on average."""
        return np.asarray(np.interp(utilisation, _LOADS, self.means[level]))


@lru_cache(maxsize=32)
def moving_rate(rates: tuple[float, ...]) -> MovingRate:
    """Return the model of rates over their mean in successive windows; none: it is always the same."""
    times = np.array(rates) if rates else np.ones(1)
    group = _groups(times)
    levels = tuple(
        Level(float(times[group == g].sum() / times.sum()), float(times[group == g].mean()))
        for g in range(group.max() + 1)
    )
    grown = _LOADS[:, None] * times - 1  # [loads, windows]
    left = np.zeros(len(_LOADS))
    starts = np.zeros_like(grown)
    for number in np.tile(np.arange(len(times)), 2).tolist():  # the second time as it goes on
        starts[:, number] = left
        left = np.maximum(left + grown[:, number], 0.0)
    finds = np.maximum(starts[..., None] + grown[..., None] * _MOMENTS, 0.0)  # [loads, windows, moments]
    most = finds.max(axis=(1, 2))
    knots = (np.arange(_KNOTS + 1) / _KNOTS) ** 2
    found = np.zeros((len(levels), len(_LOADS), _KNOTS + 1))
    means = np.zeros((len(levels), len(_LOADS)))
    for g in range(len(levels)):
        weights = np.repeat(times[group == g], len(_MOMENTS))
        for row in np.flatnonzero(most > 0).tolist():
            here = finds[row, group == g].ravel()
            means[g, row] = np.average(here, weights=weights)
            order = np.argsort(here)
            upto = np.concatenate([[0.0], np.cumsum(weights[order])])
            found[g, row] = 1 - upto[np.searchsorted(here[order], knots * most[row], side="right")] / upto[-1]
    return MovingRate(levels, _stays(times), most, found, means)


def _groups(times: Array) -> npt.NDArray[np.intp]:
    """Return the number of each window's level, those with the lowest rates first."""
    in_order = np.argsort(times, kind="stable")
    before = np.cumsum(times[in_order]) - times[in_order]
    number = np.minimum((before * _LEVELS / times.sum() + 1e-9).astype(np.intp), _LEVELS - 1)
    group = np.empty(len(times), np.intp)
    group[in_order] = np.unique(number, return_inverse=True)[1]
    return group


def _stays(times: Array) -> float:
    """Return the windows of one stay: at least one, at most all of them."""
    off = times - times.mean()
    size = 2 * len(off)
    covariance = np.fft.irfft(np.abs(np.fft.rfft(off, size)) ** 2, size)[: len(off)]
    if covariance[0] <= 0:
        return float(len(times))
    pairs = covariance[: len(off) // 2 * 2].reshape(-1, 2).sum(axis=1)
    negative = np.flatnonzero(pairs <= 0)
    positive = pairs[: negative[0]] if len(negative) else pairs
    return min(max(2 * float(positive.sum()) / float(covariance[0]) - 1, 1.0), float(len(times)))
