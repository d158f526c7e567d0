"""Loads of variants before they are asked for: into free slots of idle workers, one at a time at each. Pure.

A load may stop its worker, so that only an idle worker begins one: no request is under way there, none waits, and
nothing is being loaded. Of several workers that are ready, one at least begins none, so that a request finds it
without a load. Nothing is evicted. A variant that any worker has is left out: a further copy is for the
routing of requests, so that workers of one deployment share the variants among them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from placement.variant_routing import WorkerVariants

__all__ = ["choose_preloads", "further_preloads"]


def further_preloads(ready: int, preloading: int) -> int:
    """Return how many of ``ready`` workers may begin a load ahead, while ``preloading`` of them have one."""
    return max(0, max(1, ready - 1) - preloading)


def choose_preloads(
    idle: Sequence[WorkerVariants],
    loaded: Iterable[Iterable[str]],
    variants: Iterable[str],
    served_s: Mapping[str, float],
    most: int | None = None,
) -> list[tuple[int, str]]:
    """Return (index of an idle worker, variant that it loads now), at most one for each worker.

    The worker with fewest loaded variants is first, and the variant that was asked for last; of those that never
    were, the first of ``variants``.

    Args:
        loaded: variants of each worker, idle or not.
        variants: all that may be loaded.
        served_s: when a request of a variant was last admitted.
        most: loads at most; None: one for each worker.
    """
    free = sorted(
        (index for index, worker in enumerate(idle) if len(worker.loaded) < min(worker.slots, worker.max_loaded)),
        key=lambda index: len(idle[index].loaded),
    )[:most]
    if not free:
        return []
    there = set[str]().union(*loaded)
    absent = (name for name in variants if name not in there)
    wanted = heapq.nsmallest(len(free), absent, key=lambda name: -served_s.get(name, float("-inf")))
    return list(zip(free, wanted, strict=False))
