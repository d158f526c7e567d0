"""Which worker answers next: a first-come-first-served queue per deployment, then the least loaded ready worker.

Knows tickets and targets; sends nothing. A worker is full at ``max_outstanding`` requests, and the rest wait
here, so that whoever waits longest gets the first worker that has room, not the one that looked best on arrival.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import insort
from dataclasses import dataclass, field

from iserve.gateway.arrivals import Arrivals
from iserve.gateway.errors import ApiError
from iserve.routes import DeploymentDemand, Route, RouteTable, WorkerTarget

__all__ = ["DOWN_S", "READY_WAIT_S", "Deployment", "Dispatcher"]

READY_WAIT_S = 5.0  # how long a request waits for a worker that is being (re)started, before 503
DOWN_S = 0.25  # how long a worker that refused a connection is left alone
_TIMER_SLACK_S = 0.05  # by which a timer may be early


@dataclass(order=True, slots=True)
class _Waiting:
    ticket: int
    avoid: str = field(compare=False)
    turn: asyncio.Future[WorkerTarget] = field(compare=False)


class Deployment:
    """The live state behind one route: who works, who waits, who refused just now. Survives table swaps."""

    def __init__(self, route: Route, max_queue: int, max_wait_s: float) -> None:
        self.route = route
        self.max_queue = max_queue
        self.max_wait_s = max_wait_s
        self._outstanding: dict[str, int] = {}  # by URL: a worker started again elsewhere begins at none
        self._last_ticket: dict[str, int] = {}
        self._down_until_s: dict[str, float] = {}
        self._waiting: list[_Waiting] = []
        self._last_s = time.monotonic()  # a request came or went
        self._arrivals = Arrivals()

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
    def idle_s(self) -> float:
        """Since a request was last here; 0 while one is."""
        return 0.0 if self._waiting or self._outstanding else time.monotonic() - self._last_s

    @property
    def requests_per_s(self) -> float | None:
        """That came over the last 120 s; one that is tried again elsewhere came once."""
        return self._arrivals.per_s

    def update(self, route: Route, max_queue: int, max_wait_s: float) -> None:
        """Take the route of a new table. Requests already sent stay where they are."""
        self.route, self.max_queue, self.max_wait_s = route, max_queue, max_wait_s
        if route.refusal is not None:
            self._refuse_all(ApiError.cannot_start(route.name, route.refusal, route.retry_after_s))
        urls = {worker.url for worker in route.workers}
        for url in [u for u in self._last_ticket if u not in urls and u not in self._outstanding]:
            del self._last_ticket[url]
        for url in [u for u in self._down_until_s if u not in urls]:
            del self._down_until_s[url]
        self._serve()

    def close(self) -> None:
        """The deployment has left the table: whoever waits is told so."""
        self._refuse_all(ApiError.model_not_found(self.route.name))

    def _refuse_all(self, error: ApiError) -> None:
        for waiting in self._waiting:
            waiting.turn.set_exception(error)
        self._waiting.clear()

    def _count(self, avoid: str) -> None:
        """One more that is served: not one refused, which may come again at once, nor a second attempt."""
        if not avoid:
            self._arrivals.count()

    async def acquire(self, ticket: int, avoid: str = "") -> WorkerTarget:
        """A worker with room; the caller releases it. Waits its turn, in order of tickets.

        Args:
            avoid: URL of a worker that should not be taken while another has room.

        Raises:
            ApiError: 429 the queue is full; 503 no worker became ready within the route's ``ready_wait_s``, none
                can be started, or none had room within ``max_wait_s``; 404 the deployment was removed meanwhile.
        """
        self._last_s = time.monotonic()
        if not self._waiting:
            target = self._take(ticket, avoid)
            if target is not None:
                self._count(avoid)
                return target
        if self.route.refusal is not None and not self.num_ready:
            raise ApiError.cannot_start(self.route.name, self.route.refusal, self.route.retry_after_s)
        if not self.route.workers:
            raise ApiError.no_ready_worker(self.route.name, math.ceil(READY_WAIT_S))
        if len(self._waiting) >= self.max_queue:
            raise ApiError.queue_full(self.route.name, len(self._waiting))
        loop = asyncio.get_running_loop()
        waiting = _Waiting(ticket, avoid, loop.create_future())
        insort(self._waiting, waiting)
        self._count(avoid)
        self._serve()
        try:
            return await self._wait(waiting.turn, loop.time() + self.max_wait_s)
        except BaseException:
            if not waiting.turn.done():
                self._waiting.remove(waiting)
                self._last_s = time.monotonic()
            elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self.release(waiting.turn.result())  # given a worker in the very moment it left
            raise

    def release(self, target: WorkerTarget) -> None:
        """A request has left ``target``."""
        self._last_s = time.monotonic()
        left = self._outstanding[target.url] - 1
        if left:
            self._outstanding[target.url] = left
        else:
            del self._outstanding[target.url]
        self._serve()

    def mark_down(self, target: WorkerTarget) -> None:
        """``target`` refused a connection: leave it alone for ``DOWN_S``, whatever the table says."""
        loop = asyncio.get_running_loop()
        self._down_until_s[target.url] = loop.time() + DOWN_S
        loop.call_later(DOWN_S + 0.01, self._serve)

    async def _wait(self, turn: asyncio.Future[WorkerTarget], deadline_s: float) -> WorkerTarget:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            patience_s = READY_WAIT_S if self.route.ready_wait_s is None else self.route.ready_wait_s
            look_s = min(READY_WAIT_S, patience_s, deadline_s - loop.time())
            await asyncio.wait((turn,), timeout=max(0.0, look_s))
            if turn.done():
                return turn.result()
            is_late = loop.time() >= deadline_s
            if not self.num_ready and (is_late or loop.time() - began_s >= patience_s - _TIMER_SLACK_S):
                raise ApiError.no_ready_worker(self.route.name, math.ceil(READY_WAIT_S))
            if is_late:
                raise ApiError.no_turn(self.route.name, self.max_wait_s)

    def _is_ready(self, worker: WorkerTarget) -> bool:
        if not worker.ready:
            return False
        down_until_s = self._down_until_s.get(worker.url)
        return down_until_s is None or asyncio.get_running_loop().time() >= down_until_s

    def _take(self, ticket: int, avoid: str) -> WorkerTarget | None:
        best, best_rank = None, (True, math.inf, 0)
        for worker in self.route.workers:
            outstanding = self._outstanding.get(worker.url, 0)
            if outstanding >= worker.max_outstanding or not self._is_ready(worker):
                continue
            # Among equals, the one not used for longest.
            rank = (worker.url == avoid, outstanding, self._last_ticket.get(worker.url, -1))
            if best is None or rank < best_rank:
                best, best_rank = worker, rank
        if best is not None:
            self._outstanding[best.url] = self._outstanding.get(best.url, 0) + 1
            self._last_ticket[best.url] = ticket
        return best

    def _serve(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            target = self._take(first.ticket, first.avoid)
            if target is None:
                return
            del self._waiting[0]
            first.turn.set_result(target)


class Dispatcher:
    """All deployments of the table in force, by the name that clients use."""

    def __init__(self) -> None:
        self.deployments: dict[str, Deployment] = {}

    def demand(self) -> tuple[DeploymentDemand, ...]:
        """Who asks for what now."""
        return tuple(
            DeploymentDemand(
                name=name,
                waiting=d.num_waiting,
                outstanding=d.num_outstanding,
                idle_s=d.idle_s,
                requests_per_s=d.requests_per_s,
            )
            for name, d in self.deployments.items()
        )

    def update(self, table: RouteTable) -> None:
        """Follow a new table."""
        limits = table.limits
        new: dict[str, Deployment] = {}
        for route in table.routes:
            deployment = self.deployments.get(route.name)
            if deployment is None:
                deployment = Deployment(route, limits.max_queue, limits.upstream_timeout_s)
            else:
                deployment.update(route, limits.max_queue, limits.upstream_timeout_s)
            new[route.name] = deployment
        for name in self.deployments.keys() - new.keys():
            self.deployments[name].close()
        self.deployments = new
