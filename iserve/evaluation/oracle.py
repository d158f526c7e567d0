"""Oracle: a seeded local search that judges plans with the simulator itself, knowing the requests and the truth.

It starts from the plans of the contestants and changes one thing at a time: a deployment's TP, a replica more or
less, the place of one, the places of two, the KV room. What it finds bounds from above what a plan that never
changes can reach; it is a lower bound of the best only as far as the search went.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from iserve.evaluation.arena import Arena
from iserve.evaluation.metrics import Metrics, metrics_of, score
from iserve.evaluation.play import Placed, play
from iserve.evaluation.rules import configs_by_tp
from iserve.evaluation.situation import Replica, Situation
from iserve.evaluation.sizing import Spot, size_together
from iserve.evaluation.world import OracleBudget
from placement.types import GpuState
from planner.intent import IntentKind

__all__ = ["Found", "search"]

_BATCHES = (None, 16, 32, 64, 128, 256)  # None: all free memory
_PARENTS = 3  # best plans that are changed
_BEST_SHARE = 0.7  # of changes, those of the best one
_TRIES = 500  # changes in a row that do not fit, after which the search ends

Rank = tuple[float, ...]  # the less the better
_Plan = tuple[Spot, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Best plan of a search, and how much was tried."""

    replicas: tuple[Replica, ...]
    metrics: Metrics
    simulations: int
    seconds: float


