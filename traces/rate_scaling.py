"""The paper's compression: another arrival rate for a trace, the same pattern.

The paper (iServe, section 8): the trace is discretised into intervals, the request counts of adjacent intervals
are aggregated, and the result is scaled by a rate factor, 0.1 to 0.4 in its evaluation. It gives neither the
interval's length nor how many are aggregated nor where in an interval a request goes. Here, with intervals of
``interval_s``, ``aggregate`` = k and ``rate_factor`` = f:

1. count the requests of each interval;
2. add up the counts of each k neighbours: they become the count of one interval, so the trace gets k times
   shorter and its rate k times higher;
3. multiply by f, rounding by chance: each request of the interval stays with probability f, with its lengths;
4. those that stay are placed evenly at random in the interval, in their order, since a count is all that is
   known of its inside.

The mean rate becomes k * f times what it was, on average over seeds. Bursts shorter than k intervals are lost;
choose the interval shorter than the bursts that matter (Azure code's last 13 s). Why by chance, and not to the
nearest whole request: docs/decisions/0013.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np

from fingerprint.errors import ConfigError
from traces.request import Request

__all__ = ["compress"]


def compress(
    requests: Iterable[Request], *, rate_factor: float, interval_s: float, aggregate: int, seed: int
) -> Iterator[Request]:
    """Yield the trace at ``rate_factor * aggregate`` times its rate and 1 / ``aggregate`` of its length.

    Args:
        requests: a sorted stream.
        rate_factor: f, above 0 and at most 1 (requests are dropped, never made up).
        interval_s: length of one interval, before and after.
        aggregate: k, how many intervals become one; 1 keeps the length.
        seed: of which requests are kept and where they go.

    Raises:
        ConfigError: an argument is out of range.
    """
    if not 0 < rate_factor <= 1:
        raise ConfigError(
            f"rate_factor must be above 0 and at most 1, got {rate_factor}; raise aggregate for more"
        )
    if not (math.isfinite(interval_s) and interval_s > 0):
        raise ConfigError(f"interval_s must be finite and above 0, got {interval_s}")
    if aggregate < 1:
        raise ConfigError(f"aggregate must be at least 1, got {aggregate}")
    return _compressed(requests, rate_factor, interval_s, interval_s * aggregate, np.random.default_rng(seed))


def _compressed(
    requests: Iterable[Request], rate_factor: float, interval_s: float, window_s: float, rng: np.random.Generator
) -> Iterator[Request]:
    for index, group in groupby(requests, key=lambda request: int(request.arrival_s // window_s)):
        window = list(group)
        kept = np.flatnonzero(rng.random(len(window)) < rate_factor).tolist()
        times = np.sort((index + rng.random(len(kept))) * interval_s).tolist()
        for position, arrival_s in zip(kept, times, strict=True):
            yield replace(window[position], arrival_s=arrival_s)
