"""Replay of requests for LoRA variants over workers with adapter slots, by the gateway's own scheduling policy.

Answers how often a variant is loaded already, how many loads and evictions a trace causes, how long its requests
wait for a slot and for their load, and when they are complete. Requests that run together at a worker slow each
other down as ``StepCost`` says; without one, a request takes its ``service_s`` anywhere. Loads stop no steps here,
and run next to one another; the cluster's simulator (``simulation``), which has the same core (``variant_fleet``),
follows steps, which a load stops.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from fingerprint.errors import ConfigError
from placement.variant_routing import VariantPolicy, make_variant_policy
from traces.simulator.variant_fleet import VariantFleet

__all__ = ["StepCost", "StepSlowdown", "VariantArrival", "VariantReplay", "VariantWorkers", "replay_variants"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantArrival:
    """Request of a trace."""

    arrived_s: float
    variant: str
    service_s: float  # alone at the worker, without its load


class StepSlowdown(Protocol):
    """Slowdown of requests that run together at a worker."""

    def slowdown(self, requests: int, variants: int) -> float:
        """Return how much longer a step takes than one of a single request, all of whose time is ``service_s``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Duration of a worker's step in seconds, linear in its requests, in their distinct variants, and in both."""

    fixed_s: float  # of a step of one request
    per_request_s: float = 0.0  # of each further one
    per_variant_s: float = 0.0  # of each variant after the first
    per_both_s: float = 0.0  # times the requests and the variants, less that of one of each

    def __post_init__(self) -> None:
        further = (self.per_request_s, self.per_variant_s, self.per_both_s)
        if not (0 < self.fixed_s < math.inf and min(further) >= 0):
            raise ConfigError(
                "a step takes time, and no less with more requests, got "
                f"{self.fixed_s} s and {', '.join(map(str, further))} s"
            )

    def slowdown(self, requests: int, variants: int) -> float:
        """Return how much longer a step takes than one of a single request."""
        further_s = self.per_request_s * (requests - 1) + self.per_variant_s * (variants - 1)
        further_s += self.per_both_s * (requests * variants - 1)
        return 1.0 + further_s / self.fixed_s


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantWorkers:
    """Workers of one deployment, all alike."""

    num_workers: int
    slots: int  # distinct variants in flight at a worker
    max_loaded: int  # places of loaded variants at a worker
    share_of: Mapping[str, float] = field(default_factory=dict)  # of a place, by variant; the rest take one each
    max_outstanding: int = 256  # requests at a worker
    variant_bytes: int  # of one variant, where ``bytes_of`` has none
    bytes_of: Mapping[str, int] = field(default_factory=dict)  # by variant
    load_bytes_per_s: float  # of one load; loads do not slow each other down
    step: StepSlowdown | None = None  # None: requests do not slow each other down
    resume_s: float = 0.0  # of service, more for a request that was preempted, each time

    def __post_init__(self) -> None:
        if min(self.num_workers, self.max_outstanding) < 1:
            raise ConfigError(
                f"variants need a worker and room at it, got {self.num_workers} and {self.max_outstanding}"
            )
        if not 0 <= self.resume_s < math.inf:
            raise ConfigError(f"a preempted request takes no negative time to go on, got {self.resume_s} s")
        if not (self.variant_bytes >= 0 and self.load_bytes_per_s > 0):
            raise ConfigError(
                f"a load needs bytes and bytes per second, got {self.variant_bytes} and {self.load_bytes_per_s}"
            )

    def load_s(self, variant: str) -> float:
        """Return the time of a load of ``variant``."""
        return self.bytes_of.get(variant, self.variant_bytes) / self.load_bytes_per_s

    def share(self, variant: str) -> float:
        """Return the share of a place that ``variant`` takes."""
        return self.share_of.get(variant, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantReplay:
    """Outcome of a replay."""

    loads: int
    evictions: int
    hits: int  # requests whose variant was loaded, or being loaded, when a worker took them
    waiting_s: tuple[float, ...]  # of each request in order of the trace, until it ran
    latency_s: tuple[float, ...]  # likewise, from its arrival until it was complete
    ended_s: float = 0.0  # when the last was complete
    preemptions: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / len(self.waiting_s) if self.waiting_s else 1.0


@dataclass(slots=True, eq=False)
class _Request:
    row: int
    arrival: VariantArrival
    left_s: float  # of its service
    arrived_s: float
    has_run: bool = False

    @property
    def variant(self) -> str:
        return self.arrival.variant


class _Worker:
    """Worker whose running requests all advance at one pace, which changes with their number.

    ``_progress_s`` is the service that a request would have received that ran from the beginning. A request ends
    when it has grown by the request's ``service_s`` since its start.
    """

    def __init__(self, workers: VariantWorkers) -> None:
        self.max_outstanding, self._step = workers.max_outstanding, workers.step
        self.outstanding = 0
        self.last_turn = -1
        self.loading: Counter[str] = Counter()  # loads under way, by variant
        self.held: dict[str, list[_Request]] = {}  # until their variant is loaded
        self.epoch = 0  # of the next end, which another start or end puts off
        self._running: list[tuple[float, int, _Request]] = []  # by the progress at which each ends
        self._variants: Counter[str] = Counter()  # of those
        self._progress_s = self._since_s = 0.0

    def start(self, request: _Request, now_s: float) -> None:
        self._advance(now_s)
        heapq.heappush(self._running, (self._progress_s + request.left_s, request.row, request))
        self._variants[request.variant] += 1

    def end(self, now_s: float) -> _Request:
        """Return the request that is complete now."""
        self._advance(now_s)
        self._progress_s, _, request = heapq.heappop(self._running)  # exactly, whatever was rounded
        self._stop(request)
        return request

    def take_back(self, request: _Request, now_s: float) -> None:
        """Stop a request, which runs since its parent has run, and note how much of its service is left."""
        self._advance(now_s)
        (entry,) = (one for one in self._running if one[2] is request)
        self._running.remove(entry)
        heapq.heapify(self._running)
        request.left_s = max(0.0, entry[0] - self._progress_s)
        self._stop(request)

    def _stop(self, request: _Request) -> None:
        self._variants[request.variant] -= 1
        if not self._variants[request.variant]:
            del self._variants[request.variant]

    def next_end_s(self) -> float:
        """Return when the next request is complete if none starts before; infinite where none runs."""
        if not self._running:
            return math.inf
        return self._since_s + max(0.0, self._running[0][0] - self._progress_s) * self._slowdown

    @property
    def _slowdown(self) -> float:
        return 1.0 if self._step is None else self._step.slowdown(len(self._running), len(self._variants))

    def _advance(self, now_s: float) -> None:
        if self._running:
            self._progress_s += (now_s - self._since_s) / self._slowdown
        self._since_s = now_s


def replay_variants(
    requests: Sequence[VariantArrival],
    workers: VariantWorkers,
    policy: VariantPolicy | None = None,
    *,
    clients: int | None = None,
) -> VariantReplay:
    """Replay ``requests``, in any order of arrival.

    Args:
        clients: a closed loop of so many: the first requests arrive at once, each further one as another is
            complete, in the order of ``requests``, whose times are not used. None: they arrive at their times.

    Raises:
        ConfigError: the workers have fewer places than slots, or none; no client.
    """
    if clients is not None and clients < 1:
        raise ConfigError(f"a closed loop needs a client, got {clients}")
    replay = _Replay(len(requests), workers, policy or make_variant_policy())
    return replay.run(requests, clients)


class _Replay:
    def __init__(self, num_requests: int, workers: VariantWorkers, policy: VariantPolicy) -> None:
        self._load_s, self._resume_s = workers.load_s, workers.resume_s
        self._preemptions, self._ended_s = 0, 0.0
        self._to_arrive: Iterator[_Request] = iter(())  # of a closed loop
        self._workers = [_Worker(workers) for _ in range(workers.num_workers)]
        self._fleet = VariantFleet[_Request, _Worker](
            policy, workers.slots, workers.max_loaded, self, reload_s=workers.load_s, share=workers.share
        )
        for worker in self._workers:
            self._fleet.enter(worker)
        self._waiting: dict[_Request, None] = {}
        self._events: list[tuple[float, int, Callable[[float], bool]]] = []  # return whether the queue may move
        self._order = itertools.count()
        self._waiting_s = [0.0] * num_requests
        self._latency_s = [0.0] * num_requests

    def run(self, requests: Sequence[VariantArrival], clients: int | None) -> VariantReplay:
        arrivals = sorted(
            (_Request(row, one, one.service_s, one.arrived_s) for row, one in enumerate(requests)),
            key=lambda one: one.arrived_s,
        )
        if clients is not None:
            self._to_arrive = iter(arrivals[clients:])
            arrivals = arrivals[:clients]
            for request in arrivals:
                request.arrived_s = 0.0
        next_row = 0
        while next_row < len(arrivals) or self._events:
            if self._events and (next_row == len(arrivals) or self._events[0][0] <= arrivals[next_row].arrived_s):
                now_s, _, happen = heapq.heappop(self._events)
                if not happen(now_s):
                    continue
            else:
                now_s = arrivals[next_row].arrived_s
                self._waiting[arrivals[next_row]] = None
                next_row += 1
            for request in self._fleet.serve(tuple(self._waiting), self._workers, now_s):
                del self._waiting[request]
        return VariantReplay(
            loads=self._fleet.loads,
            evictions=self._fleet.evictions,
            hits=self._fleet.hits,
            waiting_s=tuple(self._waiting_s),
            latency_s=tuple(self._latency_s),
            ended_s=self._ended_s,
            preemptions=self._preemptions,
        )

    def choose_base(self, rooms: Sequence[_Worker]) -> int:
        raise AssertionError("every request of a replay is for a variant")

    def load(self, worker: _Worker, variant: str, now_s: float) -> None:
        worker.loading[variant] += 1
        self._at(now_s + self._load_s(variant), partial(self._loaded, worker, variant))

    def send(self, request: _Request, worker: _Worker, now_s: float) -> None:
        worker.outstanding += 1
        worker.last_turn = request.row
        if worker.loading[request.variant]:
            worker.held.setdefault(request.variant, []).append(request)
        else:
            self._start(worker, request, now_s)

    def _loaded(self, worker: _Worker, variant: str, now_s: float) -> bool:
        self._fleet.loaded(worker, variant)
        worker.loading[variant] -= 1
        if not worker.loading[variant]:
            for request in worker.held.pop(variant, ()):
                self._start(worker, request, now_s)
        return True

    def _start(self, worker: _Worker, request: _Request, now_s: float) -> None:
        if not request.has_run:
            request.has_run, self._waiting_s[request.row] = True, now_s - request.arrived_s
        worker.start(request, now_s)
        self._expect_end(worker)

    def _expect_end(self, worker: _Worker) -> None:
        worker.epoch += 1
        if (at_s := worker.next_end_s()) < math.inf:
            self._at(at_s, partial(self._end, worker, worker.epoch))

    def _end(self, worker: _Worker, epoch: int, now_s: float) -> bool:
        if epoch != worker.epoch:
            return False
        request = worker.end(now_s)
        worker.outstanding -= 1
        followers = self._fleet.ended(worker, request)
        self._latency_s[request.row] = now_s - request.arrived_s
        self._ended_s = now_s
        self._take_back(worker, followers, now_s)
        for following in itertools.islice(self._to_arrive, 1):
            following.arrived_s = now_s
            self._waiting[following] = None
        self._expect_end(worker)
        return True

    def _take_back(self, worker: _Worker, followers: Sequence[_Request], now_s: float) -> None:
        """Put requests that are preempted back in their places of the queue."""
        if not followers:
            return
        for request in followers:
            worker.take_back(request, now_s)
            worker.outstanding -= 1
            request.left_s += self._resume_s
            self._waiting[request] = None
        self._preemptions += len(followers)
        self._waiting = dict.fromkeys(sorted(self._waiting, key=lambda one: (one.arrived_s, one.row)))

    def _at(self, at_s: float, happen: Callable[[float], bool]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), happen))
