"""Scheduling of LoRA variants: the worker of a request, the variant unloaded for another, the order of the queue.

Pure: times are arguments, and nothing is sent. The gateway (``iserve.gateway.variant_residency``) and the
simulator (``traces.simulator.variant_fleet``) keep one ``WorkerVariants`` for each worker and offer the waiting
requests with ``admit_waiting``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from fingerprint.errors import ConfigError
from placement.worker_variants import WorkerVariants, protected_pins

__all__ = [
    "BACKGROUND_LOADS",
    "DEFAULT_VARIANT_POLICY",
    "STARVATION_BOUND_S",
    "VARIANT_POLICIES",
    "Admission",
    "BusiestLoaded",
    "Candidate",
    "DeltaZip",
    "FirstComeFirstServed",
    "LeastLoaded",
    "PreemptingDeltaZip",
    "RoundRobin",
    "VariantPolicy",
    "WaitingRequest",
    "WorkerVariants",
    "admit_waiting",
    "choose_prefetch",
    "make_variant_policy",
    "protected_pins",
]

DEFAULT_VARIANT_POLICY = "least-loaded"
BACKGROUND_LOADS = 2  # at a worker at once, while it loads variants of requests that still wait
STARVATION_BOUND_S = 10.0  # once a request has waited for so long, slots are emptied for it one by one
_NEAR_FRACTION = 0.5  # of the bound; from then on the variant served least recently is offered a worker first


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Worker that has room for one more request."""

    worker: WorkerVariants
    outstanding: int  # its requests of all variants and of the base
    last_turn: int = -1  # of the request that it was given last
    is_avoided: bool = False  # the request failed there; taken only where no other can


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Choice of a worker for a request, or for a load."""

    index: int  # among the candidates
    evicted: tuple[str, ...] = ()  # what is unloaded first, where the variant is to be loaded


class WaitingRequest(Protocol):
    """Request in the queue."""

    @property
    def variant(self) -> str | None: ...  # None: the base, which needs room but no slot
    @property
    def arrived_s(self) -> float: ...


_W = TypeVar("_W", bound=WaitingRequest)


class VariantPolicy(Protocol):
    """Choice of the worker, and order of the queue."""

    @property
    def name(self) -> str: ...

    @property
    def preempts(self) -> bool:
        """Return whether requests that passed another are taken back as their parent ends: in replays alone."""
        ...

    def order(self, waiting: Sequence[_W], served_s: Mapping[str, float], now_s: float) -> Sequence[_W]:
        """Return variants' requests, given in order of arrival, in the order in which they are offered a worker.

        Args:
            served_s: when a request of a variant was last admitted.
        """
        ...

    @property
    def is_strict(self) -> bool:
        """Return whether nothing passes a request that may not be passed; else ``choose`` says where it may."""
        ...

    def may_be_passed(self, request: WaitingRequest, now_s: float) -> bool:
        """Return whether requests behind ``request``, which no worker can take now, may be admitted."""
        ...

    def choose(
        self,
        variant: str,
        candidates: Sequence[Candidate],
        now_s: float,
        wanted: Collection[str] = (),
        *,
        passes: bool = False,
    ) -> Admission | None:
        """Return the worker that takes a request of ``variant`` now, None: none can.

        Args:
            wanted: variants of waiting requests.
            passes: a request before this one, which may not be passed, goes on waiting.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Ranked(ABC):
    """Policy that takes, of the workers that can and may take a request, the one of least rank."""

    preempts: ClassVar[bool] = False
    is_strict: ClassVar[bool] = False

    @abstractmethod
    def _rank(self, variant: str, candidate: Candidate, loss: float) -> tuple[float, ...]:
        """Return the rank of a worker; ``loss`` is what is evicted there, by ``WorkerVariants.loss``."""

    def _may_take(self, variant: str, worker: WorkerVariants, *, passes: bool) -> bool:
        """Return whether the policy gives the worker a request; ``passes``: before one that may not be passed."""
        return not passes

    def choose(
        self,
        variant: str,
        candidates: Sequence[Candidate],
        now_s: float,
        wanted: Collection[str] = (),
        *,
        passes: bool = False,
    ) -> Admission | None:
        best: Admission | None = None
        best_rank: tuple[float, ...] = ()
        for index, candidate in enumerate(candidates):
            worker = candidate.worker
            if not (worker.has_slot(variant) and self._may_take(variant, worker, passes=passes)):
                continue
            evicted = worker.evictions(variant, now_s, wanted)
            if evicted is None:
                continue
            loss = worker.loss(evicted, now_s)
            its_rank = (float(candidate.is_avoided), *self._rank(variant, candidate, loss))
            if best is None or its_rank < best_rank:
                best, best_rank = Admission(index=index, evicted=evicted), its_rank
        return best


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed(_Ranked):
    """Least loaded worker, which loads what it lacks; all requests wait behind one that no worker can take."""

    is_strict: ClassVar[bool] = True
    name: str = "fcfs"

    def order(self, waiting: Sequence[_W], served_s: Mapping[str, float], now_s: float) -> Sequence[_W]:
        return waiting

    def may_be_passed(self, request: WaitingRequest, now_s: float) -> bool:
        return False

    def _rank(self, variant: str, candidate: Candidate, loss: float) -> tuple[float, ...]:
        return (candidate.outstanding, candidate.last_turn)


