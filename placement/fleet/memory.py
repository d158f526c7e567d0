"""KV cache of each replica of a fleet plan: a fair share of what is free on its GPUs, no more than is of use.

While more deployments are expected than GPUs are left for, a part of what is free stays so for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fingerprint.service_model import ServiceModel
from placement.fleet.types import Fleet, FleetPlan

__all__ = ["KvRoom", "kv_room"]

_MOST_TOKENS = 2.0**40  # more than any GPU holds
_SMALLER = (1, 2, 4, 1024)  # times as small parts of what is free, until those still expected find room


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Tokens of KV cache of each replica of a plan, in its order.

    ``unplaced``: deployments still expected that would find no room.
    """

    kv_tokens: tuple[float, ...]
    unplaced: int = 0


def kv_room(
    fleet: Fleet, plan: FleetPlan, *, wanted_tokens: Sequence[float] | None = None, all_free: bool = False
) -> KvRoom | None:
    """Return the KV cache of each replica; None: the plan does not fit, with the longest request of each.

    Each has room for its longest request. On each GPU the replicas there get equal shares of what that leaves;
    what one does not need goes to the rest. A replica has what its tightest GPU gives. Where more deployments are
    expected it is a part of what is free, so small that each of them finds room for its longest request, were it
    like the first new one. Where no part is so small, some stay unplaced.

    Args:
        wanted_tokens: most of each replica; None: what is of use (``Fleet.useful_tokens``).
        all_free: take all that is free.
    """
    wanted = wanted_tokens or [
        _MOST_TOKENS if all_free else fleet.useful_tokens[replica.deployment][replica.option]
        for replica in plan.replicas
    ]
    later = max(0, fleet.expected - len(fleet.deployments))
    if not later:
        found = _shared(fleet, plan, wanted, 1)
        return None if found is None else KvRoom(tuple(found))
    new = (number for number, one in enumerate(fleet.deployments) if not one.fixed)
    least = fleet.least(next(new, 0))
    parts = _parts(fleet, plan, later, least)
    first, rooms = _shared(fleet, plan, wanted, parts), 0
    if first is None:
        return None
    for times in _SMALLER:
        found = _shared(fleet, plan, wanted, times * parts)
        assert found is not None, "smaller parts fit where larger ones do"
        rooms = _rooms(fleet, plan, found, least)
        if rooms >= later:
            return KvRoom(tuple(found))
    if not rooms:  # nothing that is left free would help one of them
        first = _shared(fleet, plan, wanted, 1) or first
    return KvRoom(tuple(first), unplaced=later - rooms)


def _shared(fleet: Fleet, plan: FleetPlan, wanted: Sequence[float], parts: int) -> list[float] | None:
    """Return the KV cache of each replica, all having one of ``parts`` parts of what is free; None: no fit."""
    options = [fleet.option(replica) for replica in plan.replicas]
    tokens = [
        max(most, float(option.longest_tokens)) if replica.kv_tokens is None else replica.kv_tokens
        for most, option, replica in zip(wanted, options, plan.replicas, strict=True)
    ]
    least = [option.bytes_per_gpu(option.longest_tokens) for option in options]
    more = [(t - o.longest_tokens) * o.kv_bytes_per_token for t, o in zip(tokens, options, strict=True)]
    for state, rows in zip(fleet.gpus, _new_on(fleet, plan), strict=True):
        free = float(state.usable_bytes - sum(least[row] for row in rows)) / parts
        if rows and free < 0:
            return None
        for left, row in enumerate(sorted(rows, key=more.__getitem__), start=-len(rows)):
            given = min(free / -left, more[row])
            free -= given
            if more[row] > given:
                option = options[row]
                tokens[row] = min(tokens[row], option.longest_tokens + given / option.kv_bytes_per_token)
    return tokens


def _new_on(fleet: Fleet, plan: FleetPlan) -> list[list[int]]:
    """Return the rows of the replicas on each GPU whose memory is still to be taken."""
    on: list[list[int]] = [[] for _ in fleet.gpus]
    for row, replica in enumerate(plan.replicas):
        for gpu in replica.gpus if replica.kv_tokens is None else ():
            on[gpu].append(row)
    return on


def _rooms(fleet: Fleet, plan: FleetPlan, tokens: Sequence[float], least: ServiceModel) -> int:
    """Return how many deployments as small as ``least`` still find room, on the reserved GPUs as well."""
    need_bytes = max(1, least.bytes_per_gpu(least.longest_tokens))
    free = [float(state.usable_bytes) for state in fleet.gpus]
    for gpu, rows in enumerate(_new_on(fleet, plan)):
        free[gpu] -= sum(fleet.option(plan.replicas[row]).bytes_per_gpu(tokens[row]) for row in rows)
    on_each = [int(max(0.0, size)) // need_bytes for size in free]
    rooms = 0
    for group in fleet.blocks[least.num_gpus]:  # those of pipelines overlap
        most = min(on_each[gpu] for gpu in group)
        rooms += most
        for gpu in group:
            on_each[gpu] -= most
    return rooms


def _parts(fleet: Fleet, plan: FleetPlan, later: int, least: ServiceModel) -> int:
    """Return the mean number of replicas on a GPU once all expected deployments are there, each as ``least``."""
    taken = sum(len(replica.gpus) for replica in plan.replicas)
    return math.ceil((taken + later * least.num_gpus) / len(fleet.gpus))
