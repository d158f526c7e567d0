"""Admission control of iServe's gateway in the simulated world (``Scenario.rejects_by_forecast``).

The controller is the gateway's own (``planner.admission``), given what a gateway would see: when a request arrived
and was sent on, its lengths, and afterwards when its first and last tokens arrived. Progress of a running one is
judged by the time since, as the gateway does for answers that are not streamed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from planner.admission import AdmissionController, AdmissionPolicy, InFlightRequest
from planner.pending_loads import LoadsAhead
from traces.simulator.requests import Requests
from traces.simulator.workers import Server

__all__ = ["SimulatedAdmission"]


class SimulatedAdmission:
    """The requests of one deployment that its replicas have, and its admission controller."""

    def __init__(self, policy: AdmissionPolicy, requests: Requests) -> None:
        self._controller, self._requests = AdmissionController(policy), requests
        self._in_flight: dict[int, InFlightRequest] = {}  # of rows that wait or run
        self._at: dict[Server, dict[int, InFlightRequest]] = {}
        self._where: dict[int, Server] = {}

    def may_start(self, row: int, server: Server, now_s: float, loads: LoadsAhead | None = None) -> bool:
        """Return whether the request keeps its limits there; one that starts a worker is not judged late.

        Args:
            loads: what it waits for there.
        """
        request = self._request(row)
        if server.ready_s > now_s:
            request.arrived_s = max(request.arrived_s, server.ready_s)
            return True
        return self._controller.check_start(request, self._running(server), now_s, loads) is None

    def may_wait(
        self,
        row: int,
        servers: Sequence[Server],
        queue: Iterable[int],
        now_s: float,
        loads: LoadsAhead | None = None,
    ) -> bool:
        """Return whether the request keeps its limits behind ``queue``; while none serves it is not judged, and
        its wait begins when one does.
        """
        ready = [self._running(server) for server in servers if server.ready_s <= now_s]
        if not ready:
            self.restart_waits((row,), min(server.ready_s for server in servers))
            return True
        before = [self._request(other) for other in queue]
        return self._controller.check_queue(self._request(row), ready, before, now_s, loads) is None

    def restart_waits(self, rows: Iterable[int], ready_s: float) -> None:
        """Count the waits of requests, which no worker could serve so far, from ``ready_s`` on."""
        for row in rows:
            request = self._request(row)
            request.arrived_s = max(request.arrived_s, ready_s)

    def record_start(self, row: int, server: Server, now_s: float, loads: LoadsAhead | None = None) -> None:
        request = self._request(row)
        self._at.get(self._where.get(row, server), {}).pop(row, None)  # where it was before it was moved
        self._controller.record_start(request, self._running(server), max(now_s, server.ready_s), loads)
        self._at.setdefault(server, {})[row] = request
        self._where[row] = server

    def record_loaded(self, row: int, now_s: float) -> None:
        """Note that the worker of a request has its variant."""
        request, server = self._request(row), self._where[row]
        rest = [one for one in self._running(server) if one is not request]
        self._controller.record_loaded(request, rest, now_s)

    def record_load(self, took_s: float) -> None:
        """Note the time of one load, for which any number of requests have waited."""
        self._controller.record_load(took_s)

    def record_rejection(self, row: int) -> None:
        self._in_flight.pop(row, None)

    def _request(self, row: int) -> InFlightRequest:
        request = self._in_flight.get(row)
        if request is None:
            input_tokens, output_tokens = self._requests.input_tokens[row], self._requests.output_tokens[row]
            arrived_s = self._requests.arrival_s[row]
            request = self._controller.new_request(arrived_s, input_tokens, output_tokens, is_streamed=False)
            self._in_flight[row] = request
        return request

    def _running(self, server: Server) -> Collection[InFlightRequest]:
        """Return what runs there now; what has ended is learned from."""
        at, requests = self._at.get(server, {}), self._requests
        for row, request in tuple(at.items()):
            last_s = requests.last_s[row]
            if last_s == last_s:
                self._controller.record_tokens(request, 1, requests.first_s[row])
                self._controller.record_end(request, last_s, requests.output_tokens[row])
            elif not requests.failure[row]:
                continue
            del at[row], self._where[row], self._in_flight[row]
        return at.values()
