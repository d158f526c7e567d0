"""Limit on connections for each uvicorn server: its protocols, one per connection, share nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.server import ServerState

from daemon.connections import ConnectionLimit

__all__ = ["limit_of"]

_LIMITS: WeakKeyDictionary[ServerState, ConnectionLimit[Any]] = WeakKeyDictionary()


def limit_of(server: ServerState, most: Callable[[], int], *, wait_s: float | None = None) -> ConnectionLimit[Any]:
    """Return the server's limit, which its first connection makes of the other arguments."""
    limit = _LIMITS.get(server)
    if limit is None:
        limit = _LIMITS[server] = ConnectionLimit(most(), _abort, wait_s=wait_s)
    return limit


def _abort(connection: Any) -> None:
    connection.transport.abort()
