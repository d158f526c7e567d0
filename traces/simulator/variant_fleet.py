"""Workers with adapter slots as their gateway keeps them: which request goes where, what is loaded and unloaded.

The one core of policy of a replay (``variants``) and of the simulator (``variant_dispatch``): both offer it the
requests that wait, and tell it when one has left a worker and when a load has ended. What time passes meanwhile is
for them. The choices are those of ``placement.variant_routing``, as the gateway makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from placement.variant_preload import choose_preloads, further_preloads
from placement.variant_routing import (
    BACKGROUND_LOADS,
    Admission,
    Candidate,
    VariantPolicy,
    WaitingRequest,
    WorkerVariants,
    admit_waiting,
    choose_prefetch,
)

__all__ = ["FleetWorker", "Judge", "Sender", "VariantFleet"]


class FleetWorker(Protocol):
    """Worker to which requests are sent."""

    @property
    def outstanding(self) -> int: ...  # requests that it has, running and waiting
    @property
    def max_outstanding(self) -> int: ...
    @property
    def last_turn(self) -> int: ...  # of the request that it was given last


_Request = TypeVar("_Request", bound=WaitingRequest)
_Worker = TypeVar("_Worker", bound=FleetWorker)
_SentRequest = TypeVar("_SentRequest", bound=WaitingRequest, contravariant=True)
_SentWorker = TypeVar("_SentWorker", bound=FleetWorker, contravariant=True)


class Sender(Protocol[_SentRequest, _SentWorker]):
    """Hands that carry out what the fleet decides."""

    def choose_base(self, rooms: Sequence[_SentWorker]) -> int:
        """Return the index of the worker, of those with room, that takes a request of the base."""
        ...

    def load(self, worker: _SentWorker, variant: str, now_s: float) -> None:
        """Begin a load; its end is reported with ``VariantFleet.loaded``."""
        ...

    def send(self, request: _SentRequest, worker: _SentWorker, now_s: float) -> None:
        """Give a request to a worker, which begins it once its variant is loaded there."""
        ...


class Judge(Protocol[_SentRequest, _SentWorker]):
    """Admission control (``planner.admission``)."""

    def is_late(self, request: _SentRequest, worker: _SentWorker, now_s: float) -> bool:
        """Return whether a request that is sent to the worker now would be late."""
        ...

    def reject(self, request: _SentRequest) -> None:
        """Reject a request that would be late at every worker that can take it."""
        ...


@dataclass(slots=True)
class _Place(Generic[_Request]):
    state: WorkerVariants
    parents: dict[str, _Request] = field(default_factory=dict)  # by variant; that of ``WorkerVariants.led``
    followers: dict[str, list[_Request]] = field(default_factory=dict)  # by variant, where they are preempted
    loading: dict[str, int] = field(default_factory=dict)  # variant -> its loads under way that count
    abandoned: dict[str, int] = field(default_factory=dict)  # ... that were evicted before they ended
    ahead: str | None = None  # being loaded before it is asked for


class VariantFleet(Generic[_Request, _Worker]):
    """Adapters at the workers of one deployment, all alike.

    Args:
        slots: distinct variants in flight at a worker at most.
        max_loaded: places of loaded variants at a worker.
        registered: variants that idle workers load before they are asked for.
        judge: rejects late requests; None: none is late.
        reload_s: returns the time of a load of a variant, by which it is kept.
        share: returns the share of a place that a variant takes.

    Raises:
        ConfigError: fewer places than slots, or none.
    """

    def __init__(
        self,
        policy: VariantPolicy,
        slots: int,
        max_loaded: int,
        sender: Sender[_Request, _Worker],
        registered: Iterable[str] = (),
        judge: Judge[_Request, _Worker] | None = None,
        reload_s: Callable[[str], float] = lambda variant: 1.0,
        share: Callable[[str], float] = lambda variant: 1.0,
    ) -> None:
        WorkerVariants(slots, max_loaded)  # checked
        self._reload_s, self._share = reload_s, share
        self._judge = judge
        self._registered = tuple(registered)
        self._policy, self._slots, self._max_loaded, self._sender = policy, slots, max_loaded, sender
        self._places: dict[_Worker, _Place[_Request]] = {}
        self._served_s: dict[str, float] = {}
        self._wanted = _Wanted(())
        self.hits = self.loads = self.evictions = 0

    def enter(self, worker: _Worker) -> None:
        """Take in a worker, which has nothing loaded."""
        variants = WorkerVariants(self._slots, self._max_loaded, self._reload_s, self._share)
        self._places[worker] = _Place[_Request](variants)

    def remove(self, worker: _Worker) -> None:
        """Forget a worker and all that is in flight there."""
        self._places.pop(worker, None)

    def ended(self, worker: _Worker, request: _Request) -> Sequence[_Request]:
        """Note that a request has left its worker.

        Returns:
            Those that a policy which preempts takes back there now, in the order in which they were sent. They
            have left as well.
        """
        place, variant = self._places.get(worker), request.variant
        if place is None or variant is None:
            return ()
        is_parent = place.parents.get(variant) is request
        place.state.leave(variant, is_parent=is_parent)
        followers = place.followers.get(variant, [])
        if not is_parent:
            if request in followers:
                followers.remove(request)
            return ()
        del place.parents[variant]
        for _ in place.followers.pop(variant, ()):
            place.state.leave(variant)
        return followers

    def placed(self, worker: _Worker) -> Collection[str]:
        """Return the variants that are loaded or being loaded at a worker."""
        return self._places[worker].state.loaded

    def loaded(self, worker: _Worker, variant: str) -> None:
        """Note that a load has ended; the loads of one variant at a worker end in their order."""
        place = self._places.get(worker)
        if place is not None:
            _take_one(place.abandoned if variant in place.abandoned else place.loading, variant)
            place.ahead = None if variant == place.ahead else place.ahead

    def serve(self, waiting: Sequence[_Request], workers: Sequence[_Worker], now_s: float) -> dict[_Request, None]:
        """Offer the waiting requests a worker, and load ahead for those that go on waiting.

        Args:
            waiting: in order of arrival.
            workers: that take requests, all of which have entered.

        Returns:
            Those that were sent or rejected.
        """
        sent: dict[_Request, None] = {}
        if not waiting:
            return sent
        self._wanted = _Wanted(waiting)
        runnable = self._runnable(workers)

        def admit(request: _Request, passes: bool) -> bool:
            nonlocal runnable
            if runnable is not None and (variant := request.variant) is not None and variant not in runnable:
                return False  # as most of a long queue while all slots are taken
            if is_sent := self._admit(request, workers, now_s, passes):
                sent[request] = None
                runnable = self._runnable(workers)
            return is_sent

        if any(worker.outstanding < worker.max_outstanding for worker in workers):
            admit_waiting(self._policy, waiting, self._served_s, now_s, admit)
        if sent:
            self._wanted = _Wanted(waiting, sent)
        self._prefetch(workers, now_s)
        return sent

    def preload(self, workers: Sequence[_Worker], now_s: float) -> None:
        """Let idle workers load registered variants ahead; called while no request waits."""
        if not self._registered:
            return
        idle = [one for one in workers if not (one.outstanding or self._places[one].loading)]
        states = [self._places[worker].state for worker in idle]
        places = [self._places[worker] for worker in workers]
        loaded = (place.state.loaded for place in places)
        most = further_preloads(len(places), sum(place.ahead is not None for place in places))
        for index, variant in choose_preloads(states, loaded, self._registered, self._served_s, most):
            self._places[idle[index]].ahead = variant
            self._places[idle[index]].state.preload(variant, self._served_s.get(variant, float("-inf")))
            self._begin(idle[index], variant, now_s)

    def _runnable(self, workers: Sequence[_Worker]) -> frozenset[str] | None:
        """Return the variants that need no further slot, where none is free; None: a worker has a free one."""
        states = [self._places[worker].state for worker in workers]
        if any(len(state.in_flight) < state.slots for state in states):
            return None
        return frozenset().union(*(state.in_flight for state in states))

    def _admit(self, request: _Request, workers: Sequence[_Worker], now_s: float, passes: bool) -> bool:
        rooms = [worker for worker in workers if worker.outstanding < worker.max_outstanding]
        if not rooms:
            return False
        variant, judge = request.variant, self._judge
        timely = rooms if judge is None else [one for one in rooms if not judge.is_late(request, one, now_s)]
        if variant is None:
            if judge is not None and not timely:
                judge.reject(request)
            else:
                self._sender.send(request, timely[self._sender.choose_base(timely)], now_s)
            return True
        admission = self._choose(variant, timely, now_s, passes)
        if admission is None:
            if judge is None or self._choose(variant, rooms, now_s, passes) is None:
                return False
            judge.reject(request)
            return True
        worker = timely[admission.index]
        place = self._places[worker]
        state = place.state
        if state.admit(variant, now_s, passes=passes):
            place.parents[variant] = request
        elif passes and self._policy.preempts:
            place.followers.setdefault(variant, []).append(request)
        self._served_s[variant] = now_s
        if variant in state.loaded:
            self.hits += 1
        else:
            self._load(worker, variant, admission.evicted, now_s)
        self._sender.send(request, worker, now_s)
        return True

    def _choose(self, variant: str, rooms: Sequence[_Worker], now_s: float, passes: bool) -> Admission | None:
        candidates = [
            Candidate(
                worker=self._places[worker].state, outstanding=worker.outstanding, last_turn=worker.last_turn
            )
            for worker in rooms
        ]
        return self._policy.choose(variant, candidates, now_s, self._wanted, passes=passes)

    def _prefetch(self, workers: Sequence[_Worker], now_s: float) -> None:
        places = {worker: self._places[worker] for worker in workers}
        if all(len(place.loading) >= BACKGROUND_LOADS for place in places.values()):
            return
        for variant in self._wanted:
            free = [worker for worker, place in places.items() if len(place.loading) < BACKGROUND_LOADS]
            if not free:
                return
            if any(variant in place.state.loaded for place in places.values()):
                continue
            found = choose_prefetch(variant, [places[worker].state for worker in free], now_s, self._wanted)
            if found is None:  # nor is there a place for any after it
                return
            self._load(free[found.index], variant, found.evicted, now_s)

    def _load(self, worker: _Worker, variant: str, evicted: Sequence[str], now_s: float) -> None:
        place = self._places[worker]
        self.evictions += len(evicted)
        for name in evicted:
            if name in place.loading:  # of a variant that waits no more: it ends all the same
                _take_one(place.loading, name)
                place.abandoned[name] = place.abandoned.get(name, 0) + 1
        place.state.load(variant, now_s, evicted)
        self._begin(worker, variant, now_s)

    def _begin(self, worker: _Worker, variant: str, now_s: float) -> None:
        place = self._places[worker]
        self.loads += 1
        place.loading[variant] = place.loading.get(variant, 0) + 1
        self._sender.load(worker, variant, now_s)


def _take_one(counts: dict[str, int], name: str) -> None:
    left = counts.get(name, 0) - 1
    if left > 0:
        counts[name] = left
    else:
        counts.pop(name, None)


class _Wanted(Collection[str]):
    """Variants of waiting requests, in order; found only when asked for, as a queue may be long."""

    __slots__ = ("_found", "_sent", "_waiting")

    def __init__(self, waiting: Sequence[WaitingRequest], sent: Collection[object] = ()) -> None:
        self._waiting, self._sent = waiting, sent
        self._found: dict[str, None] | None = None

    def _all(self) -> dict[str, None]:
        if self._found is None:
            sent = self._sent
            self._found = dict.fromkeys(
                variant for one in self._waiting if (variant := one.variant) is not None and one not in sent
            )
        return self._found

    def __contains__(self, variant: object) -> bool:
        return variant in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
