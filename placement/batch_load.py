"""What a worker that batches asks of its GPUs at a rate: how much of the time a step of it runs.

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
another.

Left out: that a step waits for whoever comes during the one before, and that arrivals may be burstier than
Poisson. How well it does: docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from placement.load_model import Key

__all__ = ["Batching", "mean_speed", "settle"]

_NEGLIGIBLE = 1e-12  # of the weight of all states
_LARGE = 1e200
_TURNS, _CLOSE, _HALVINGS = 50, 1e-3, 20


@dataclass(frozen=True, slots=True)
class Batching:
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
        rate = self.requests_per_s * slowed
        return _under_way(rate * self.alone_s, rate * self.full_s, self.slots, min(self.batches, self.slots))

    def share_seen(self, batches: float) -> float:
        """The largest part of the stays, 0 to 1, with which no more than ``batches`` are under way: of requests
        shorter than was thought, whose worker was seen less busy."""
        if self.under_way(1.0) <= batches:
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.under_way(middle) > batches else (middle, high)
        return low


@lru_cache(maxsize=4096)
def _under_way(alone: float, full: float, slots: int, batches: int) -> float:
    """``alone``, ``full``: rate times stay. A batch is no slower than its requests one after the other."""
    alone = max(alone, full / slots)
    grows = max(0.0, (full - alone) / (slots - 1)) if slots > 1 else 0.0
    fixed = alone - grows
    saturation = (fixed + grows * slots / batches) / slots
    if saturation >= 1:
        return float(batches)
    weight = total = 1.0
    found = 0.0
    for n in range(1, slots):
        flying = min(n, batches)
        weight *= (fixed + grows * n / flying) / n
        total += weight
        found += weight * flying
        if weight < _NEGLIGIBLE * total and n > batches:
            break
        if total > _LARGE:
            weight, total, found = weight / _LARGE, total / _LARGE, found / _LARGE
    else:  # the slots are taken, and any number wait
        tail = weight * saturation / (1 - saturation)
        total += tail
        found += tail * batches
    return found / total


def mean_speed(running: Sequence[float], beside: int = 1) -> float:
    """Of one that always runs where ``beside`` do, itself included: the mean of ``1 / (beside + X)``, X of
    ``running`` (shares of the time, independent of one another) running at a moment."""
    if not running:
        return 1 / beside
    chances = [1 - running[0], running[0]]  # that so many run
    for share in running[1:]:
        without, more = [*chances, 0.0], [0.0, *chances]
        chances = [a + share * (b - a) for a, b in zip(without, more, strict=True)]
    return sum(chance / (beside + count) for count, chance in enumerate(chances))


# Of each stage of a tenant its share of the step, and of each kind of its GPUs who else stands there, for which
# share of their steps. The GPUs of a group mostly have the same tenants.
_Beside = list[tuple[float, list[tuple[tuple[str, float], ...]]]]


def settle(tenants: Mapping[str, Batching]) -> dict[str, float]:
    """The batches that each of ``tenants``, by its replica's name, has under way where all came to rest beside one
    more that always runs on every GPU."""
    beside = _beside(tenants)
    batches, slowed, due = dict.fromkeys(tenants, 0.0), dict.fromkeys(tenants, 0.0), set(tenants)
    for _ in range(_TURNS):
        for name, tenant in tenants.items():
            if name not in due:
                continue
            due.discard(name)
            slower = 0.0
            for share, groups in beside[name]:
                speeds = [mean_speed([min(1.0, d * batches[other]) for other, d in who], 2) for who in groups]
                slower += share / min(speeds)
            if slower <= slowed[name] * (1 + _CLOSE):
                continue
            slowed[name], before = slower, batches[name]
            batches[name] = max(before, tenant.under_way(slower))
            if batches[name] > before:
                due.update(other for _, groups in beside[name] for who in groups for other, _ in who)
        if not due:
            break
    return batches


def _beside(tenants: Mapping[str, Batching]) -> dict[str, _Beside]:
    here: dict[Key, list[tuple[str, float]]] = {}
    for name, tenant in tenants.items():
        for share, keys in tenant.stages:
            for key in keys:
                here.setdefault(key, []).append((name, share))
    return {
        name: [
            (share, list({tuple(one for one in here[key] if one[0] != name) for key in keys}))
            for share, keys in tenant.stages
        ]
        for name, tenant in tenants.items()
    }
