"""HTTP protocol of uvicorn (httptools) with the bounds it lacks: on headers, and on clients that stall.

Uvicorn alone takes in headers of any size and trailers without end, holds a connection with a half-sent header for
ever, and one whose client stops reading for as long as the client likes; and it accepts any number of connections.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from daemon.connections import ConnectionLimit
from daemon.file_limit import most_connections
from iserve.bounded_uvicorn import limit_of
from iserve.gateway.errors import error_body
from iserve.gateway.reply import WRITE_NOW
from iserve.gateway.request_body import MAX_HEADER_BYTES

__all__ = ["HEADER_TIMEOUT_S", "STALLED_CLIENT_S", "GatewayProtocol", "max_connections"]

HEADER_TIMEOUT_S = 10.0
STALLED_CLIENT_S = 10.0  # a client that does not take what waits for it, 64 KiB at most, for so long

_BUFFER = memoryview(bytearray(256 * 2**10))  # read into and used up within one call, so one is enough
_MAX_URL_BYTES = 65_535  # that httptools parses
_FRAMING = (b"content-length", b"transfer-encoding")
_MAX_CONNECTIONS = 16_384
_MAX_PIPELINED = 8  # requests that wait for the answer before them; each is held at a hundred times its size


def max_connections() -> int:
    """Return the bound on clients' connections, each of which may need another one to a worker."""
    return most_connections(_MAX_CONNECTIONS, files_each=2)


class _HeadWithBody:
    """A transport that sends an answer's head together with the first bytes of its body.

    Uvicorn writes them apart; the system call saved is a third of those that a short answer takes. What is held
    leaves with the next write, an empty one too, or with the close: uvicorn ends every answer with a write.
    """

    __slots__ = ("_held", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._held = data
            return
        self._transport.write(data)

    def close(self) -> None:
        self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GatewayProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """Connection of one client."""

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # `cycle` is the newest, which may have to wait for this one
    _in_head = False  # the beginning of a head has arrived, its end has not
    _limit: ConnectionLimit[Any]
    _is_full = False  # more requests arrived at once than are held: those are answered, then the connection ends
    _unused_bytes = 0  # received since the last head or piece of a body was complete: heads, trailers, chunk sizes

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_HeadWithBody(transport))  # type: ignore[arg-type]
        # What the client does not read is noticed from the first byte on: the last ones of an answer would else
        # keep a connection for ever that we have closed.
        transport.set_write_buffer_limits(high=0)
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_slow_header)
        self._limit = limit_of(self.server_state, max_connections)
        self._limit.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.closed(self)
        for timer in (self._header_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if self._running is not None and not self._running.response_complete:
            _leave(self._running)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(_BUFFER[:nbytes])  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        if self._is_full:
            return
        self._unset_keepalive_if_required()
        self._unused_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._go_on_without_upgrade(bytes(data[upgrade.args[0] :]))
        except httptools.HttpParserError:
            if self._is_full:
                return
            if self._in_head and len(self.url) > _MAX_URL_BYTES:
                self._refuse(414, "the URL is too long")
            else:
                self._refuse(400, "this is not valid HTTP/1.1")
            return
        if self._unused_bytes > MAX_HEADER_BYTES:
            if self._in_head and len(self.url) > MAX_HEADER_BYTES // 2:
                self._refuse(414, "the URL is too long")
            else:
                self._refuse(431, "the headers are too large")
        elif self._in_head or self.cycle is None or self.cycle.response_complete:  # only a part of a head is here
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_slow_header)
        elif self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer, which is not read
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 and (hosts or self.parser.get_http_version() != "1.0"):
            raise ValueError("HTTP/1.1 needs one Host")
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._is_full, self.cycle.keep_alive = True, False  # the newest of those that are held
            raise ValueError("too many requests at once")
        super().on_headers_complete()
        self._in_head, self._unused_bytes = False, 0
        if self.pipeline:  # uvicorn has stopped reading; then a client that leaves would not be noticed
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unused_bytes = 0
        if not self.cycle.response_complete:
            self._limit.works(self)
        if not self.parser.should_upgrade():  # else the body is still to arrive: see _go_on_without_upgrade
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.transport.write(b"")  # of an answer without a body the head is still held
        if not self.pipeline:
            self._limit.waits(self)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALLED_CLIENT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.scope["extensions"] = {WRITE_NOW: partial(self._write_now, cycle)}  # type: ignore[dict-item]
        super()._start_asgi_task(cycle, app)

    def _write_now(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        """Write a piece of a stream, without a message and a coroutine; False where ``send`` would wait or drop
        it.
        """
        if self.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
            return False  # not chunked: not begun, or of a known length
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Go on without the protocol that the client would like (some ask for HTTP/2 with every request).

        llhttp takes what follows the head for the other protocol; it is the body, which a new parser reads.
        """
        self.cycle.keep_alive = False
        framing = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)
        self.parser = httptools.HttpRequestParser(
            SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        )
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # it passes over what follows the body
        self.parser.feed_data(b"POST / HTTP/1.1\r\nConnection: close\r\n%b\r\n%b" % (framing, rest))

    def _on_slow_header(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:  # the head is of the request after this
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_slow_header)
        elif self._in_head:
            self._refuse(408, f"the headers did not come within {HEADER_TIMEOUT_S:.0f} s")
        else:  # nothing was ever asked
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close, unless an answer is under way, which cannot be changed: then only close."""
        running = self._running
        if running is None or running.response_complete or not (running.response_started or self.pipeline):
            if running is not None and not running.response_complete:
                _leave(running)
            body = error_body(status, message, code="bad_http")
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def _leave(cycle: RequestResponseCycle) -> None:
    """Tell the application that the client no longer reads its answer."""
    cycle.disconnected = True
    cycle.message_event.set()
