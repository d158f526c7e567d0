"""Plain form of ``placement.batch_load`` and ``batch_sharing``: one state, one replica and one moment at a time.

Imported as ``tests.placement.plain_batches``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from placement.batch_load import Batching
from placement.load_model import Key

_STATES = 1500


def under_way(tenant: Batching, slowed: float, states: int = _STATES) -> float:
    """Return the mean number under way by the chain's balance, state by state, so many of them."""
    batches = min(tenant.batches, tenant.slots)
    per_slot = (tenant.full_s - tenant.alone_s) / (tenant.slots - 1) if tenant.slots > 1 else 0.0
    weights = [0.0]  # logarithms
    for n in range(1, states):
        running = min(n, tenant.slots)
        flying = min(running, batches)
        stay_s = slowed * (tenant.alone_s + max(0.0, per_slot) * (running / flying - 1))
        weights.append(weights[-1] + np.log(tenant.requests_per_s * stay_s / running))
    chances = np.exp(np.array(weights) - max(weights))
    chances /= chances.sum()
    return float(chances @ np.minimum(np.arange(states), batches))


def saturation(tenant: Batching) -> float:
    """Return the saturation of its slots; from 1 on it is always full."""
    batches = min(tenant.batches, tenant.slots)
    per_slot = max(0.0, tenant.full_s - tenant.alone_s) / max(1, tenant.slots - 1)
    return tenant.requests_per_s * (tenant.alone_s + per_slot * (tenant.slots / batches - 1)) / tenant.slots


def mean_speed(running: Sequence[float], beside: int) -> float:
    """Return the speed of one that always runs where ``beside`` do, itself included: over all that may run at a
    moment.
    """
    return sum(
        prod(share if on else 1 - share for share, on in zip(running, who, strict=True)) / (beside + sum(who))
        for who in product((False, True), repeat=len(running))
    )


def settle(tenants: Sequence[Batching], close: float = 1e-9) -> list[float]:
    """The fixed point from below, one tenant after the other."""
    batches = [0.0] * len(tenants)
    for _ in range(2000):
        before = list(batches)
        for at, tenant in enumerate(tenants):
            batches[at] = max(batches[at], tenant.under_way(slowed(tenants, batches, at)))
        if max(after - b for after, b in zip(batches, before, strict=True)) <= close:
            break
    return batches


def slowed(tenants: Sequence[Batching], batches: Sequence[float], at: int) -> float:
    """Return how many times as long all takes the one ``at``, with all the rest and one that always runs."""
    others = [other for other in range(len(tenants)) if other != at]
    return sum(
        share / min(mean_speed(_running(tenants, batches, others, key), 2) for key in keys)
        for share, keys in tenants[at].stages
    )


def kept(tenants: Sequence[Batching], told: Sequence[Batching]) -> dict[Key, float]:
    """Return, for each GPU, what ``tenants`` keep from one that always runs there."""
    everybody = [*tenants, *told]
    batches = settle(everybody)
    keys = {key for tenant in everybody for _, among in tenant.stages for key in among}
    return {key: 1 - mean_speed(_running(everybody, batches, range(len(tenants)), key), 1) for key in keys}


def _running(tenants: Sequence[Batching], batches: Sequence[float], who: Sequence[int], key: Key) -> list[float]:
    return [min(1.0, share * batches[one]) for one in who for share, keys in tenants[one].stages if key in keys]
