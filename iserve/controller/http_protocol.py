"""uvicorn's HTTP protocol, and a bound on what those may hold who connect and never ask.

Without it anybody who can reach the port can use up the controller's file descriptors: it then reaches neither its
daemon nor its state, and logs each connection that it cannot accept.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BoundedProtocol"]


class BoundedProtocol(H11Protocol):
    """A whole request within ``arrive_s`` of connecting or of the last answer, or the connection is closed. Beyond
    ``max_connections`` the one that has let wait longest gives way to the newcomer."""

    max_connections = 256
    arrive_s = 30.0
    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        held = [other for other in self.connections if not other.transport.is_closing()]
        if len(held) > self.max_connections:
            idle = [other for other in held if isinstance(other, BoundedProtocol) and other._is_awaited()]
            min(idle, key=lambda other: other._due_s()).transport.abort()  # at worst this very one

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._arrival is not None:
            self._arrival.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def _await_request(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
        self._arrival = self.loop.call_later(self.arrive_s, self._give_up)

    def _is_awaited(self) -> bool:
        """Whether no request, or only a part of one, is there."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _due_s(self) -> float:
        return float("inf") if self._arrival is None else self._arrival.when()

    def _give_up(self) -> None:
        if self._is_awaited():
            self.transport.abort()
