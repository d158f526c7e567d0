"""What a queue must know of a trace: how its rate moves, how bursty it is beside that, how its lengths vary.

Requests are counted in windows. Were the rate always the same, the counts of a window would vary as much as their
mean (Poisson); what they vary beyond that is the rate moving. Sorted by their counts, windows make up levels with
equally many requests each, and of the deviations of a level from the mean the part that is the rate's own is kept,
``sqrt(1 - 1 / index of dispersion)``, so that noise is not counted twice. Within a window, the index of dispersion
of its tenths says how bursty it is at a steady rate.

Sources: Green and Kolesar, The pointwise stationary approximation for queues with nonstationary arrivals, 1991 (a
load that moves slowly is a mixture of steady ones); Sriram and Whitt, 1986 (indices of dispersion). How well it
does: docs/risk.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import BadInputError
from planner.intent import Level, Traffic
from traces.blocks import Moments, blocks
from traces.request import Request

__all__ = ["WINDOW_S", "traffic_of"]

WINDOW_S = 10.0  # longer than most answers take, shorter than a rate stays
_TENTHS = 10
_LEVELS = 8
_FEWEST_WINDOWS = 8
_LEAST_CV, _MOST_CV = 0.25, 100.0


def traffic_of(requests: Iterable[Request], *, window_s: float = WINDOW_S) -> Traffic:
    """The traffic of a stream, which is consumed; memory grows with its time, ten counts a window.

    Raises:
        BadInputError: it spans fewer than eight windows.
    """
    lengths, counts, first_s = Moments(2), np.zeros(0, np.int64), 0.0
    for block in blocks(requests):
        if lengths.count == 0:
            first_s = float(block.arrival_s[0])
        lengths.add(block.tokens.astype(np.float64))
        more = np.bincount(((block.arrival_s - first_s) / (window_s / _TENTHS)).astype(np.int64))
        if len(more) > len(counts):
            counts = np.concatenate([counts, np.zeros(len(more) * 2 - len(counts), np.int64)])
        counts[: len(more)] += more
    used = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    tenths = counts[: used // _TENTHS * _TENTHS].reshape(-1, _TENTHS)  # windows that the trace spans whole
    if len(tenths) < _FEWEST_WINDOWS or not tenths.any():
        raise BadInputError(
            f"the trace spans {used * window_s / _TENTHS:.4g} s; to tell how its rate moves takes at least "
            f"{_FEWEST_WINDOWS} windows of {window_s:g} s"
        )
    within = float(tenths.var(axis=1, ddof=1).sum() / tenths.mean(axis=1).sum())
    input_cv, output_cv = (lengths.std / lengths.mean).tolist()
    return Traffic(
        burstiness=min(max(within**0.5, _LEAST_CV), _MOST_CV),
        input_cv=min(input_cv, _MOST_CV),
        output_cv=min(output_cv, _MOST_CV),
        levels=_levels(tenths.sum(axis=1)),
    )


def _levels(counts: NDArray[np.int64]) -> tuple[Level, ...]:
    """Of the counts of windows; none where they vary no more than Poisson's."""
    mean = float(counts.mean())
    dispersion = float(counts.var()) / mean
    if dispersion <= 1:
        return ()
    kept = (1 - 1 / dispersion) ** 0.5
    in_order = np.sort(counts)
    before = np.cumsum(in_order) - in_order
    group = np.minimum(before * _LEVELS // in_order.sum(), _LEVELS - 1)
    some = [in_order[group == level] for level in range(_LEVELS)]
    shares = [float(one.sum()) / float(in_order.sum()) for one in some if one.any()]
    rates = [1 + kept * (float(one.mean()) / mean - 1) for one in some if one.any()]
    over = sum(share / rate for share, rate in zip(shares, rates, strict=True))  # such that the mean is kept
    return tuple(Level(share, rate * over) for share, rate in zip(shares, rates, strict=True))