@dataclass(frozen=True, slots=True)
class DeltaZip(FirstComeFirstServed):
    """First come, first served, but for requests whose variant has a slot: they pass those that wait for one.

    Published for deltas (DeltaZip, EuroSys 2025, section 5.4). The request that took the slot is the *parent* of
    its variant's. DeltaZip preempts its followers as it ends (``PreemptingDeltaZip``); engines give no running
    request back, and here requests of the variant pass none any more from then on. So a request waits for a slot
    until the parents of that moment, and those that followed them, have ended.
    """

    is_strict: ClassVar[bool] = False
    name: str = "deltazip"

    def _may_take(self, variant: str, worker: WorkerVariants, *, passes: bool) -> bool:
        return not passes or variant in worker.led


@dataclass(frozen=True, slots=True)
class PreemptingDeltaZip(DeltaZip):
    """DeltaZip as published: as a parent ends, requests that passed another go back to their places in the queue.

    For replays alone (``traces.simulator.variants``): a gateway cannot take a request back.
    """

    preempts: ClassVar[bool] = True
    name: str = "deltazip-preempting"


@dataclass(frozen=True, slots=True)
class _SkipTheLine(_Ranked):
    """Order of the queue in which requests pass those that no worker can take, and slots change hands in time.

    Once a request has waited for ``bound_s``, a worker admits later ones only for variants that have a slot there,
    and none for the variant that has held its slot for longest, until that is free for the request that waits. So
    slots are emptied one by one, and a variant waits for as many of them as there are variants before it. Emptying
    all at once, as if the queue was closed, made every request overdue from some load on: served in order of
    arrival, with few rows in a step (docs/decisions/0049-delta-scheduling.md). From half the bound on, a slot that
    falls free goes to the waiting variant that was served least recently, not to the one at the head.
    """

    bound_s: float = STARVATION_BOUND_S

    def order(self, waiting: Sequence[_W], served_s: Mapping[str, float], now_s: float) -> Sequence[_W]:
        oldest_s = now_s - waiting[0].arrived_s if waiting else 0.0
        if not _NEAR_FRACTION * self.bound_s <= oldest_s < self.bound_s:
            return waiting
        return sorted(waiting, key=lambda request: served_s.get(request.variant or "", float("-inf")))

    def may_be_passed(self, request: WaitingRequest, now_s: float) -> bool:
        return now_s - request.arrived_s < self.bound_s

    def _may_take(self, variant: str, worker: WorkerVariants, *, passes: bool) -> bool:
        return not passes or (variant in worker.in_flight and variant != worker.longest_held)


