"""Traffic parameters of a queue: how a trace's rate moves, how bursty it is at a given rate, how lengths vary.

Requests are counted in windows. If the rate were always the same, the counts of the windows would vary as much as
their mean (Poisson); variation beyond that is the rate moving. The part of the counts' deviations that is due to
the rate is kept, ``sqrt(1 - 1 / index of dispersion)``, so that noise is not counted twice. Within a window, the
index of dispersion of its tenths says how bursty it is at a steady rate. A trace of many windows is described in
longer ones.

Source: Sriram and Whitt, Characterizing superposition arrival processes in packet multiplexers, 1986 (indices of
dispersion). ``planner.rate_profile`` uses these figures; docs/risk.md shows how well they predict.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import BadInputError
from planner.intent import MOST_WINDOWS, Traffic
from traces.request import Request
from traces.request_arrays import Moments, blocks

__all__ = ["WINDOW_S", "traffic_of"]

WINDOW_S = 10.0  # longer than most answers take, shorter than a rate stays
_TENTHS = 10
_FEWEST_WINDOWS = 8
_LEAST_CV, _MOST_CV = 0.25, 100.0


def traffic_of(requests: Iterable[Request], *, window_s: float = WINDOW_S) -> Traffic:
    """Return the traffic of a stream, which is consumed; memory grows with its time, ten counts a window.

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
    together = -(-len(tenths) // MOST_WINDOWS)
    tenths = tenths[: len(tenths) // together * together].reshape(-1, _TENTHS, together).sum(axis=2)
    within = float(tenths.var(axis=1, ddof=1).sum() / tenths.mean(axis=1).sum())
    input_cv, output_cv = (lengths.std / lengths.mean).tolist()
    return Traffic(
        burstiness=min(max(within**0.5, _LEAST_CV), _MOST_CV),
        input_cv=min(input_cv, _MOST_CV),
        output_cv=min(output_cv, _MOST_CV),
        relative_rates=_rates(tenths.sum(axis=1)),
        window_s=window_s * together,
    )


def _rates(counts: NDArray[np.int64]) -> tuple[float, ...]:
    """Return the counts of windows over their mean; none where they vary no more than Poisson's."""
    mean = float(counts.mean())
    dispersion = float(counts.var()) / mean
    if dispersion <= 1:
        return ()
    kept = (1 - 1 / dispersion) ** 0.5
    return tuple((1 + kept * (counts / mean - 1)).round(4).tolist())
