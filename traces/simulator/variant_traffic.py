"""Variants of one simulated deployment: their requests from arrival to worker, and what became of their loads.

A request is *warm* if its adapter was loaded at its worker when it arrived, and *cold* if a load of it there ended
later. It waits, for room, a slot or a load, from its arrival until its worker has both it and the adapter.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fingerprint.errors import ConfigError
from placement.variant_routing import VariantPolicy
from planner.pending_loads import LoadsAhead, PendingLoads, loads_ahead_in_queue
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.adapter_workers import AdapterServer
from traces.simulator.admission import SimulatedAdmission
from traces.simulator.requests import Requests
from traces.simulator.result import VariantFigures
from traces.simulator.variant_fleet import VariantFleet
from traces.simulator.workers import Server
from traces.summary import percentiles

__all__ = ["VariantTraffic"]


@dataclass(slots=True, eq=False)
class _Request:
    row: int
    variant: str | None  # None: the base
    arrived_s: float
    begun: bool = False  # once; it may begin again elsewhere, where its replica was drained


class VariantTraffic:
    """Requests of a deployment whose workers have adapter slots.

    Args:
        registered: variants that replicas load before they are asked for.
        choose: of replicas with room, that of a request of the base.
        submit: a request to its replica; returns whether that took it.
        wake: a replica that has something to do.
        admission: rejects late requests; None: none is late.
        reject: such a request, by its row.
        is_moved: whether a row has run elsewhere, so that it is never late.

    Raises:
        ConfigError: a policy that preempts.
    """

    def __init__(
        self,
        cost: AdapterCost,
        policy: VariantPolicy,
        requests: Requests,
        *,
        registered: Iterable[str],
        choose: Callable[[Sequence[Server]], int],
        submit: Callable[[Server, int, float], bool],
        wake: Callable[[Server, float], None],
        admission: SimulatedAdmission | None = None,
        reject: Callable[[int], None] = lambda row: None,
        is_moved: Callable[[int], bool] = lambda row: False,
    ) -> None:
        if policy.preempts:
            raise ConfigError(f"{policy.name} takes requests back from workers, which is not simulated; replay it")
        self._cost, self._requests = cost, requests
        self._choose, self._submit, self._wake = choose, submit, wake
        self._admission, self._reject, self._is_moved = admission, reject, is_moved
        judge = None if admission is None else self
        slots, places = cost.slots, cost.max_loaded
        self._fleet = VariantFleet[_Request, Server](policy, slots, places, self, registered, judge)
        self._pending: dict[Server, PendingLoads] = {}
        self._waiting: dict[int, _Request] = {}
        self._running: dict[int, _Request] = {}
        self._loaded_s: dict[tuple[Server, str], float] = {}
        self._asked: dict[str, None] = {}
        self._rows, self._waited_s, self._cold = array("q"), array("d"), array("b")  # as they began

    def arrive(self, row: int, variant: str | None, now_s: float) -> None:
        """Note a request that waits from now on."""
        self._waiting[row] = _Request(row, variant, now_s)
        if variant is not None:
            self._asked[variant] = None

    def forget(self, row: int) -> None:
        """Note that a waiting request has failed."""
        self._waiting.pop(row, None)

    def enter(self, server: Server) -> None:
        """Take in a replica with nothing loaded."""
        self._fleet.enter(server)
        self._pending[server] = PendingLoads()

    def remove(self, server: Server, rows: Iterable[int] = ()) -> None:
        """Note that a replica takes no more requests; ``rows`` of it wait again."""
        self._fleet.remove(server)
        self._pending.pop(server, None)
        for row in rows:
            if row in self._running:
                self._waiting[row] = self._running.pop(row)

    def serve(self, queue: Sequence[int], replicas: Sequence[Server], now_s: float) -> set[int]:
        """Send what can be sent of ``queue``, in order of arrival. Idle replicas load ahead.

        Returns:
            The rows that were sent or rejected.
        """
        sent = self._fleet.serve([self._waiting[row] for row in queue], replicas, now_s)
        if len(sent) == len(queue):
            self._fleet.preload(replicas, now_s)
        return {request.row for request in sent}

    def note(self, server: AdapterServer, now_s: float) -> bool:
        """Note what a run of a replica has brought about; return whether a request or a load has ended."""
        if not (server.loaded or server.ended):
            return False
        for variant in server.loaded:
            self._fleet.loaded(server, variant)
            self._loaded_s[server, variant] = now_s
            took_s = self._pending[server].end(variant, now_s) if server in self._pending else None
            if self._admission is not None and took_s is not None:
                self._admission.record_load(took_s)
        for row in server.released:
            self._began(self._running[row], now_s, cold=True)
            if self._admission is not None:
                self._admission.record_loaded(row, now_s)
        for row in server.ended:
            self._fleet.ended(server, self._running.pop(row))
        for noted in (server.loaded, server.released, server.ended):
            noted.clear()
        return True

    def choose_base(self, rooms: Sequence[Server]) -> int:
        """Return the replica of a request of the base (``variant_fleet.Sender``, as the next two)."""
        return self._choose(rooms)

    def load(self, worker: Server, variant: str, now_s: float) -> None:
        """Order a load, or take an adapter whose load takes no time for loaded."""
        if not self._cost.load_s:
            self._fleet.loaded(worker, variant)
            return
        assert isinstance(worker, AdapterServer)
        self._pending[worker].order(variant, max(now_s, worker.ready_s))
        worker.order(variant)
        self._wake(worker.thread or worker, now_s)

    def send(self, request: _Request, worker: Server, now_s: float) -> None:
        """Send a request, which its replica may refuse as too long for it."""
        assert isinstance(worker, AdapterServer)
        row, variant = request.row, request.variant
        del self._waiting[row]
        self._running[row] = request
        loads = self._loads_ahead(request, (worker,), now_s)
        is_held = variant is not None and worker.has_ordered(variant)
        if variant is not None:
            worker.tag(row, variant)
        if not self._submit(worker, row, now_s):
            worker.untag(row)
            self._fleet.ended(worker, self._running.pop(row))
            return
        if self._admission is not None:
            self._admission.record_start(row, worker, now_s, loads)
        if not is_held:
            loaded_s = -1.0 if variant is None else self._loaded_s.get((worker, variant), -1.0)
            self._began(request, now_s, cold=loaded_s > request.arrived_s)

    def passes_all(self, row: int, queue: Sequence[int]) -> bool:
        """Return whether a request is offered a worker before all of ``queue``: the base needs no slot."""
        is_base = self._waiting[row].variant is None
        return not queue or (is_base and all(self._waiting[one].variant is not None for one in queue))

    def may_wait(self, row: int, replicas: Sequence[Server], queue: Sequence[int], now_s: float) -> bool:
        """Return whether a request that has arrived keeps its limits behind ``queue``."""
        if self._admission is None:
            return True
        ready = [server for server in replicas if server.ready_s <= now_s]
        loads = self._loads_ahead(self._waiting[row], ready, now_s, queue) if ready else None
        return self._admission.may_wait(row, replicas, queue, now_s, loads)

    def is_late(self, request: _Request, worker: Server, now_s: float) -> bool:
        """Return whether a request would be late at a replica (``variant_fleet.Judge``, as the next)."""
        if self._admission is None or self._is_moved(request.row):
            return False
        loads = self._loads_ahead(request, (worker,), now_s)
        return not self._admission.may_start(request.row, worker, now_s, loads)

    def reject(self, request: _Request) -> None:
        """Reject a request that would be late everywhere."""
        self.forget(request.row)
        self._reject(request.row)

    def _loads_ahead(
        self, request: _Request, servers: Sequence[Server], now_s: float, queue: Sequence[int] = ()
    ) -> LoadsAhead | None:
        if request.variant is None or self._admission is None:
            return None
        workers = [(self._fleet.placed(server), self._pending[server]) for server in servers]
        before = (self._waiting[row].variant for row in queue)
        return loads_ahead_in_queue(request.variant, workers, before, now_s)

    def _began(self, request: _Request, now_s: float, *, cold: bool) -> None:
        if request.variant is not None and not request.begun:
            request.begun = True
            self._rows.append(request.row)
            self._waited_s.append(now_s - request.arrived_s)
            self._cold.append(cold)

    def figures(self) -> VariantFigures:
        """Return what became of all requests; TTFT is that of those that had a first token."""
        rows, cold = np.frombuffer(self._rows, np.int64), np.frombuffer(self._cold, np.int8) > 0
        first_s = np.frombuffer(self._requests.first_s)[rows] - np.frombuffer(self._requests.arrival_s)[rows]
        return VariantFigures(
            slots=self._cost.slots,
            max_loaded=self._cost.max_loaded,
            asked_for=len(self._asked),
            requests=len(rows),
            hits=self._fleet.hits,
            loads=self._fleet.loads,
            evictions=self._fleet.evictions,
            load_s=self._cost.load_s,
            waiting=percentiles(np.frombuffer(self._waited_s)),
            ttft_warm=percentiles(first_s[~cold]),
            ttft_cold=percentiles(first_s[cold]),
        )
