"""Load of a batching worker on its GPUs at a rate: the share of time in which a step of it runs.

*One worker.* While n requests run in one batch each stays ``T(n) = A + B n`` seconds, of which the estimates of
one request and of a full batch tell two points; ``n / T(n)`` leave in a second. With Poisson arrivals at the rate
r, n is a birth-death chain: ``p(n) = p(n - 1) * r T(n) / n``, and ``T(slots) / slots`` beyond the slots, where the
rest wait. A step runs while anybody is there, for ``1 - p(0)`` of the time (by Little's law the mean of n is r
times the mean stay). Only means of the stays matter while there are slots (processor sharing whose pace depends on
n is insensitive: Cohen, The multiple phase service network with generalized processor sharing, 1979); waiting for
a slot is as for exponential ones. With B = 0 and slots for all it is M/G/infinity, ``1 - exp(-r A)``; with one
slot M/M/1, ``r T(1)``. At ``r T(slots) / slots`` of 1 it is saturated: always busy.

A pipeline that keeps its stages full spreads its requests over up to one batch for each stage: n of them stay
``T(n / batches)``, and each stage runs for its layers' share of every batch under way.

*Several on a GPU.* All that run share its time evenly, and a worker that is slowed s times has ``s T(n)``: it runs
for more of the time and takes more requests at once, so each of them asks for less. The fixed point is found from
below: being slowed makes nobody less busy, so it is the least one. Workers are taken to run independently of one
another (``placement.batch_sharing``).

Left out: that a step waits for whoever comes during the one before, and that arrivals may be burstier than
Poisson. How well it does: docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.load_model import Key

__all__ = ["Batching", "Chains", "Floats"]

Floats = NDArray[np.float64]
Whole = NDArray[np.intp]
Mask = NDArray[np.bool_]

_NEGLIGIBLE = 1e-12  # of the weight of the likeliest state
_TINY = 1e-300
_HALVINGS = 20


class Batching(NamedTuple):
    """A replica that batches, were its GPUs its own."""

    requests_per_s: float
    alone_s: float  # that a request stays when no other is there
    full_s: float  # when as many as there are slots run in one batch
    slots: int
    batches: int  # at most under way at once: the stages of a pipeline that keeps them full, else 1
    stages: tuple[tuple[float, tuple[Key, ...]], ...]  # shares of a step, and GPUs

    def under_way(self, slowed: float) -> float:
        """Mean number of batches, where everything takes ``slowed`` times as long: without a pipeline the share of
        the time that a step runs."""
        return float(Chains([self], slowed).under_way(np.array([slowed]))[0])

    def share_seen(self, batches: float) -> float:
        """The largest part of the stays, 0 to 1, with which no more than ``batches`` are under way: of requests
        shorter than was thought, whose worker was seen less busy."""
        chain = Chains([self], 1.0)
        if chain.under_way(np.ones(1))[0] <= batches:
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if chain.under_way(np.array([middle]))[0] > batches else (middle, high)
        return low


class Chains:
    """Birth-death chains of several replicas, worked out at once: the states of all in one array.

    A state's weight is a product that may have no room in a float, hence logarithms. The last state of each is
    that all slots are taken, and any number wait.
    """

    def __init__(self, tenants: Sequence[Batching], most_slowed: float) -> None:
        """``most_slowed``: nothing will be asked beyond. States that are negligible there are left out."""
        columns = [(t.requests_per_s, t.alone_s, t.full_s, t.slots, min(t.batches, t.slots)) for t in tenants]
        rate, alone, full, slots, self._batches = np.array(columns, dtype=np.float64).reshape(-1, 5).T
        alone = np.maximum(alone, full / slots)  # a batch is no slower than its requests one after the other
        grows = np.maximum(0.0, full - alone) / np.maximum(1.0, slots - 1)
        fixed = alone - grows
        self._saturation = rate * (fixed + grows * slots / self._batches) / slots
        self._is_asked = rate * alone > 0
        who, n = _numbered(slots.astype(np.intp) + 1)
        batch = n / np.maximum(1.0, np.minimum(n, self._batches[who]))
        steps = _log(rate[who] * (fixed[who] + grows[who] * batch) / np.maximum(1, n))
        steps[(n == 0) | ~self._is_asked[who]] = 0.0
        sums = np.cumsum(steps)
        self._keep(who, n, sums - sums[n == 0][who], n == slots[who])
        # Weights rise to one peak and fall from there on; the less it is slowed, the earlier.
        slowed = np.full(len(columns), most_slowed)
        falls = (n > 0) & (steps + _log(most_slowed) < 0)
        seen = ~falls | (self._weights(slowed, self._saturation * slowed) >= _NEGLIGIBLE)
        self._keep(who[seen], n[seen], self._logs[seen], self._waits[seen])

    def _keep(self, who: Whole, n: Whole, logs: Floats, waits: Mask) -> None:
        self._who, self._n, self._logs, self._waits = who, n, logs, waits
        self._waiting = np.flatnonzero(waits)
        self._starts = np.flatnonzero(n == 0)
        self._under_way = np.minimum(n, self._batches[who])

    def under_way(self, slowed: Floats) -> Floats:
        """Return ``Batching.under_way`` of each replica."""
        used = self._saturation * slowed
        weights = self._weights(slowed, used)
        means = np.add.reduceat(weights * self._under_way, self._starts) / np.add.reduceat(weights, self._starts)
        return np.where(self._is_asked, np.where(used < 1, means, self._batches), 0.0)

    def _weights(self, slowed: Floats, used: Floats) -> Floats:
        """Return the weights of the states, 1 for a replica's likeliest; of no use where it is saturated."""
        logs = self._logs + self._n * _log(slowed)[self._who]
        logs[self._waiting] -= _log(1 - used)[self._who[self._waiting]]
        return np.exp(logs - np.maximum.reduceat(logs, self._starts)[self._who])


def _numbered(counts: Whole) -> tuple[Whole, Whole]:
    """Return (owner index, position within owner) for ``counts[i]`` items of each owner i."""
    who = np.repeat(np.arange(len(counts)), counts)
    return who, np.arange(len(who)) - (np.cumsum(counts) - counts)[who]


def _log(values: Floats | float) -> Floats:
    """Return the logarithm, of a tiny number in place of 0."""
    return np.log(np.maximum(values, _TINY))
