"""Lateness of requests as iServe's gateway judges it, in the simulated world (``Scenario.forecasts_late``).

The judge is the gateway's own (``planner.refusing``), given what a gateway would see: when a request arrived and
was sent on, its lengths, and afterwards when its first and last tokens arrived. Progress of a running one is
judged by the time since, as the gateway does for answers that are not streamed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from planner.intent import Slo
from planner.lateness import Pace
from planner.refusing import Flight, Judge
from traces.simulator.requests import Requests
from traces.simulator.workers import Server

__all__ = ["Punctual"]


class Punctual:
    """The requests of one deployment that its replicas have, and their judge."""

    def __init__(self, slo: Slo, pace: Pace, requests: Requests) -> None:
        self._judge, self._requests = Judge(slo, pace), requests
        self._flights: dict[int, Flight] = {}  # of rows that wait or run
        self._at: dict[Server, dict[int, Flight]] = {}
        self._where: dict[int, Server] = {}

    def joins(self, row: int, server: Server, now_s: float) -> bool:
        """Return whether the request keeps its limits there; one that starts a worker is not judged late."""
        flight = self._flight(row, now_s)
        if server.ready_s > now_s:
            flight.since_s = max(flight.since_s, server.ready_s)
            return True
        return self._judge.joins(flight, self._running(server), now_s) is None

    def waits(self, row: int, servers: Sequence[Server], line: Iterable[int], now_s: float) -> bool:
        """Return whether the request keeps its limits behind ``line``."""
        ready = [self._running(server) for server in servers if server.ready_s <= now_s]
        before = [self._flight(other, now_s) for other in line]
        return not ready or self._judge.waits(self._flight(row, now_s), ready, before, now_s) is None

    def sent(self, row: int, server: Server, now_s: float) -> None:
        flight = self._flight(row, now_s)
        self._at.get(self._where.get(row, server), {}).pop(row, None)  # where it was before it was moved
        self._judge.sent(flight, self._running(server), max(now_s, server.ready_s))
        self._at.setdefault(server, {})[row] = flight
        self._where[row] = server

    def refused(self, row: int) -> None:
        self._flights.pop(row, None)

    def _flight(self, row: int, now_s: float) -> Flight:
        flight = self._flights.get(row)
        if flight is None:
            input_tokens, output_tokens = self._requests.input_tokens[row], self._requests.output_tokens[row]
            arrival_s = self._requests.arrival_s[row]
            flight = self._judge.flight(arrival_s, input_tokens, output_tokens, streams=False)
            self._flights[row] = flight
        return flight

    def _running(self, server: Server) -> Collection[Flight]:
        """Return what runs there now; what has ended is learned from."""
        at, requests = self._at.get(server, {}), self._requests
        for row, flight in tuple(at.items()):
            last_s = requests.last_s[row]
            if last_s == last_s:
                self._judge.came(flight, 1, requests.first_s[row])
                self._judge.ended(flight, last_s, requests.output_tokens[row])
            elif not requests.failure[row]:
                continue
            del at[row], self._where[row], self._flights[row]
        return at.values()
