"""Bound on the open connections of one server, and on the wait for their requests. Knows no HTTP.

A process whose clients connect and never ask would else run out of file descriptors. Every server of ours has one
:class:`ConnectionLimit`; `daemon.bounded_http` and `iserve.bounded_uvicorn` say for aiohttp and uvicorn when what
happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["ConnectionLimit"]

T = TypeVar("T")


class ConnectionLimit(Generic[T]):
    """Open connections, those first that have waited longest for a request. For one event loop.

    Beyond ``most`` the one that has waited longest gives way to the newcomer, or the newcomer itself where all are
    at work. No connection waits longer than ``wait_s`` for a whole request.

    Args:
        abort: ends a connection at once; the server then reports it as closed, too.
        wait_s: None for no limit.
    """

    def __init__(self, most: int, abort: Callable[[T], None], *, wait_s: float | None = None) -> None:
        self.most = most
        self._abort, self._wait_s = abort, wait_s
        self._open: set[T] = set()
        self._waiting: dict[T, float] = {}  # since when, on the loop's clock; in this order
        self._timer: asyncio.TimerHandle | None = None

    def opened(self, connection: T) -> None:
        """Count a new connection, which waits for its first request."""
        self._open.add(connection)
        self.waits(connection)
        if len(self._open) > self.most:
            self._end(next(iter(self._waiting)))

    def waits(self, connection: T) -> None:
        """Note that a request, or the rest of one, is awaited from now on."""
        if connection not in self._open:
            return
        now_s = asyncio.get_running_loop().time()
        self._waiting.pop(connection, None)
        self._waiting[connection] = now_s
        if self._timer is None and self._wait_s is not None:
            self._timer = asyncio.get_running_loop().call_at(now_s + self._wait_s, self._end_overdue)

    def works(self, connection: T) -> None:
        """Note that a whole request has arrived."""
        self._waiting.pop(connection, None)

    def closed(self, connection: T) -> None:
        """Forget a connection; idempotent."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, connection: T) -> None:
        self.closed(connection)
        self._abort(connection)

    def _end_overdue(self) -> None:
        """End connections that have waited too long, and set the timer for the next that will be due."""
        assert self._wait_s is not None
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting:
            connection, since_s = next(iter(self._waiting.items()))
            if since_s + self._wait_s > loop.time():
                self._timer = loop.call_at(since_s + self._wait_s, self._end_overdue)
                return
            self._end(connection)
