"""HTTP protocol of uvicorn with a bound on the connections of clients that never send a request.

Without it any client that can reach the port can use up the controller's file descriptors: the controller then
reaches neither its daemon nor its state, and logs each connection that it cannot accept.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from daemon.connections import ConnectionLimit
from daemon.file_limit import most_connections
from iserve.bounded_uvicorn import limit_of

__all__ = ["BoundedProtocol"]


class BoundedProtocol(H11Protocol):
    """A whole request within ``arrive_s`` of connecting or of the last answer, or the connection is closed. Beyond
    ``max_connections`` the one that has let wait longest gives way to the newcomer."""

    max_connections = 2048  # many more than the additions that may wait: those beyond are answered, too
    arrive_s = 30.0
    _limit: ConnectionLimit[Any]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit = limit_of(
            self.server_state, lambda: most_connections(self.max_connections), wait_s=self.arrive_s
        )
        self._limit.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._has_request():
            self._limit.works(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins the next one, if that has arrived already
        (self._limit.works if self._has_request() else self._limit.waits)(self)

    def _has_request(self) -> bool:
        """Return whether a whole request is there that has not been answered."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
