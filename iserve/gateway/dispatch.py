"""Dispatch: a first-come-first-served queue per deployment, then the least loaded ready worker.

Where a deployment rejects late requests, a request goes to a worker where it keeps its limits, if there is
one, and is rejected if there is none: when it arrives, or when its turn is reached (``planner.admission``).

Requests for LoRA variants wait in the same queue; ``variant_residency`` chooses among the workers that have room.
A variant that waits for an adapter slot keeps no request of the base waiting.

Knows tickets and targets; sends nothing. A worker is full at ``max_outstanding`` requests, and the rest wait
here, so that the longest waiting request gets the first worker that has room, not the one that looked best on
arrival.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from iserve.gateway.admission import GatewayAdmission
from iserve.gateway.errors import ApiError
from iserve.gateway.rate_window import RateWindow, VariantCounts
from iserve.gateway.variant_residency import Room, VariantRequest, VariantResidency
from iserve.route_table import Route, VariantDemand, WorkerTarget
from planner.admission import InFlightRequest, Rejection
from planner.pending_loads import LoadsAhead

__all__ = ["DOWN_S", "READY_WAIT_S", "Deployment", "NewResidency"]

READY_WAIT_S = 5.0  # how long a request waits for a worker that is being (re)started, before 503
DOWN_S = 0.25  # how long a worker that refused a connection is left alone
_TIMER_SLACK_S = 0.05  # by which a timer may be early


@dataclass(order=True, slots=True)
class _Waiting:
    ticket: int
    avoid: str = field(compare=False)
    request: InFlightRequest | None = field(compare=False)
    use: VariantRequest | None = field(compare=False)
    turn: asyncio.Future[WorkerTarget] = field(compare=False)

    @property
    def variant(self) -> str | None:
        return None if self.use is None else self.use.variant

    @property
    def arrived_s(self) -> float:
        return 0.0 if self.use is None else self.use.arrived_s


class NewResidency(Protocol):
    """Maker of the residency of a deployment's variants (``VariantResidency``)."""

    def __call__(
        self,
        route: Route,
        changed: Callable[[], None],
        *,
        busy: Collection[str],
        record_load: Callable[[float], None],
    ) -> VariantResidency: ...


