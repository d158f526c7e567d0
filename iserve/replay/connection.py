"""Connections to one endpoint.

A ``BufferedProtocol``: received bytes go into one buffer that all connections share, and are consumed at once.
The plain protocol allocates 256 KiB for every read, which costs more than all the rest.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

from iserve.replay.endpoint import Endpoint
from iserve.replay.inflight_request import InflightRequest
from traces.outcomes import Failure

__all__ = ["Connections"]

_BUFFER = memoryview(bytearray(64 * 2**10))  # read into and used up within one call, so one is enough
_IDLE_S = 3.0  # below the 5 s after which uvicorn closes an idle connection
_LINGER_S = 1.0  # for the end of an answer whose last token has arrived, so that its connection can be used again


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, pool: Connections) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self.exchange: InflightRequest | None = None
        self.idle_since_s = 0.0
        self._linger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._pool.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            exchange.closed(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        exchange = self.exchange
        if exchange is None:
            self.close()  # nothing was asked
            return
        exchange.feed(bytes(_BUFFER[:nbytes]), self._pool.loop.time())
        if exchange.over:
            self._after(exchange)

    def _after(self, exchange: InflightRequest) -> None:
        """Keep the connection, whose outcome is known, if its answer is complete, or will be in a moment."""
        if exchange.reusable:
            self.exchange = None
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None
            self._pool.give_back(self)
        elif not exchange.done or exchange.complete:
            self.close()
        elif self._linger is None:
            self._linger = self._pool.loop.call_later(_LINGER_S, self.close)

    def close(self) -> None:
        self.exchange = None
        if self._linger is not None:
            self._linger.cancel()
        if self.transport is not None:
            self.transport.abort()


class Connections:
    """Connections to one endpoint, kept for a few seconds after their answer."""

    def __init__(self, endpoint: Endpoint, path: str, key: str | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoint = endpoint
        self._tls = ssl.create_default_context() if endpoint.tls else None
        authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self._head = (
            f"POST {endpoint.base_path}{path} HTTP/1.1\r\nHost: {endpoint.authority}\r\n"
            f"User-Agent: iserve-replay\r\nAccept: text/event-stream\r\n{authorization}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()

    def send(self, exchange: InflightRequest, body: bytes) -> None:
        """Send on a connection that is free, else on a new one. Never waits."""
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        while self._idle:
            connection = self._idle.pop()
            fresh = self.loop.time() - connection.idle_since_s < _IDLE_S
            if fresh and connection.transport is not None and not connection.transport.is_closing():
                self._write(connection, exchange, request)
                return
            connection.close()
        task = self.loop.create_task(self._connect(exchange, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.abandon = task.cancel

    async def _connect(self, exchange: InflightRequest, request: bytes) -> None:
        endpoint = self._endpoint
        try:
            _, connection = await self.loop.create_connection(
                lambda: _Connection(self),
                endpoint.address,
                endpoint.port,
                ssl=self._tls,
                server_hostname=endpoint.host if endpoint.tls else None,
            )
        except (OSError, ssl.SSLError) as error:
            exchange.fail(Failure.NO_CONNECTION, f"{endpoint.authority}: {error}")
            return
        if exchange.over:
            connection.close()
        else:
            self._write(connection, exchange, request)

    def _write(self, connection: _Connection, exchange: InflightRequest, request: bytes) -> None:
        assert connection.transport is not None
        connection.exchange, exchange.abandon = exchange, connection.close
        connection.transport.write(request)

    def give_back(self, connection: _Connection) -> None:
        connection.idle_since_s = self.loop.time()
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self.open.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in list(self.open):
            connection.close()

    async def closed(self) -> None:
        """Wait after ``close`` until nothing of ours is left in the event loop."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self.open:
            await asyncio.sleep(0)
