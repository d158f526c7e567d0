"""Uvicorn's h11 protocol with the bounds it lacks, on half-sent headers and clients that stop reading.

Uvicorn alone holds a connection with a half-sent header for ever, and one whose client stops reading for as long
as the client likes.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from iserve.gateway.errors import error_body

__all__ = ["HEADER_TIMEOUT_S", "STALLED_CLIENT_S", "GatewayProtocol"]

HEADER_TIMEOUT_S = 10.0
STALLED_CLIENT_S = 60.0  # a client that reads nothing for so long while an answer waits for it


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


class GatewayProtocol(H11Protocol):
    """One connection."""

    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_HeadWithBody(transport))  # type: ignore[arg-type]
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_slow_header)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:  # only a part of a header has come
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_slow_header)
        elif self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALLED_CLIENT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is being handled; it knows whether the headers were too large."""
        if self.conn.our_state not in (
            h11.IDLE,
            h11.SEND_RESPONSE,
        ):  # an answer is under way: it cannot be changed
            self.transport.close()
            return
        status = getattr(sys.exception(), "error_status_hint", 400) if sys.version_info >= (3, 11) else 400
        self._refuse(status, "the headers are too large" if status == 431 else "this is not valid HTTP/1.1")

    def _on_slow_header(self) -> None:
        self._header_timer = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the headers did not come within {HEADER_TIMEOUT_S:.0f} s")
        else:  # nothing was ever asked
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        body = error_body(status, message, code="bad_http")
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