class Deployment:
    """Live state behind one route: busy workers, waiting requests, recent refusals. Survives table swaps.

    Args:
        new_residency: makes ``variants`` once the route has some; None: the base alone is served.
    """

    def __init__(
        self, route: Route, max_queue: int, max_wait_s: float, new_residency: NewResidency | None = None
    ) -> None:
        self.route = route
        self.max_queue = max_queue
        self.max_wait_s = max_wait_s
        self._outstanding: dict[str, int] = {}  # by URL: a worker started again elsewhere begins at none
        self._last_ticket: dict[str, int] = {}
        self._down_until_s: dict[str, float] = {}
        self._waiting: list[_Waiting] = []
        self._last_s = time.monotonic()  # a request arrived or ended
        self._rate_window, self._variant_counts = RateWindow(), VariantCounts()
        self.admission = GatewayAdmission.of(route)
        self._unready_since_s = None if self.num_ready else -math.inf  # on the event loop's clock; None: one is
        self._new_residency = new_residency
        self.variants: VariantResidency | None = None
        self._update_variants()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_outstanding(self) -> int:
        return sum(self._outstanding.values())

    @property
    def num_ready(self) -> int:
        return sum(1 for worker in self.route.workers if self._is_ready(worker))

    @property
    def num_pending_loads(self) -> int:
        return 0 if self.variants is None else self.variants.num_pending_loads

    @property
    def idle_s(self) -> float:
        """Since a request was last here; 0 while one is."""
        return 0.0 if self._waiting or self._outstanding else time.monotonic() - self._last_s

    @property
    def requests_per_s(self) -> float | None:
        """Requests per second over the last 120 s; a request that is tried again elsewhere is counted once."""
        return self._rate_window.per_s

    def update(self, route: Route, max_queue: int, max_wait_s: float) -> None:
        """Take the route of a new table. Requests already sent stay where they are."""
        self.route, self.max_queue, self.max_wait_s = route, max_queue, max_wait_s
        self.admission = GatewayAdmission.of(route, self.admission)
        if route.refusal is not None:
            why, retry_after_s = route.refusal, route.retry_after_s
            self._refuse_all(lambda model: ApiError.cannot_start(model, why, retry_after_s))
        urls = {worker.url for worker in route.workers}
        for url in [u for u in self._last_ticket if u not in urls and u not in self._outstanding]:
            del self._last_ticket[url]
        for url in [u for u in self._down_until_s if u not in urls]:
            del self._down_until_s[url]
        self._update_variants()
        self._serve()

    def _update_variants(self) -> None:
        if self.variants is not None:
            self.variants.update(self.route)
        elif self.route.variants and self._new_residency is not None:
            self.variants = self._new_residency(
                self.route, self._serve, busy=self._outstanding.keys(), record_load=self._record_load
            )
        for waiting in self._waiting:
            if waiting.use is not None and self.variants is not None:
                try:
                    self.variants.resolve(waiting.use)
                except ApiError as error:
                    waiting.turn.set_exception(error)
        self._waiting = [waiting for waiting in self._waiting if not waiting.turn.done()]

    def new_request(
        self, body_bytes: int, longest_answer: int | None, *, is_streamed: bool
    ) -> InFlightRequest | None:
        """Return what is known of a request that has arrived; None: no request is rejected here for being late."""
        if self.admission is None:
            return None
        return self.admission.new_request(body_bytes, longest_answer, is_streamed=is_streamed)

    def close(self) -> None:
        """Refuse all waiting requests: the deployment has left the table."""
        self._refuse_all(ApiError.model_not_found)
        if self.variants is not None:
            self.variants.update(replace(self.route, workers=(), variants=()))
            self.variants.close()

    def _model(self, use: VariantRequest | None) -> str:
        """Return what a request names as its model."""
        return self.route.name if use is None else use.route.name

    def _refuse_all(self, error_of: Callable[[str], ApiError]) -> None:
        for waiting in self._waiting:
            waiting.turn.set_exception(error_of(self._model(waiting.use)))
        self._waiting.clear()

    @property
    def variant_demand(self) -> VariantDemand:
        return VariantDemand(
            deployment=self.route.name,
            requests_per_s=self.requests_per_s,
            requests=self._rate_window.requests,
            of_variants=self._variant_counts.requests,
            places=() if self.variants is None else self.variants.places,
            changes=() if self.variants is None else tuple(self.variants.changes),
        )

    def _count(self, avoid: str, use: VariantRequest | None) -> None:
        """Count one more request that is served: not a refused one, which may be repeated at once, nor a second
        attempt.
        """
        if not avoid:
            self._rate_window.count()
            if use is not None:
                self._variant_counts.count(use.route.name)

    async def acquire(
        self,
        ticket: int,
        avoid: str = "",
        request: InFlightRequest | None = None,
        use: VariantRequest | None = None,
    ) -> WorkerTarget:
        """Return a worker with room; the caller releases it. Waits its turn, in order of tickets.

        Args:
            avoid: URL of a worker that should not be taken while another has room.
            request: of :meth:`new_request`.
            use: of a variant, whose engine name at the worker is then that of ``use.admitted``.

        Raises:
            ApiError: 429 the queue is full; 503 it would be late, no worker became ready within the route's
                ``ready_wait_s``, none can be started, or none had room within ``max_wait_s``; 404 the deployment
                was removed meanwhile.
        """
        self._last_s = time.monotonic()
        if use is not None and self.variants is not None:
            self.variants.resolve(use)
        if not self._waiting or (use is None and all(waiting.use is not None for waiting in self._waiting)):
            target = self._take(ticket, avoid, request, use)
            if isinstance(target, Rejection):
                raise ApiError.would_be_late(self._model(use), target)
            if target is not None:
                self._count(avoid, use)
                return target
        waiting = self._enqueue(ticket, avoid, request, use)
        self._count(avoid, use)
        return await self._turn_of(waiting)

    def _enqueue(
        self, ticket: int, avoid: str, request: InFlightRequest | None, use: VariantRequest | None
    ) -> _Waiting:
        """Put a request into the queue, and offer those that wait a worker.

        A full queue takes a request of a variant in flight, which may have a worker at once.

        Raises:
            ApiError: as :meth:`acquire`, without waiting.
        """
        model, variants, is_full = self._model(use), self.variants, len(self._waiting) >= self.max_queue
        if self.route.refusal is not None and not self.num_ready:
            raise ApiError.cannot_start(model, self.route.refusal, self.route.retry_after_s)
        if not self.route.workers:
            raise ApiError.no_ready_worker(model, math.ceil(READY_WAIT_S))
        has_slot = use is not None and variants is not None and variants.has_slot(use)
        if is_full and not has_slot:
            raise ApiError.queue_full(model, len(self._waiting))
        self._check_queue(ticket, avoid, request, use, model)
        waiting = _Waiting(ticket, avoid, request, use, asyncio.get_running_loop().create_future())
        insort(self._waiting, waiting)
        if use is not None and variants is not None and self._waiting[-1] is waiting and not has_slot:
            variants.wait(use)  # the rest waits for what it waited for before
        else:
            self._serve(waiting if is_full else None)
        if is_full and use is not None and variants is not None and not waiting.turn.done():
            if len(self._waiting) > self.max_queue:
                self._waiting.remove(waiting)  # it needed to wait, which a request of a variant in flight does not
                raise ApiError.queue_full(model, len(self._waiting))
            variants.wait(use)  # the round has let another go
        return waiting

    async def _turn_of(self, waiting: _Waiting) -> WorkerTarget:
        """Return the worker that a waiting request is given; one that leaves meanwhile leaves nothing behind."""
        deadline_s = asyncio.get_running_loop().time() + self.max_wait_s
        try:
            return await self._wait(waiting.turn, self._model(waiting.use), deadline_s)
        except BaseException:
            if not waiting.turn.done():
                self._waiting.remove(waiting)
                self._last_s = time.monotonic()
                self._serve()  # a variant's that has waited for long keeps those behind it waiting
            elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
                # Given a worker in the very moment it left.
                self.release(waiting.turn.result(), waiting.request, waiting.use)
            raise

    def record_loaded(self, target: WorkerTarget, request: InFlightRequest | None) -> None:
        """Note that ``target`` has the variant of a request that was given it."""
        if self.admission is not None and request is not None:
            self.admission.record_loaded(request, target.url)

    def _record_load(self, took_s: float) -> None:
        if self.admission is not None:
            self.admission.record_load(took_s)

    def release(
        self, target: WorkerTarget, request: InFlightRequest | None = None, use: VariantRequest | None = None
    ) -> None:
        """Note that a request has left ``target``."""
        self._last_s = time.monotonic()
        if self.admission is not None and request is not None:
            self.admission.record_leave(request, target.url)
        had_room = self._has_room(target.url)
        left = self._outstanding[target.url] - 1
        if left:
            self._outstanding[target.url] = left
        else:
            del self._outstanding[target.url]
        if use is not None and self.variants is not None:
            self.variants.release(use, target.url)
        elif had_room and self.admission is None:
            self._preload(left)
            return  # what waits, waits for an adapter slot: the queue, which may be long, is as it was
        self._serve()
        self._preload(left)

    def _preload(self, left: int) -> None:
        """Let a worker that fell idle, with ``left`` requests, load variants ahead."""
        if not left and not self._waiting and self.variants is not None:
            self.variants.preload()

    def _has_room(self, url: str) -> bool:
        """Return whether the table has the worker and it could be sent one more request."""
        outstanding = self._outstanding.get(url, 0)
        return any(one.url == url and outstanding < one.max_outstanding for one in self.route.workers)

    def mark_down(self, target: WorkerTarget) -> None:
        """Leave ``target``, which refused a connection, alone for ``DOWN_S``, whatever the table says."""
        loop = asyncio.get_running_loop()
        self._down_until_s[target.url] = loop.time() + DOWN_S
        if self.variants is not None:
            self.variants.forget(target.url)
        self._note_readiness()
        loop.call_later(DOWN_S + 0.01, self._serve)

    async def _wait(self, turn: asyncio.Future[WorkerTarget], model: str, deadline_s: float) -> WorkerTarget:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            patience_s = READY_WAIT_S if self.route.ready_wait_s is None else self.route.ready_wait_s
            look_s = min(READY_WAIT_S, patience_s - self._unready_s(began_s), deadline_s - loop.time())
            await asyncio.wait((turn,), timeout=max(0.0, look_s))
            if turn.done():
                return turn.result()
            is_late = loop.time() >= deadline_s
            if not self.num_ready and (is_late or self._unready_s(began_s) >= patience_s - _TIMER_SLACK_S):
                raise ApiError.no_ready_worker(model, math.ceil(READY_WAIT_S))
            if is_late:
                raise ApiError.no_turn(model, self.max_wait_s)

    def _unready_s(self, began_s: float) -> float:
        """Return for how long no worker has been ready, from ``began_s`` on; 0: one is."""
        if self._unready_since_s is None:
            return 0.0
        return asyncio.get_running_loop().time() - max(began_s, self._unready_since_s)

    def _is_ready(self, worker: WorkerTarget) -> bool:
        if not worker.ready:
            return False
        down_until_s = self._down_until_s.get(worker.url)
        return down_until_s is None or asyncio.get_running_loop().time() >= down_until_s

    def _check_queue(
        self, ticket: int, avoid: str, request: InFlightRequest | None, use: VariantRequest | None, model: str
    ) -> None:
        """Judge a request for which no worker has room. Raises ApiError: it would be late.

        While no worker serves it is not late: a request then starts a worker, and when that will be ready is
        unknown.
        """
        if self.admission is None or request is None or avoid:
            return
        urls = [worker.url for worker in self.route.workers if self._is_ready(worker)]
        if not urls:
            return
        waiting = [one for one in self._waiting if one.ticket < ticket and one.request is not None]
        before = (one.request for one in waiting if one.request is not None)
        loads = self._loads_ahead(use, urls, (one.variant for one in waiting))
        rejection = self.admission.check_queue(request, urls, before, loads)
        if rejection is not None:
            raise ApiError.would_be_late(model, rejection)

    def _take(
        self, ticket: int, avoid: str, request: InFlightRequest | None, use: VariantRequest | None = None
    ) -> WorkerTarget | Rejection | None:
        """Take the best that has room, None: none has; or say why it would be late even there."""
        if use is not None:
            return self._take_for_variant(ticket, avoid, request, use)
        best, best_rank, best_rejection = None, (True, True, math.inf, 0), None
        for worker in self.route.workers:
            outstanding = self._outstanding.get(worker.url, 0)
            if outstanding >= worker.max_outstanding or not self._is_ready(worker):
                continue
            rejection = self._check_start(worker, avoid, request)
            # Among equals, the one not used for longest.
            rank = (worker.url == avoid, rejection is not None, outstanding, self._last_ticket.get(worker.url, -1))
            if best is None or rank < best_rank:
                best, best_rank, best_rejection = worker, rank, rejection
        if best_rejection is not None:
            return best_rejection
        if best is not None:
            self._begin(best, ticket, request)
        return best

    def _take_for_variant(
        self, ticket: int, avoid: str, request: InFlightRequest | None, use: VariantRequest
    ) -> WorkerTarget | Rejection | None:
        """Take a worker as ``_take`` does; ``variants`` chooses among those that have room."""
        variants = self.variants
        if variants is None or not variants.has_slot(use):
            return None
        rooms: list[Room] = []
        late: list[tuple[Room, Rejection]] = []
        for worker in self.route.workers:
            outstanding = self._outstanding.get(worker.url, 0)
            if outstanding >= worker.max_outstanding or not self._is_ready(worker):
                continue
            room = Room(worker, outstanding, self._last_ticket.get(worker.url, -1), worker.url == avoid)
            rejection = self._check_start(worker, avoid, request, use)
            if rejection is None:
                rooms.append(room)
            else:
                late.append((room, rejection))
        admission = variants.choose(use, rooms)
        if admission is None:
            too_late = variants.choose(use, [room for room, _ in late])
            return None if too_late is None else late[too_late.index][1]
        target = rooms[admission.index].target
        self._begin(target, ticket, request, use)
        variants.admit(use, target, admission)
        return target

    def _check_start(
        self,
        worker: WorkerTarget,
        avoid: str,
        request: InFlightRequest | None,
        use: VariantRequest | None = None,
    ) -> Rejection | None:
        if self.admission is None or request is None or avoid:
            return None
        return self.admission.check_start(request, worker.url, self._loads_ahead(use, (worker.url,)))

    def _loads_ahead(
        self, use: VariantRequest | None, urls: Sequence[str], before: Iterable[str | None] = ()
    ) -> LoadsAhead | None:
        """Return ``VariantResidency.loads_ahead``; None: the request is for the base."""
        return None if use is None or self.variants is None else self.variants.loads_ahead(use, urls, before)

    def _begin(
        self,
        worker: WorkerTarget,
        ticket: int,
        request: InFlightRequest | None,
        use: VariantRequest | None = None,
    ) -> None:
        if self.admission is not None and request is not None:
            self.admission.record_start(request, worker.url, self._loads_ahead(use, (worker.url,)))
        self._outstanding[worker.url] = self._outstanding.get(worker.url, 0) + 1
        self._last_ticket[worker.url] = ticket

    def _serve(self, newest: _Waiting | None = None) -> None:
        """Offer those that wait a worker; ``newest`` is refused otherwise, so that nothing is loaded for it."""
        self._note_readiness()
        of_variants = any(waiting.use is not None for waiting in self._waiting)
        if self.variants is not None and (of_variants or self.variants.is_waited_for):
            self.variants.admit_waiting(tuple(self._waiting), self._admit, newest)
            self._waiting = [waiting for waiting in self._waiting if not waiting.turn.done()]
            return
        while self._waiting and self._admit(self._waiting[0]):
            del self._waiting[0]

    def _admit(self, waiting: _Waiting) -> bool:
        """Give it a worker, or say that it would be late; False: it goes on waiting."""
        target = self._take(waiting.ticket, waiting.avoid, waiting.request, waiting.use)
        if target is None:
            return False
        if isinstance(target, Rejection):
            waiting.turn.set_exception(ApiError.would_be_late(self._model(waiting.use), target))
        else:
            waiting.turn.set_result(target)
        return True

    def _note_readiness(self) -> None:
        """Note since when no worker is ready: time in which none could serve makes no request late."""
        if not self.num_ready:
            if self._unready_since_s is None:
                self._unready_since_s = asyncio.get_running_loop().time()
            return
        if self.admission is not None and self._unready_since_s is not None:
            for waiting in self._waiting:
                if waiting.request is not None:
                    self.admission.restart_wait(waiting.request)
        self._unready_since_s = None
