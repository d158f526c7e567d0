"""Loads of variants that replicas spare one another, at a rate. Columns, pure.

A request is served at a replica that has its variant loaded, as long as that has a slot for it (``least-loaded``
of ``placement.variant_routing``): if all were, the replicas would be one cache with the places of all. One that
finds no free slot there goes to another replica, which loads the variant as well: if all did, each would have the
mix of all requests in its own places. Of the loads in these two cases the second has the share of the requests
that find no free slot by the law of load, the first the rest (docs/decisions/0050-loads-in-plans.md).

Loads that stop a worker are part of its utilisation, on which that share depends: of the shares that agree with
their own loads it is the least, as a queue that fills gets to it first. Where the rate is not served if each
replica has the mix of all, the share is 1, although less may be steady: a queue that has tipped over would stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fingerprint.queueing import Column, ServiceColumns, Variation, idle_share, peakedness, without_slot

__all__ = ["at_rate", "spared_column"]

_ROUNDS = 8  # from below; four more moved no mean of 38 cases by 0.01%
_LARGEST = 1 - 1e-9  # utilisation
_TINY = 1e-300


def spared_column(tables: Sequence[tuple[float, ...]], replicas: Sequence[int]) -> Column | None:
    """Return the seconds of loads that a request is spared at most, a row per replica; None: none is.

    Args:
        tables: ``Estimate.spared_loads_s`` of each row.
        replicas: of the deployment of each row, itself included.
    """
    if not any(tables):
        return None
    pairs = zip(tables, replicas, strict=True)
    found = np.array([table[min(number, len(table)) - 1] if table else 0.0 for table, number in pairs])
    return found if found.any() else None


def at_rate(service: ServiceColumns, rate_per_s: Column, variation: Variation) -> ServiceColumns:
    """Return the service of replicas that get ``rate_per_s`` each, with the loads that are left at it."""
    if service.spared_s is None:
        return service
    full = rate_per_s * service.slot_s
    peak = peakedness(np.minimum(full, _LARGEST) * service.most, variation)
    share = np.zeros_like(full)
    for _ in range(_ROUNDS):
        used = np.clip(full - rate_per_s * (1 - share) * service.spared_s, 0.0, _LARGEST)
        share = without_slot(service, used, peak, idle_share(used, variation.burstiness))
    spared_s = np.where(full < 1, 1 - share, 0.0) * service.spared_s
    return replace(
        service,
        prompt_s=np.maximum(service.prompt_s - spared_s, _TINY),
        added_prompt_s=np.maximum(service.added_prompt_s - spared_s, 0.0),
        spared_s=None,
    )
