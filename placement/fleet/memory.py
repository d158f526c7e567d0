"""KV cache of each replica of a fleet plan: a fair share of what is free on its GPUs, no more than is of use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fingerprint.service_model import ServiceModel
from placement.fleet.types import Fleet, FleetPlan

__all__ = ["KvRoom", "kv_room", "useful_kv_tokens"]

_MOST_TOKENS = 2.0**40  # more than any GPU holds
_BEYOND_KNEE = 1.25  # times the KV cache at which capacity has reached 97% of its most


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Tokens of KV cache of each replica of a plan, in its order."""

    kv_tokens: tuple[float, ...]


def useful_kv_tokens(option: ServiceModel) -> float:
    """Return the KV cache beyond which an option gains next to nothing."""
    return max(float(option.longest_tokens), _BEYOND_KNEE * option.knee_batch * option.mean_tokens)


def kv_room(
    fleet: Fleet, plan: FleetPlan, *, wanted_tokens: Sequence[float] | None = None, all_free: bool = False
) -> KvRoom | None:
    """Return the KV cache of each replica; None: the plan does not fit, with the longest request of each.

    Each has room for its longest request. On each GPU the replicas there get equal shares of what that leaves;
    what one does not need goes to the rest. A replica has what its tightest GPU gives.

    Args:
        wanted_tokens: most of each replica; None: what is of use (``useful_kv_tokens``).
        all_free: take all that is free.
    """
    options = [fleet.option(replica) for replica in plan.replicas]
    wanted = wanted_tokens or [_MOST_TOKENS if all_free else useful_kv_tokens(option) for option in options]
    tokens = [
        max(most, float(option.longest_tokens)) if replica.kv_tokens is None else replica.kv_tokens
        for most, option, replica in zip(wanted, options, plan.replicas, strict=True)
    ]
    least = [option.bytes_per_gpu(option.longest_tokens) for option in options]
    more = [(t - o.longest_tokens) * o.kv_bytes_per_token for t, o in zip(tokens, options, strict=True)]
    on: list[list[int]] = [[] for _ in fleet.gpus]
    for row, replica in enumerate(plan.replicas):
        for gpu in replica.gpus if replica.kv_tokens is None else ():
            on[gpu].append(row)
    for state, rows in zip(fleet.gpus, on, strict=True):
        free = float(state.usable_bytes - sum(least[row] for row in rows))
        if free < 0:
            return None
        for left, row in enumerate(sorted(rows, key=more.__getitem__), start=-len(rows)):
            given = min(free / -left, more[row])
            free -= given
            if more[row] > given:
                option = options[row]
                tokens[row] = min(tokens[row], option.longest_tokens + given / option.kv_bytes_per_token)
    return KvRoom(tuple(tokens))
