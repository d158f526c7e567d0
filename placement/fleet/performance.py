"""Performance of a fleet plan at given loads: end-to-end times, utilisation, busy shares. A closed form, pure.

*   Each replica serves its part of the rate as ``fingerprint.queueing`` says, slowed by the rest of its GPUs'
    replicas; prompts and answers vary as an exponential does, and as many run at once as the KV cache holds.
*   Beyond 98% of capacity a queue grows for as long as the load lasts (``_OVERLOAD_S``).
*   Requests for variants that are loaded next to the steps wait for that as well (``fingerprint.load_waits``).
    They hold nothing of a GPU meanwhile, and the host makes their loads, which no co-tenant slows.
*   A replica is busy for ``B = 1 - exp(-l E)`` of the time, l its rate and E the mean time of a request; its
    co-tenants slow it by ``fingerprint.gpu_sharing``. How often two of them are busy at once, which splits a TP
    group, follows as if they were busy independently.

Requests go to the replicas of a deployment in proportion to how fast these are. The fixed point is found in damped
rounds. All cases of load are worked out together, as columns [cases, replicas].
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fingerprint.gpu_sharing import crowding_loss, slowdown
from fingerprint.queueing import ServiceColumns, Variation, requests_at_once, slot_wait
from fingerprint.spared_loads import at_rate, spared_column
from placement.fleet.load import Loads
from placement.fleet.memory import KvRoom
from placement.fleet.types import Fleet, FleetPlan

__all__ = ["FleetForecast", "forecast"]

Table = npt.NDArray[np.float64]

_ROUNDS = 7
# Crowded TP groups slow one another, so that a little load may grow to a standstill; near the rate at which it
# tips over more rounds would find more.
_MOST_ROUNDS = 64
_SETTLED = 0.003  # of a slowdown, in a round
_SATURATED = 1 - 1e-9
_FULL = 0.98  # share of capacity from which a queue is taken to grow
_OVERLOAD_S = 150.0  # mean wait per unit of load that is not served: that of a few minutes of overload


@dataclass(frozen=True)
class FleetForecast:
    """Forecast of a plan; one row per case of load.

    Attributes:
        e2e_s: [cases, deployments], mean time of a request; infinite for a deployment without a replica.
        on_gpu_s: [cases, deployments], the same without what it waits for a load, in which it holds nothing.
        busy: [cases, replicas], share of time in which a replica has requests.
        slowdown: [cases, replicas], by the rest of its GPUs' replicas; at least 1.
        utilisation: [cases, replicas], rate over capacity; may exceed 1.
        kv_tokens: [replicas].
    """

    e2e_s: Table
    on_gpu_s: Table
    busy: Table
    slowdown: Table
    utilisation: Table
    kv_tokens: Table


@dataclass(frozen=True)
class _Rows:
    """Columns of the replicas of a plan."""

    service: ServiceColumns
    deployment: npt.NDArray[np.intp]
    gpus: npt.NDArray[np.intp]  # [replicas, widest group], the first repeated
    share: Table
    on: Table  # [replicas, GPUs]: share of a step that runs there
    splits: Table  # log2 of the GPUs whose communication was not measured

    @classmethod
    def of(cls, fleet: Fleet, plan: FleetPlan, room: KvRoom) -> _Rows:
        options = [fleet.option(replica) for replica in plan.replicas]
        most = [option.batch_of(tokens) for option, tokens in zip(options, room.kv_tokens, strict=True)]
        widest = max(len(replica.gpus) for replica in plan.replicas)
        groups = [[*replica.gpus, *[replica.gpus[0]] * (widest - len(replica.gpus))] for replica in plan.replicas]
        share = np.array([option.busy_share_per_gpu for option in options])
        alike = Counter(replica.deployment for replica in plan.replicas)
        spared_s = spared_column(
            [option.spared_loads_s for option in options], [alike[one.deployment] for one in plan.replicas]
        )
        on = np.zeros((len(options), len(fleet.gpus)))
        for row, replica in enumerate(plan.replicas):
            on[row, list(replica.gpus)] = share[row]
        return cls(
            service=ServiceColumns.of(options, np.array(most), spared_s),
            deployment=np.array([replica.deployment for replica in plan.replicas], np.intp),
            gpus=np.array(groups, np.intp),
            share=share,
            on=on,
            splits=np.array([0.0 if o.is_split_measured else np.log2(o.config.tp) for o in options]),
        )

    def busy_tenants(self, busy: Table, foreign: Table) -> Table:
        """Return the busy shares of co-tenants, in sum, on that GPU of each replica where it is most."""
        there = busy @ self.on + foreign  # [cases, GPUs]
        return np.asarray(np.maximum(0.0, there[:, self.gpus].max(axis=2) - busy * self.share))


@dataclass(frozen=True)
class _Crowds:
    """TP groups with two co-tenants or more on a GPU, and the tenants of their GPUs."""

    groups: npt.NDArray[np.intp]  # numbers of those replicas
    own: Table  # [groups, 1]: share of a step on each GPU
    gpus: npt.NDArray[np.intp]  # [groups, widest group], numbers among ``first``
    first: npt.NDArray[np.intp]  # [GPUs of theirs]: first tenant of each
    # In the order of those GPUs; the number after the last replica is what is foreign.
    tenants: npt.NDArray[np.intp]
    shares: Table  # [tenants]: of a step, or of the time of what is foreign

    @classmethod
    def of(cls, rows: _Rows, is_group: npt.NDArray[np.bool_], foreign: Table) -> _Crowds | None:
        """Return the crowds; None: there is none.

        Args:
            foreign: [GPUs], busy share of what no replica accounts for, one more tenant.
        """
        on = np.vstack([rows.on, np.minimum(foreign, _SATURATED)])
        is_crowded = is_group & ((on > 0).sum(axis=0)[rows.gpus].max(axis=1) > 2)
        if not is_crowded.any():
            return None
        gpus, places = np.unique(rows.gpus[is_crowded], return_inverse=True)
        on = on[:, gpus]
        gpu_of, tenants = np.nonzero(on.T)
        return cls(
            groups=np.flatnonzero(is_crowded),
            own=rows.share[is_crowded][:, None],
            gpus=places.reshape(-1, rows.gpus.shape[1]),
            first=np.searchsorted(gpu_of, np.arange(len(gpus))),
            tenants=tenants,
            shares=on[tenants, gpu_of],
        )

    def lossy(self, slow: Table, busy: Table, group_loss: float) -> Table:
        """Return ``slow`` with the loss of these groups, as if tenants were busy independently."""
        busy = np.hstack([np.minimum(busy, _SATURATED), np.ones((len(busy), 1))])
        idle, odds = _idle_odds(busy[:, self.tenants] * self.shares)
        own_idle, own_odds = _idle_odds(busy[:, self.groups, None] * self.own)
        idle = np.add.reduceat(idle, self.first, axis=1)[:, self.gpus] - own_idle
        odds = np.add.reduceat(odds, self.first, axis=1)[:, self.gpus] - own_odds
        crowded = (1 - np.exp(idle) * (1 + odds)).max(axis=2)  # neither no other tenant is busy, nor one
        found = slow.copy()
        found[:, self.groups] *= crowding_loss(crowded, group_loss)
        return found


def _idle_odds(busy: Table) -> tuple[Table, Table]:
    """Return the logarithm of the chance to be idle, and the odds of being busy."""
    return np.log1p(-busy), busy / (1 - busy)


def forecast(fleet: Fleet, plan: FleetPlan, loads: Loads, room: KvRoom) -> FleetForecast:
    """Return how ``plan``, whose replicas have the KV cache of ``room``, serves ``loads``."""
    rows, cases = _Rows.of(fleet, plan, room), len(loads.weights)
    shape = (cases, len(plan.replicas))
    counts = np.bincount(rows.deployment, minlength=len(fleet.deployments))
    member = np.zeros((len(plan.replicas), len(fleet.deployments)))
    member[np.arange(len(plan.replicas)), rows.deployment] = 1.0
    loss = 1 + loads.split_loss[:, None] * rows.splits
    slow, routed = np.ones(shape), np.tile(1.0 / counts[rows.deployment], (cases, 1))
    foreign = np.array([gpu.busy for gpu in fleet.gpus])
    variation = Variation(burstiness=math.sqrt(loads.arrival_cv2))
    arriving = loads.rates_per_s[:, rows.deployment]
    e2e = busy = used = np.zeros(shape)
    is_group = np.array([fleet.option(replica).config.tp > 1 for replica in plan.replicas])
    crowds = _Crowds.of(rows, is_group, foreign)
    for number in range(_MOST_ROUNDS if crowds else _ROUNDS):
        e2e, used = _served(rows, arriving * routed, slow * loss, variation)
        busy = 1 - np.exp(-arriving * routed * e2e)
        found = slowdown(rows.busy_tenants(busy, foreign))
        if crowds:
            found = crowds.lossy(found, busy, fleet.group_loss)
            if number >= _ROUNDS and np.abs(found / slow - 1).max() < _SETTLED:
                break
        slow = found if number == 0 else (slow + found) / 2
        if (counts > 1).any():
            speed = 1 / slow / loss / rows.service.steps_s(np.ones(shape))
            routed = (routed + speed / ((speed @ member) @ member.T)) / 2
    on_gpu = total = (routed * e2e) @ member
    if rows.service.loads is not None:
        total = on_gpu + (routed * rows.service.loads.at(arriving * routed).of_all_s) @ member
    return FleetForecast(
        e2e_s=np.where(counts > 0, total, np.inf),
        on_gpu_s=np.where(counts > 0, on_gpu, np.inf),
        busy=busy,
        slowdown=slow,
        utilisation=used,
        kv_tokens=np.array(room.kv_tokens),
    )


def _served(rows: _Rows, rate: Table, slow: Table, variation: Variation) -> tuple[Table, Table]:
    """Return the mean end-to-end time and the utilisation of each replica at its rate."""
    service, used = rows.service, rate * slow * rows.service.slot_s
    if service.spared_s is not None:
        cases, replicas = rate.shape
        every = service.take(np.tile(np.arange(replicas), cases))
        left = at_rate(every, (rate * slow).ravel(), variation)
        one_case = replace(rows, service=left)
        e2e, used = _served(one_case, rate.reshape(1, -1), slow.reshape(1, -1), variation)
        return e2e.reshape(rate.shape), used.reshape(rate.shape)
    running = requests_at_once(service, np.minimum(used, _SATURATED), variation)
    wait = slot_wait(service, np.minimum(used, _FULL), variation, running.peak)
    over = np.maximum(0.0, 1 - _FULL / np.maximum(used, 1e-12)) * _OVERLOAD_S
    return slow * (service.requests_s(running.mean) + wait.of_all_s) + over, used