def search(
    arena: Arena,
    intent: IntentKind,
    starts: Iterable[tuple[Replica, ...]],
    budget: OracleBudget,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Return the best plan found within ``budget``; never worse than the best of ``starts``."""
    return _Search(arena, intent, budget, clock).run(starts)


class _Search:
    def __init__(self, arena: Arena, intent: IntentKind, budget: OracleBudget, clock: Callable[[], float]) -> None:
        self._arena, self._intent, self._budget, self._clock = arena, intent, budget, clock
        self._random = Random(arena.seed)
        self._situation = arena.situation(arena.names, intent, arena.cluster)
        self._configs = {asked.name: configs_by_tp(asked, self._situation) for asked in self._situation.asked}
        self._known: dict[tuple[Replica, ...], Rank] = {}
        self._best: tuple[Rank, tuple[Replica, ...], Metrics] | None = None
        self._began_s = clock()

    def run(self, starts: Iterable[tuple[Replica, ...]]) -> Found:
        parents: list[tuple[Rank, _Plan]] = []
        for replicas in starts:
            self._judge(replicas)
            spots = _spots_of(replicas, self._situation)
            for plan in (spots, tuple(replace(spot, batch=None) for spot in spots)):
                self._consider(plan, parents)
        failed = 0
        while parents and failed < _TRIES and not self._is_over():
            is_best = self._random.random() < _BEST_SHARE
            _, parent = parents[0] if is_best else self._random.choice(parents)
            changed = self._changed(parent)
            failed = 0 if changed is not None and self._consider(changed, parents) else failed + 1
        assert self._best is not None, "there is at least one start"
        _, replicas, metrics = self._best
        return Found(replicas, metrics, len(self._known), self._clock() - self._began_s)

    def _is_over(self) -> bool:
        seconds = self._clock() - self._began_s
        return len(self._known) >= self._budget.simulations or seconds >= self._budget.seconds

    def _consider(self, plan: _Plan, parents: list[tuple[Rank, _Plan]]) -> bool:
        """Judge ``plan`` and keep it where it is among the best; return whether it is a new one that fits."""
        replicas = size_together(self._situation, plan)
        if replicas is None or replicas in self._known or self._is_over():
            return False
        rank = self._judge(replicas)
        if all(rank != other for other, _ in parents):
            parents.append((rank, plan))
            parents.sort(key=lambda parent: parent[0])
            del parents[_PARENTS:]
        return True

    def _judge(self, replicas: tuple[Replica, ...]) -> Rank:
        if replicas not in self._known:
            played = play(self._arena, Placed("oracle", replicas), self._intent)
            metrics = metrics_of(self._arena, played.result)
            rank = self._known[replicas] = rank_of(metrics, self._intent)
            if self._best is None or rank < self._best[0]:
                self._best = (rank, replicas, metrics)
        return self._known[replicas]

    def _changed(self, plan: _Plan) -> _Plan | None:
        """Return ``plan`` with one change; None: that change is not possible here."""
        random = self._random
        asked = random.choice(self._situation.asked)
        own = [spot for spot in plan if spot.asked.name == asked.name]
        rest = [spot for spot in plan if spot.asked.name != asked.name]
        config = own[0].config if own else random.choice(list(self._configs[asked.name].values()))
        move = random.choice(("tp", "add", "drop", "move", "swap", "batch")) if own else "add"
        if move == "tp":
            config = random.choice(list(self._configs[asked.name].values()))
            changed = [replace(spot, config=config, gpus=self._group(config.tp)) for spot in own]
        elif move == "add":
            batch = own[0].batch if own else None
            changed = [*own, Spot(asked, config, self._group(config.tp), batch)]
        elif move == "drop":
            changed = random.sample(own, len(own) - 1)
        elif move == "move":
            at = random.randrange(len(own))
            changed = [*own[:at], replace(own[at], gpus=self._group(config.tp)), *own[at + 1 :]]
        elif move == "batch":
            batch = random.choice(_BATCHES)
            changed = [replace(spot, batch=batch) for spot in own]
        else:
            return _swapped(plan, random)
        used = [device for spot in changed for device in spot.devices]
        if not changed or len(set(used)) < len(used) or any(len(spot.gpus) < spot.config.tp for spot in changed):
            return None
        return _in_order([*rest, *changed])

    def _group(self, tp: int) -> tuple[GpuState, ...]:
        """Return ``tp`` neighbours of one node, from a multiple of ``tp`` on; none where no node has so many."""
        by_node: dict[str, list[GpuState]] = {}
        for gpu in self._situation.cluster.gpus:
            by_node.setdefault(gpu.node_id, []).append(gpu)
        groups = [
            tuple(gpus[first : first + tp])
            for gpus in by_node.values()
            for first in range(0, len(gpus) - tp + 1, tp)
        ]
        return self._random.choice(groups) if groups else ()


def rank_of(metrics: Metrics, intent: IntentKind) -> Rank:
    """Return the order of plans: those that are lost last, by how much they miss; then the intent's score, P95."""
    found = score(metrics, intent)
    p95 = math.inf if metrics.e2e.p95_s is None else metrics.e2e.p95_s
    if found is None:
        ratio = math.inf if metrics.guard_ratio is None else metrics.guard_ratio
        return (1.0, -metrics.answered_fraction, ratio, p95)
    return (0.0, found, p95, 0.0)


def _spots_of(replicas: Sequence[Replica], situation: Situation) -> _Plan:
    """Return the replicas of one stage with their batch; pipelines are left out."""
    asked = {one.name: one for one in situation.asked}
    gpus = {(gpu.node_id, gpu.device_id): gpu for gpu in situation.cluster.gpus}
    return _in_order(
        [
            Spot(
                asked[one.deployment],
                one.config,
                tuple(gpus[one.placement.stages[0].node_id, device] for device in one.placement.device_ids),
                one.limits.max_batch,
            )
            for one in replicas
            if one.config.pp == 1
        ]
    )


def _swapped(plan: _Plan, random: Random) -> _Plan | None:
    """Return ``plan`` with the places of two replicas of different deployments and equal TP exchanged."""
    pairs = [
        (i, j)
        for i, one in enumerate(plan)
        for j, other in enumerate(plan[:i])
        if one.asked.name != other.asked.name and one.config.tp == other.config.tp and one.gpus != other.gpus
    ]
    if not pairs:
        return None
    i, j = random.choice(pairs)
    spots = list(plan)
    spots[i], spots[j] = replace(plan[i], gpus=plan[j].gpus), replace(plan[j], gpus=plan[i].gpus)
    for name in (plan[i].asked.name, plan[j].asked.name):
        used = [device for spot in spots if spot.asked.name == name for device in spot.devices]
        if len(set(used)) < len(used):
            return None
    return _in_order(spots)


def _in_order(spots: Iterable[Spot]) -> _Plan:
    return tuple(sorted(spots, key=lambda spot: (spot.asked.name, spot.devices)))
