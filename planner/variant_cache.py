"""Requests whose variant a worker must load first, in steady state: their share, and what they wait. Pure.

Che's approximation: of independent requests, each for variant i with probability p_i, the least recently used of
what C places hold is replaced. A variant stays for a time t without a request that is nearly the same for all,
the one in which C distinct ones are asked for: sum(1 - exp(-p_i t)) = C. So it is missing with probability
exp(-p_i t). The rate does not matter, as t is in requests.

*Loads next to the steps* are made by one thread, one after another, and a request for a variant that is ordered
already shares its load. With w the requests that arrive between an order and the end of its load, a variant's
cycle is its first request (1 / p_i requests), the wait w, and the time until none was asked for during t:
``w + exp(p_i t) / p_i`` requests in all. It has a place from its order on, so that t follows from
``sum(1 / (p_i w + exp(p_i t))) = N - C``; where orders alone take all places it is 0. No more orders have a place
than there are slots: a further one waits for a slot first. The thread is a queue M/D/1 with L loads for each
request, 1 / cycle summed over the variants, so that the rate o (requests in the time of a load) at which w
requests arrive during a wait is a root of ``w = o + o (o L) / (2 (1 - o L))``. With waits variants are ordered
less often, so that no rate is too high: at most all N wait for one another. Orders that wait take places from what
is loaded, which makes more orders: beyond some rate the places of popular variants are lost to them at once. Where
several waits are steady at a rate the least counts, as a queue that fills gets to it first.

*Spread.* A wait has the variance of M/D/1 where loads are rare; where many wait, a longer queue leaves fewer to
order, which pulls it back as an Ornstein-Uhlenbeck process. Their precisions are added. A wait is taken for a
least one and an exponential time on top. Requests that share a load arrive evenly during its wait, so that what
is left of it is even up to the least wait, and beyond as for the request that ordered.

Workers evict the variant of least decayed frequency (``placement.variant_routing``), which keeps popular ones
better at high rates; what that makes of the law is in docs/decisions/0050-loads-in-plans.md.

Sources: Che, Tung, Wang, Hierarchical Web caching systems, 2002; Fricker, Robert, Roberts, A versatile and
accurate approximation for LRU cache performance, 2012; Asmussen, Applied Probability and Queues, 2003 (M/G/1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fingerprint.load_waits import OFFERED, LoadWaits

__all__ = ["load_waits", "missed_share"]

_HALVINGS = 60
_MOST = 700.0  # exponent of a number
_PER_OCTAVE = 16  # waits at which the law is worked out
_STAY_HALVINGS = 30  # to 1e-9 of it
_SINGLE, _GROUP = (
    256,
    0.02,
)  # variants by themselves; of all further ones, the span of a group in the logarithm of the rank


def missed_share(shares: NDArray[np.float64], places: int) -> float:
    """Return the share of all requests that are for a variant which is not loaded.

    Args:
        shares: of all requests, for each variant; what is left to 1 is for the base, which is always there.
        places: variants that a worker keeps loaded.
    """
    asked = shares[shares > 0]
    if len(asked) <= places:
        return 0.0
    low, high = 0.0, 1.0
    while -np.expm1(-asked * high).sum() < places:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-asked * middle).sum() < places else (low, middle)
    return float((asked * np.exp(-asked * high)).sum())


def load_waits(shares: NDArray[np.float64], slots: int, places: int, load_s: float) -> LoadWaits | None:
    """Return the waits for loads that run next to the steps, one at a time; None: all variants stay loaded.

    Args:
        shares: as in :func:`missed_share`, the largest first.
        slots: orders that have a place at once at most.
        places: variants that a worker keeps loaded, those being loaded included.
        load_s: seconds of a load.
    """
    asked = shares[shares > 0]
    if len(asked) <= places or load_s <= 0:
        return None
    octaves = np.arange(np.log2(OFFERED[0]) - 1, np.log2(2 * OFFERED[-1] * len(asked)) + 1, 1 / _PER_OCTAVE)
    during = np.exp2(octaves)[:, None]  # requests that arrive between an order and the end of its load
    asked, number = _grouped(asked)
    stay = _grown(asked * _stays(asked, number, slots, places, during))
    cycles = number * asked / (asked * during + stay)  # of the variants of a group, for each request
    loads, during = cycles.sum(axis=1), during[:, 0]
    half = 1 + loads * during  # of the sum of the roots
    offered = 2 * during / (half + np.sqrt(half**2 - 2 * loads * during))
    wait = during / offered  # of the request that orders, in loads
    queue, busy = wait - 1, offered * loads
    pull = offered * (cycles * asked / stay).sum(axis=1) / loads
    variance = 1 / (1 / np.maximum(queue**2 + 2 * queue / 3, 1e-12) + 2 * pull / busy)
    sharing = offered * (cycles * asked).sum(axis=1)  # requests that share a load, for each of its seconds
    share = loads + sharing * wait
    least = np.maximum(wait - np.sqrt(variance), 0.0)  # as if exponential beyond
    shorter = sharing * least / share  # of requests that share a load, those of which the rest is below the least
    is_first = offered > np.concatenate(([0.0], np.maximum.accumulate(offered)[:-1]))
    knots, at = np.log(OFFERED), np.log(offered[is_first])
    mean = (1 - shorter) * wait + shorter * least / 2
    mean = np.maximum.accumulate((share * mean)[is_first]) / share[is_first]  # but for rounding it grows

    def table(values: NDArray[np.float64]) -> tuple[float, ...]:
        return tuple(np.interp(knots, at, values).tolist())

    return LoadWaits(
        load_s=load_s,
        shares=table(share[is_first]),
        means=table(mean),
        least=table(least[is_first]),
        shorter=table(shorter[is_first]),
    )


def _grouped(asked: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return groups of variants that are nearly as popular: their mean share, and how many they are.

    The most popular are a group each. So 10,000 variants take hardly longer than 1,000.
    """
    if len(asked) <= _SINGLE:
        return asked, np.ones(len(asked))
    further = _SINGLE * np.exp(np.arange(0.0, np.log(len(asked) / _SINGLE), _GROUP))
    firsts = np.concatenate((np.arange(_SINGLE), np.unique(further.astype(np.intp))))
    number = np.diff(firsts, append=len(asked)).astype(np.float64)
    return np.add.reduceat(asked, firsts) / number, number


def _stays(
    asked: NDArray[np.float64],
    number: NDArray[np.float64],
    slots: int,
    places: int,
    during: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the requests during which a variant that is not asked for stays, for each wait [waits, 1]."""
    waits = asked * during
    of_groups = np.stack((number, number * asked), axis=1)
    chance = np.empty_like(waits)  # one table for all rounds: fresh ones take four times as long

    def is_less(stays: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return where fewer than all places are held."""
        np.multiply(asked, stays, out=chance)
        np.exp(np.minimum(chance, _MOST, out=chance), out=chance)
        np.reciprocal(np.add(chance, waits, out=chance), out=chance)
        absent, ordered = np.split(chance @ of_groups, 2, axis=1)
        return np.asarray(number.sum() - absent - np.maximum(during * ordered - slots, 0.0) < places)

    low, high = np.zeros_like(during), np.ones_like(during)
    while (too_low := is_less(high)).any():
        low, high = np.where(too_low, high, low), np.where(too_low, 2 * high, high)
    for _ in range(_STAY_HALVINGS):
        middle = (low + high) / 2
        too_low = is_less(middle)
        low, high = np.where(too_low, middle, low), np.where(too_low, high, middle)
    return high


def _grown(exponent: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.exp(np.minimum(exponent, _MOST)))
