"""HTTP/1.1 client for many streams at once: the gateway's to the workers, and the replay's to an endpoint.

Connections are kept open, with one request at a time on each. Not a library's client: those put a future and a
task's turn around every chunk, which costs more than the parsing. llhttp parses the answers. The connection is a
``BufferedProtocol``: received bytes go into one buffer of all connections and are used up on the spot, where the
plain protocol allocates 256 KiB for every read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, cast

import httptools

__all__ = [
    "AnswerLostError",
    "MalformedAnswerError",
    "NotReachedError",
    "Origin",
    "StreamAnswer",
    "StreamClient",
]

_KEEPALIVE_S = 3.0  # below the 5 s after which uvicorn closes an idle connection
_MAX_UNUSED_BYTES = 64 * 2**10  # in a row: of a head, of trailers, of chunk sizes
_MAX_HELD_BYTES = 256 * 2**10  # of an answer that the client takes more slowly than it arrives
_LARGE_BODY_BYTES = 64 * 2**10  # sent apart from its head rather than copied

_BUFFER = memoryview(bytearray(256 * 2**10))


class Origin(NamedTuple):
    """Server as the client connects to it."""

    address: str
    port: int
    authority: str  # sent as Host
    tls: ssl.SSLContext | None = None
    tls_name: str | None = None  # that the certificate must have


class NotReachedError(Exception):
    """Error: no connection to the server, which has seen nothing of the request."""


class AnswerLostError(Exception):
    """The connection ended before the answer was complete."""


class MalformedAnswerError(AnswerLostError):
    """The server sent what is no HTTP/1.1 answer, or one whose head has no end."""


class StreamClient:
    """A pool of connections by origin. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Origin, deque[_Connection]] = {}  # the one used last is the last
        self._open: set[_Connection] = set()

    async def post(
        self,
        origin: Origin,
        path: str,
        headers: bytes,
        body: bytes,
        *,
        silence_s: float,
        connect_s: float | None = None,
    ) -> StreamAnswer:
        """Send ``body`` as JSON and wait for the head of the answer. The caller finishes or closes the answer.

        Args:
            headers: further ones, each with its line end.
            silence_s: longest wait for the head.
            connect_s: longest wait for a connection.

        Raises:
            NotReachedError: no connection within ``connect_s``.
            AnswerLostError, TimeoutError: it was sent, and no answer arrived.
        """
        head = b"POST %b HTTP/1.1\r\nHost: %b\r\n%b%bContent-Length: %d\r\n\r\n" % (
            path.encode(),
            origin.authority.encode(),
            b"Content-Type: application/json\r\nAccept-Encoding: identity\r\n",
            headers,
            len(body),
        )
        return await self._ask(origin, head, body, silence_s, connect_s)

    async def get(
        self, origin: Origin, path: str, headers: bytes, *, silence_s: float, connect_s: float | None = None
    ) -> StreamAnswer:
        """Ask for ``path``; arguments and errors are those of ``post``."""
        head = b"GET %b HTTP/1.1\r\nHost: %b\r\nAccept-Encoding: identity\r\n%b\r\n" % (
            path.encode(),
            origin.authority.encode(),
            headers,
        )
        return await self._ask(origin, head, b"", silence_s, connect_s)

    async def _ask(
        self, origin: Origin, head: bytes, body: bytes, silence_s: float, connect_s: float | None
    ) -> StreamAnswer:
        connection = self._take_idle(origin) or await self._connect(origin, connect_s)
        try:
            return await connection.ask(head, body, silence_s)
        except BaseException:
            connection.abort()
            raise

    def close(self) -> None:
        for connection in list(self._open):
            connection.abort()

    async def wait_closed(self) -> None:
        """Wait after ``close`` until no connection is left in the event loop."""
        while self._open:
            await asyncio.sleep(0)

    def _take_idle(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        if not idle:
            return None
        oldest_s = self._loop.time() - _KEEPALIVE_S
        while idle and idle[0].idle_since_s < oldest_s:
            idle.popleft().abort()
        while idle:
            connection = idle.pop()
            if not connection.is_closing:  # the loop has yet to take it out
                return connection
        return None

    async def _connect(self, origin: Origin, connect_s: float | None) -> _Connection:
        try:
            async with asyncio.timeout(connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self._loop, self, origin),
                    origin.address,
                    origin.port,
                    ssl=origin.tls,
                    server_hostname=origin.tls_name,
                )
        except OSError as error:  # TimeoutError and SSLError are
            raise NotReachedError(str(error)) from error
        return connection

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None:
            if connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[connection.origin]

    def keep(self, connection: _Connection) -> None:
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)


