"""Variance of a machine's speed from one load of a model to the next, as a profile shows it.

All runs of one load share where the allocator put the weights, how threads fell on cores, and the seconds in which
they ran. Repeats within a load do not show that, so the spread between loads is estimated from the loads
themselves. It is part of every prediction, because what is predicted is served by one load more.

A load's level is the mean over its points of how far each is from its own mean over the loads. The noise of the
runs is in it, averaged over them, and is not taken off: of a few loads the difference of two variances may be
zero, and an interval from that would promise what was not measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fingerprint.measurements import TimingPoint

__all__ = ["LoadSpread", "Spread", "load_spread", "share_of_loads"]

# Between loads when nothing was loaded twice: what is seen on an ordinary CPU (5 to 25%, docs/accuracy.md).
_UNKNOWN_RELATIVE_SPREAD = 0.15

_Table = NDArray[np.float64]  # [points, loads]


@dataclass(frozen=True, slots=True)
class Spread:
    """A relative standard deviation and how well it is known; ``inf`` degrees: assumed, or nothing to know."""

    relative: float
    dof: float


@dataclass(frozen=True, slots=True)
class LoadSpread:
    """Between loads, of a prefill and of a decode step."""

    first: Spread
    next: Spread

    @property
    def is_measured(self) -> bool:
        """Return whether some fingerprint was loaded twice."""
        return math.isfinite(self.first.dof) and math.isfinite(self.next.dof)


def load_spread(points: Iterable[TimingPoint]) -> LoadSpread:
    """Return the spread of all fingerprints of these points together; they should be of one (tp, pp).

    Points that do not say which load their runs were of (profiles of an earlier version) show none, and none is
    assumed of them.
    """
    fingerprints: dict[tuple[object, ...], list[TimingPoint]] = defaultdict(list)
    for point in points:
        if point.runs and len(point.loads) == len(point.runs):
            fingerprints[point.key, point.layer_counts].append(point)
    if not fingerprints:
        nothing = Spread(0.0, math.inf)
        return LoadSpread(nothing, nothing)
    tables = [_tables(found) for found in fingerprints.values()]
    return LoadSpread(_pooled([first for first, _ in tables]), _pooled([step for _, step in tables]))


def share_of_loads(points: Sequence[TimingPoint]) -> float:
    """Variance of the mean level of these points over that of one load's level: 1 / loads when all have equal
    weight."""
    runs = [load for point in points if len(point.loads) == len(point.runs) for load in point.loads]
    if not runs:
        return 1.0
    weights = np.unique(runs, return_counts=True)[1] / len(runs)
    return float((weights**2).sum())


def _tables(points: Sequence[TimingPoint]) -> tuple[_Table, _Table]:
    """Prefill and decode-step times of one fingerprint: bursts against the loads that ran them all."""
    means = {(p.batch, p.input_tokens, p.output_tokens): _by_load(p) for p in points}
    short, long = min(shape[2] for shape in means), max(shape[2] for shape in means)
    bursts = sorted({shape[:2] for shape in means if (*shape[:2], short) in means})
    pairs = [burst for burst in bursts if (*burst, long) in means and long > short]
    first = _complete([means[*burst, short] for burst in bursts])
    at_short = _complete([means[*burst, m] for m in (short, long) for burst in pairs])
    half = len(pairs)
    return first, (at_short[half:] - at_short[:half]) / max(long - short, 1)


def _by_load(point: TimingPoint) -> dict[int, float]:
    runs: dict[int, list[float]] = defaultdict(list)
    for load, run in zip(point.loads, point.runs, strict=True):
        runs[load].append(run.e2e_s)
    return {load: float(np.mean(times)) for load, times in runs.items()}


def _complete(rows: Sequence[dict[int, float]]) -> _Table:
    """Only the loads that all rows have."""
    common = sorted(set.intersection(*(set(row) for row in rows))) if rows else []
    return np.array([row[load] for row in rows for load in common]).reshape(len(rows), len(common))


def _pooled(tables: Sequence[_Table]) -> Spread:
    """Variance of a load's level, over all fingerprints that were loaded twice or more."""
    total, dof = 0.0, 0
    for table in tables:
        num_points, num_loads = table.shape
        if num_points == 0 or num_loads < 2:
            continue
        means = table.mean(axis=1, keepdims=True)
        if (means <= 0).any():  # steps that noise hides
            continue
        levels = (table / means - 1).mean(axis=0)
        total += float((levels**2).sum())
        dof += num_loads - 1
    return Spread(math.sqrt(total / dof), dof) if dof else Spread(_UNKNOWN_RELATIVE_SPREAD, math.inf)
