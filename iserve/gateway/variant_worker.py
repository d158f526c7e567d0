"""State of one worker in the residency of variants: what is loaded there, and what is under way; its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fingerprint.load_time import RECORDED_TENSORS, recorded_load_s
from iserve.gateway.failed_loads import FailedLoads
from iserve.route_table import VariantRoute, WorkerTarget
from placement.variant_preload import choose_preloads, further_preloads
from placement.variant_routing import WaitingRequest, WorkerVariants, protected_pins
from planner.pending_loads import LoadsAhead, PendingLoads, loads_ahead_in_queue

__all__ = [
    "NoPlaceError",
    "Room",
    "VariantObserver",
    "VariantRequest",
    "VariantWorker",
    "chosen_preloads",
    "loads_ahead",
    "reload_s",
    "runnable_variants",
    "variants_of",
]


class NoPlaceError(Exception):
    """All that the worker has loaded is in flight or pinned; seen once it was asked, or its memory was full."""


class VariantObserver(Protocol):
    """Metrics of loads."""

    def loaded(self, variant: str, seconds: float) -> None: ...
    def evicted(self, variant: str) -> None: ...


@dataclass(slots=True, eq=False)
class VariantRequest:
    """Variant's side of one request."""

    route: VariantRoute  # of the table in force
    arrived_s: float  # on the event loop's clock
    admitted: VariantRoute | None = None  # as it was when a worker was found
    is_parent: bool = False  # of its variant's requests at that worker

    @property
    def variant(self) -> str:
        return self.route.engine_name


@dataclass(frozen=True, slots=True)
class Room:
    """Worker that can be sent one more request."""

    target: WorkerTarget
    outstanding: int
    last_turn: int
    is_avoided: bool


@dataclass(slots=True, eq=False)
class VariantWorker:
    """Variants of one worker, and the requests about them that are under way there."""

    target: WorkerTarget
    state: WorkerVariants
    is_listed: bool = True  # in the table
    is_known: bool = False  # it was asked what it has loaded
    epoch: int = 0  # counts the times that it was forgotten
    quiet_until_s: float = 0.0  # nothing is loaded ahead of need
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # of a worker that reads one delta at a time
    asking: asyncio.Task[None] | None = None
    loads: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # under way
    pending: PendingLoads = field(default_factory=PendingLoads)  # these, and those that were evicted meanwhile
    unloads: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    ahead: set[asyncio.Task[None]] = field(default_factory=set)  # loads that were begun before a request's need
    failed: FailedLoads = field(default_factory=FailedLoads)  # not loaded until they are asked for

    @property
    def is_ready(self) -> bool:
        return self.is_listed and self.target.ready

    @property
    def may_preload(self) -> bool:
        """Return whether no request for a variant, load or unload is under way, and a slot is free for a load.

        A load does not count that has failed before: a pinned variant is tried again and again.
        """
        if self.state.in_flight or self.unloads or not self.failed.allows_preload:
            return False
        places = min(self.state.slots, self.state.max_loaded)
        return len(self.state.loaded) < places and self.loads.keys() <= self.failed.names

    def shrink(
        self,
        name: str,
        now_s: float,
        wanted: Collection[str],
        size: Callable[[str], float] | None = None,
    ) -> tuple[str, ...] | None:
        """Count as many places as the loaded variants but ``name`` take, for which they left no memory.

        So it is until the next table. Returns what is unloaded for ``name``; None: all of them are in flight, or
        being loaded, whose unload would wait for a load that may wait for this one.

        Args:
            size: returns the bytes of a variant, which are what is short.
        """
        state = self.state
        state.unload(name)
        state.max_loaded = state.taken or 1.0
        state.pinned = frozenset(protected_pins(sorted(state.pinned), state.max_loaded, state.share))
        evicted = state.evictions(name, now_s, wanted, size=size)
        state.load(name, now_s)
        return None if evicted is None or self.loads.keys() & evicted else evicted

    def forget(self) -> None:
        """Take nothing for loaded but what is being loaded now."""
        if self.is_known:
            self.is_known = False
            self.epoch += 1
            for name in self.state.loaded - self.loads.keys():
                self.state.unload(name)


def reload_s(variant: VariantRoute | None) -> float:
    """Return the seconds of a load of a variant, by a recording; None: one that has left the table."""
    if variant is None:
        return recorded_load_s(0)
    return recorded_load_s(
        variant.num_bytes, RECORDED_TENSORS if variant.num_tensors is None else variant.num_tensors
    )


def runnable_variants(workers: Iterable[VariantWorker]) -> frozenset[str] | None:
    """Return the variants that need no further slot, where none is free; None: a worker has a free one."""
    states = [worker.state for worker in workers]
    if any(len(state.in_flight) < state.slots for state in states):
        return None
    return frozenset().union(*(state.in_flight for state in states))


def loads_ahead(
    name: str, workers: Sequence[VariantWorker], before: Iterable[str | None], now_s: float
) -> LoadsAhead | None:
    """Return the loads that a request for ``name`` waits for at the one of ``workers`` with fewest.

    None: it has to wait for none, or what a worker has loaded is not known yet.

    Args:
        before: variants of the requests that wait before it.
    """
    if not all(worker.is_known for worker in workers):
        return None
    return loads_ahead_in_queue(name, [(one.state.loaded, one.pending) for one in workers], before, now_s)


def variants_of(waiting: Iterable[WaitingRequest]) -> dict[str, None]:
    """Return the variants that requests are for, in their order."""
    return {variant: None for request in waiting if (variant := request.variant) is not None}


def chosen_preloads(
    able: Sequence[VariantWorker],
    known: Collection[VariantWorker],
    current: Iterable[str],
    served_s: Mapping[str, float],
) -> list[tuple[VariantWorker, str]]:
    """Return which of the workers that are ``able`` load which variants ahead of need.

    Args:
        known: all workers.
        current: variants of the table, those that were registered first at the front.
        served_s: when a request of a variant was last admitted.
    """
    left_out = set[str]().union(*(one.failed.lost for one in known), *(one.failed.names for one in able))
    ready = [worker for worker in known if worker.is_ready]
    chosen = choose_preloads(
        [worker.state for worker in able],
        [worker.state.loaded for worker in known],
        (name for name in current if name not in left_out),
        served_s,
        further_preloads(len(ready), sum(bool(worker.ahead) for worker in ready)),
    )
    return [(able[index], name) for index, name in chosen]
