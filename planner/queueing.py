"""Queueing for one of a deployment's batch slots: a G/G/c queue whose service rate grows with the batch.

*The chain.* ``n`` requests run at once, at most ``slots``; while they do, each takes ``T(n) = A + B n``
seconds, so that ``n / T(n)`` end in a second: a birth-death chain whose service rates are computed from the
estimates of one request and of the whole batch. With B = 0 it is M/M/c, with one slot M/M/1. Utilisation is ``rate
* T(slots) / slots``; what does not grow with the batch is the *fixed share* ``A / T(slots)``.

*Bursts.* Gaps are gamma with a coefficient of variation ``c_a`` (1: Poisson). Arrivals of peakedness z meet
``slots`` as Poisson ones of rate / z meet slots / z (Hayward). With one slot, as many wait as of GI/M/1.

*The wait* of those that wait has an exponential tail, ``exp(-decay x)``: the decay d is the root of
``E exp(d service) E exp(-d gap) = 1`` for gamma services and gaps, exact for GI/M/c and M/D/1, Kingman's in heavy
traffic. Short waits are spread evenly up to a tail so high that the mean is M/G/1's (Pollaczek and Khinchine).

Sources: Whitt, Heavy-traffic approximations for service systems with blocking, 1984 (Hayward); Eckberg,
Generalized peakedness of teletraffic processes, 1983; Asmussen, Applied Probability and Queues, 2003, chapter X
(GI/M/1) and XIII.5 (Cramer and Lundberg); Kingman, 1961. How well it does: docs/risk.md.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["MODEL_NAME", "Array", "Tail", "peakedness", "wait_probability", "wait_tail"]

MODEL_NAME = "G/G/c with batch-dependent service"

Array = npt.NDArray[np.float64]

_LOADS = np.linspace(0.0, 1.0, 257)
_SHARES = np.linspace(0.0, 1.0, 17)
_LEAST = 1e-9
_SMOOTHEST = 1 / 16  # constant gaps and services have peakedness 0, for which there are no slots to speak of
_HALVINGS = 80


class Tail(NamedTuple):
    """P(wait > x) of those that wait, x in units of T(slots) / slots: ``scale * exp(-decay * x)`` from
    ``until`` on, below it a straight line from 1."""

    scale: Array
    decay: Array
    until: Array
    mean: Array

    def beyond(self, wait: Array) -> Array:
        tail = np.minimum(1.0, self.scale * np.exp(-self.decay * np.maximum(wait, self.until)))
        early = np.maximum(1 - wait / np.maximum(self.until, _LEAST), 0.0)
        return np.asarray(tail + early * (1 - tail))


def peakedness(offered: Array, arrival_cv: float, service_cv: float) -> Array:
    """Return the variance over mean of how many would run at once if all could; 1 for Poisson arrivals.

    Exact for exponential services (``service_cv`` 1); for any other its excess over 1 is taken to go with
    ``2 / (1 + service_cv**2)``, which is right for constant ones in heavy traffic.

    Args:
        offered: rate times seconds in service.
    """
    gap = 1 / np.maximum(offered, _LEAST)  # in services
    squared = max(arrival_cv**2, _LEAST)
    overtaken = np.exp(-np.log1p(squared * gap) / squared)  # E exp(-gap): no service ends within a gap
    exponential = 1 / (1 - overtaken) - 1 / gap
    return np.asarray(np.maximum(1 + (exponential - 1) * 2 / (1 + service_cv**2), _SMOOTHEST))


def wait_probability(
    utilisation: Array, fixed_share: Array, slots: int, arrival_cv: float, service_cv: float
) -> Array:
    """Return the share of requests that find every slot taken, for utilisations from 0 to 1."""
    (found,) = _between(_waiting(slots, arrival_cv, service_cv), utilisation, fixed_share)
    return found


def wait_tail(utilisation: Array, arrival_cv: float, service_cv: Array, largest_cv: float) -> Tail:
    """Return how long waiting requests wait, for utilisations from 0 to 1.

    Args:
        service_cv: a column, none above ``largest_cv``, which settles where between the table's knots they lie: of
            the traffic and not of the rows, so that a row's answer does not depend on any other row.
    """
    along = service_cv / largest_cv if largest_cv > 0 else np.zeros_like(service_cv)
    scale, decay, until = _between(_tails(arrival_cv, largest_cv), utilisation, along)
    idle = np.maximum(1 - utilisation, _LEAST)
    late = np.where(scale > 1, 1 + np.log(np.maximum(scale, 1.0)), scale)
    return Tail(scale, decay * idle, until / np.sqrt(idle), late / np.maximum(decay * idle, _LEAST))


def _between(tables: Array, load: Array, share: Array) -> list[Array]:
    """Return the values of each of ``tables``, [tables, _LOADS times _SHARES]: linear between."""
    load, share = np.minimum(load, 1.0) * (len(_LOADS) - 1), share * (len(_SHARES) - 1)
    row = np.minimum(load.astype(np.intp), len(_LOADS) - 2)
    column = np.minimum(share.astype(np.intp), len(_SHARES) - 2)
    load, share = load - row, share - column
    at = row * len(_SHARES) + column
    if not share.any():  # on a knot: half of the look-ups would be multiplied by 0
        return [_line(table.take(at), table.take(at + len(_SHARES)), load) for table in tables]
    after = at + len(_SHARES)
    return [
        _line(
            _line(table.take(at), table.take(at + 1), share),
            _line(table.take(after), table.take(after + 1), share),
            load,
        )
        for table in tables
    ]


def _line(low: Array, high: Array, along: Array) -> Array:
    return np.asarray(low + along * (high - low))


@lru_cache(maxsize=64)
def _waiting(slots: int, arrival_cv: float, service_cv: float) -> Array:
    load, share = _LOADS[:, None], _SHARES[None, :]
    if slots == 1:
        idle = _decay(_LOADS, arrival_cv, 1.0)  # in GI/M/1, of all arrivals
        return np.repeat(1 - idle, len(_SHARES))[None]
    spread = peakedness(load * slots, arrival_cv, service_cv)
    sought = slots / spread  # slots of the smooth queue, and no whole number
    blocked = here = np.ones((len(_LOADS), len(_SHARES)))
    for k in range(1, int(np.ceil(sought.max())) + 1):
        # Erlang's recursion: the share of time that a chain which ends in state k is there.
        ratio = load * slots * share / spread / k + load * (1 - share)  # birth over death
        before, here = here, ratio * here / (1 + ratio * here)
        part = np.clip(sought - (k - 1), 0.0, 1.0)  # of the way from k - 1 to k, on a logarithmic scale
        with np.errstate(divide="ignore", invalid="ignore"):
            fraction = np.where(here > 0, before * (here / before) ** part, 0.0)
        blocked = np.where(sought > k - 1, fraction, blocked)
    return np.asarray(np.minimum(blocked / (1 - load * (1 - blocked)), 1.0)).reshape(1, -1)


@lru_cache(maxsize=64)
def _tails(arrival_cv: float, most: float) -> Array:
    """Return [scale, decay over 1 - utilisation, until times its root], a column per ``service_cv`` from 0 to
    ``most``.

    Near saturation the decay falls as the idle share and ``until`` rises as its inverse root, both without end:
    only what is left after dividing by that is smooth enough to lie on a line between two knots.
    """
    loads = np.clip(_LOADS, 1e-6, 1 - 1e-6)
    scales, decays, untils = [], [], []
    for service_cv in (_SHARES * most).tolist():
        poisson, bursty = _decay(loads, 1.0, service_cv), _decay(loads, arrival_cv, service_cv)
        # Of those that wait in M/G/1, how much longer than the tail's own mean, and the same in its units.
        late = (1 + service_cv**2) / 2 / (1 - loads) - 1 / poisson
        scales.append(np.where(late > 0, np.exp(np.minimum(late * bursty, 50.0)), 1 + late * poisson))
        decays.append(bursty / (1 - loads))
        untils.append(_until(np.maximum(late, 0.0), bursty) * np.sqrt(1 - loads))
    return np.stack([np.stack(columns, axis=1).ravel() for columns in (scales, decays, untils)])


def _until(late: Array, decay: Array) -> Array:
    """Return where a line from 1 meets the tail so that the mean is ``late + 1 / decay``."""
    mean = late + 1 / decay
    low, high = late * 1.001, 2 * mean
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        there = np.exp(-decay * (middle - late))
        above = middle * (1 + there) / 2 + there / decay > mean
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.where(late > 1e-6, high, 0.0)


def _decay(loads: Array, arrival_cv: float, service_cv: float) -> Array:
    """Return the positive root d of ``log(1 + a d / load) / a + log(1 - s d) / s = 0``, a and s the squares of the
    two.

    Bisection: the left side rises from 0 and falls through the root, and d is below ``1 / s``.
    """
    a, s = max(arrival_cv**2, _LEAST), max(service_cv**2, _LEAST)
    loads = np.clip(loads, 1e-9, 1.0)

    def excess(d: Array) -> Array:
        return np.log1p(a * d / loads) / a + np.log1p(-s * d) / s

    low = np.maximum((1 - loads) / (a + s), 0.0)  # the peak, where both slopes are equal
    high = np.full_like(loads, (1 - 1e-15) / s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = excess(middle) > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(loads >= 1, 0.0, (low + high) / 2)