@dataclass(frozen=True, slots=True)
class LeastLoaded(_SkipTheLine):
    """Worker with fewest requests among those that have the variant, which grow in number with its requests.

    A further worker loads it where the best of them has more than ``factor * outstanding + margin`` requests,
    ``outstanding`` those of the further one: a load pays once the difference is worth its time. A slot that the
    request would take counts as up to ``slot_price`` requests, in proportion to the slots that are taken: it makes
    steps longer, and another variant may need it. Chosen by replays (docs/decisions/0044-variant-routing.md).
    """

    name: str = DEFAULT_VARIANT_POLICY
    factor: float = 2.0
    margin: float = 4.0
    slot_price: float = 4.0

    def _rank(self, variant: str, candidate: Candidate, loss: float) -> tuple[float, ...]:
        worker, requests = candidate.worker, float(candidate.outstanding)
        slot = 0.0
        if variant not in worker.in_flight:
            slot = self.slot_price * len(worker.in_flight) / worker.slots
        if variant in worker.loaded:
            return (requests + slot, 0, candidate.last_turn)
        return (self.factor * requests + self.margin + slot, 1, loss, candidate.last_turn)


@dataclass(frozen=True, slots=True)
class BusiestLoaded(_SkipTheLine):
    """Busiest worker that has the variant loaded and has room (Punica), else the one where loading costs least.

    Frees whole workers, at the cost of latency: the first takes all requests of a variant until it is full.
    """

    name: str = "busiest-loaded"

    def _rank(self, variant: str, candidate: Candidate, loss: float) -> tuple[float, ...]:
        if variant in candidate.worker.loaded:
            return (0, -candidate.outstanding, candidate.last_turn)
        return (1, loss, candidate.outstanding, candidate.last_turn)


@dataclass(frozen=True, slots=True)
class RoundRobin(_SkipTheLine):
    """Worker not used for longest, whatever it has loaded."""

    name: str = "round-robin"

    def _rank(self, variant: str, candidate: Candidate, loss: float) -> tuple[float, ...]:
        return (candidate.last_turn,)


def choose_prefetch(
    variant: str, workers: Sequence[WorkerVariants], now_s: float, wanted: Collection[str]
) -> Admission | None:
    """Return where to load ``variant``, whose request waits; None: it is loaded, or no place can be spared.

    Nothing is evicted for it that a waiting request wants as well.
    """
    best, best_loss = None, float("inf")
    for index, worker in enumerate(workers):
        if variant in worker.loaded:
            return None
        evicted = worker.evictions(variant, now_s, wanted, spare_wanted=True)
        if evicted is not None and (loss := worker.loss(evicted, now_s)) < best_loss:
            best, best_loss = Admission(index=index, evicted=evicted), loss
    return best


def admit_waiting(
    policy: VariantPolicy,
    waiting: Sequence[_W],
    served_s: Mapping[str, float],
    now_s: float,
    admit: Callable[[_W, bool], bool],
) -> None:
    """Offer all waiting requests a worker, each at most once.

    Requests of the base are offered one in their turn: they need no slot, and keep none from a variant that waits
    for one. A request of the base that finds no room ends the round, as no worker has any.

    Args:
        waiting: in order of arrival.
        admit: gives a request to a worker, if one can take it, and returns whether it did; also given whether one
            that may not be passed goes on waiting.
    """
    of_variants = [request for request in waiting if request.variant is not None]
    ordered = iter(policy.order(of_variants, served_s, now_s))
    stuck: set[str] = set()
    passes = False
    for at_place in waiting:
        request = at_place if at_place.variant is None else next(ordered)
        variant = request.variant  # read once: a queue may be long
        if variant is not None and (variant in stuck or (passes and policy.is_strict)):
            continue
        if admit(request, passes):
            continue
        if variant is None:
            return
        stuck.add(variant)
        passes = passes or not policy.may_be_passed(request, now_s)
        if passes and policy.is_strict and len(of_variants) == len(waiting):
            return


VARIANT_POLICIES: dict[str, Callable[[], VariantPolicy]] = {
    DEFAULT_VARIANT_POLICY: LeastLoaded,
    "busiest-loaded": BusiestLoaded,
    "round-robin": RoundRobin,
    "deltazip": DeltaZip,
    "fcfs": FirstComeFirstServed,
}


def make_variant_policy(name: str = DEFAULT_VARIANT_POLICY) -> VariantPolicy:
    """Return the policy of that name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in VARIANT_POLICIES:
        known = ", ".join(VARIANT_POLICIES)
        raise ConfigError(f"there is no variant_policy {name!r}; choose one of {known}")
    return VARIANT_POLICIES[name]()