class StreamAnswer:
    """Answer whose head has arrived."""

    __slots__ = ("_connection", "content_type", "status")

    def __init__(self, connection: _Connection, status: int, content_type: bytes) -> None:
        self._connection = connection
        self.status = status
        self.content_type = content_type  # "text/event-stream", without parameters, in lower case

    async def read(self, silence_s: float, take: Callable[[bytes], bool] | None = None) -> bytes:
        """Return the received part of the body; waits for some; empty at its end.

        Args:
            take: is offered what arrives while this waits, in the very callback that read it, which spares a task
                switch for each token. What it takes (True) is not returned, and the wait goes on.

        Raises:
            TimeoutError: nothing arrived for ``silence_s``.
            AnswerLostError: the answer broke off.
        """
        return await self._connection.read(silence_s, take)

    @property
    def arrived_s(self) -> float:
        """Time of the last read, on the event loop's clock."""
        return self._connection.arrived_s

    async def finish(self, linger_s: float) -> None:
        """Wait a moment for the end of an answer of which no more is read; keep the connection if it arrives."""
        try:
            with suppress(TimeoutError, AnswerLostError):
                await self._connection.read(linger_s, None)
        except BaseException:
            self.close()
            raise
        self._connection.release()

    def close(self) -> None:
        """End the server's side at once."""
        self._connection.abort()


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, loop: asyncio.AbstractEventLoop, pool: StreamClient, origin: Origin) -> None:
        self.origin = origin
        self.idle_since_s = self.arrived_s = 0.0
        self._loop, self._pool = loop, pool
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._silence_s = 0.0  # the longest
        self._due_s = 0.0  # when the present one is too long
        self._take: Callable[[bytes], bool] | None = None
        self._failure: AnswerLostError | None = None
        self._begin()
        self._over = True  # nothing was asked yet

    def _begin(self) -> None:
        self._answer: StreamAnswer | None = None
        self._content_type = b""
        self._is_framed = False  # the head says where the body ends; else the end of the connection does
        self._unused_bytes = 0  # since anything of use arrived: see _MAX_UNUSED_BYTES
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._reusable = False
        self._over = False

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes, silence_s: float) -> StreamAnswer:
        assert self._transport is not None
        self._begin()
        if len(body) > _LARGE_BODY_BYTES:
            self._transport.write(head)
            self._transport.write(body)
        else:
            self._transport.write(head + body)
        while self._answer is None:
            if self._failure is not None:
                raise self._failure
            await self._news(silence_s)
        return self._answer

    async def read(self, silence_s: float, take: Callable[[bytes], bool] | None) -> bytes:
        while not self._parts:
            if self._over:
                return b""
            if self._failure is not None:
                raise self._failure
            self._take = take
            try:
                await self._news(silence_s)
            finally:
                self._take = None
        data = self._all_parts()
        self._forget_parts()
        if self._paused:
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        # Behind what a server that has answered has not read of a request, the next one might wait for ever.
        is_all_sent = self._transport is not None and not self._transport.get_write_buffer_size()
        if self._over and self._reusable and self._failure is None and is_all_sent:
            self._pool.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._fail(AnswerLostError("closed by this side"))
        if self._transport is not None:
            self._transport.abort()

    def _all_parts(self) -> bytes:
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def _forget_parts(self) -> None:
        self._parts.clear()
        self._held_bytes = 0

    def _is_taken(self) -> bool:
        """Return whether the waiting caller, if any, took what has arrived.

        Not with the answer's end, which must wake it.
        """
        if self._take is None or self._over or not self._parts or not self._take(self._all_parts()):
            return False
        self._forget_parts()
        self._due_s = self.arrived_s + self._silence_s
        return True

    async def _news(self, silence_s: float) -> None:
        """Wait until something has arrived or gone wrong. One timer outlives many waits."""
        self._silence_s = silence_s
        self._due_s = self._loop.time() + silence_s
        if self._timer is None or self._timer.when() > self._due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._due_s, self._on_timer)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._due_s:
            self._timer = self._loop.call_at(self._due_s, self._on_timer)
        else:
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: AnswerLostError) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        if self._timer is not None:
            self._timer.cancel()
        self._fail(AnswerLostError("the server closed the connection" if exc is None else str(exc)))

    def eof_received(self) -> None:
        """Close the transport, but not before the server has read all of the request."""
        if self._answer is not None and not self._is_framed:
            self._over = True
            self._wake()
        else:
            self._fail(AnswerLostError("the server closed the connection"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self.arrived_s = self._loop.time()
        self._unused_bytes += nbytes
        try:
            if self._over:  # of an idle connection, or after the end of an answer
                raise MalformedAnswerError("bytes that no request asked for")
            self._parser.feed_data(_BUFFER[:nbytes])
            if self._unused_bytes > _MAX_UNUSED_BYTES:
                raise MalformedAnswerError(f"a head of more than {_MAX_UNUSED_BYTES} bytes")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, MalformedAnswerError) as error:
            self._fail(MalformedAnswerError(f"no HTTP/1.1 answer: {error}"))
            assert self._transport is not None
            self._transport.abort()
            return
        if self._unused_bytes or self._is_taken():  # it is as silent as it was, or goes on as it was
            return
        if self._held_bytes > _MAX_HELD_BYTES and not self._paused and not self._over:
            self._paused = True
            assert self._transport is not None
            self._transport.pause_reading()
        self._wake()

    # the parser's callbacks

    def on_message_begin(self) -> None:
        if self._over:  # in one piece with the end of the answer; it must not be taken for the next one
            raise MalformedAnswerError("bytes that no request asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.partition(b";")[0].strip().lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._is_framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100:
            raise MalformedAnswerError(f"it has the status {status}")
        if status < 200:  # the headers of the answer itself follow
            self._content_type, self._is_framed = b"", False
            return
        self._reusable = self._parser.should_keep_alive()
        self._answer = StreamAnswer(self, status, self._content_type)
        self._unused_bytes = 0

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._held_bytes += len(data)
        self._unused_bytes = 0

    def on_message_complete(self) -> None:
        if self._answer is not None:  # else it was a 1xx
            self._over = True
            self._unused_bytes = 0
