"""Answer to one client, whole or streamed. Knows ASGI, and whether the client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from types import TracebackType
from typing import Any

__all__ = ["WRITE_NOW", "ClientWatch", "Incoming", "Reply", "WriteNow"]

_DRAIN_S = 2.0  # how long an early refusal reads on, so that the client gets to see it
_DRAIN_BYTES = 64 * 2**20

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
WriteNow = Callable[[bytes], bool]

WRITE_NOW = "iserve.write_now"  # ASGI extension of our server: see Reply.piece_now


class Incoming:
    """Request side of a connection; knows whether some of its body is still to arrive."""

    __slots__ = ("_receive", "unread")

    def __init__(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._receive = receive
        self.unread = any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)

    async def __call__(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):  # the end of the body, or of the connection
            self.unread = False
        return message


class Reply:
    """Writes the answer; remembers whether it began (no other status can follow then) and whether it ended."""

    __slots__ = ("_send", "_write_now", "ended", "request_id", "started", "status")

    def __init__(self, send: Send, request_id: bytes, write_now: WriteNow | None = None) -> None:
        self._send = send
        self._write_now = write_now
        self.request_id = request_id
        self.started = False
        self.ended = False
        self.status = 0

    async def whole(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = b"application/json",
        headers: list[tuple[bytes, bytes]] | None = None,
        incoming: Incoming | None = None,
    ) -> None:
        """Send a complete answer.

        Args:
            incoming: for an answer that may be sent before the request's body was read. The connection then ends
                with the answer, after reading on for a moment: closing under a client that still sends would
                reset the connection and lose the answer.
        """
        extra = headers or []
        linger = incoming is not None and incoming.unread
        if linger:
            extra = [*extra, (b"connection", b"close")]
        await self._start(status, [(b"content-length", str(len(body)).encode()), *extra], content_type)
        self.ended = not linger
        await self._send({"type": "http.response.body", "body": body, "more_body": linger})
        if linger:
            assert incoming is not None
            with suppress(TimeoutError):
                await asyncio.wait_for(_drain(incoming), _DRAIN_S)
            await self.end()

    async def begin_stream(self, status: int, content_type: bytes) -> None:
        await self._start(status, [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")], content_type)

    async def piece(self, data: bytes) -> None:
        """Send a piece; wait while the client is slower than the worker."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def piece_now(self, data: bytes) -> bool:
        """Send a piece as ``piece`` does, from outside the task that answers.

        False, and nothing written: it would have to wait, for the answer to begin or for the client; or the client
        is gone.
        """
        return self._write_now is not None and self._write_now(data)

    async def end(self) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]], content_type: bytes) -> None:
        self.started, self.status = True, status
        all_headers = [(b"content-type", content_type), (b"x-request-id", self.request_id), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})


class ClientWatch:
    """Watch of a client: ``with ClientWatch(receive, reply) as watch:`` cancels the block when the client leaves.

    The block is cancelled the moment the client leaves its answer unfinished; then ``watch.left``. The request's
    body must have been read. Any other cancellation passes through.
    """

    __slots__ = ("_reply", "_task", "_watcher", "left")

    def __init__(self, receive: Receive, reply: Reply) -> None:
        self.left = False
        self._reply = reply
        self._task = asyncio.current_task()
        self._watcher = asyncio.ensure_future(_disconnect(receive))

    def __enter__(self) -> ClientWatch:
        self._watcher.add_done_callback(self._on_disconnect)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._watcher.remove_done_callback(self._on_disconnect)
        self._watcher.cancel()
        if self.left and kind is asyncio.CancelledError:
            assert self._task is not None
            self._task.uncancel()
            return True
        return False

    def _on_disconnect(self, watcher: asyncio.Future[None]) -> None:
        if not watcher.cancelled() and not self._reply.ended:
            assert self._task is not None
            self.left = True
            self._task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drain(incoming: Incoming) -> None:
    dropped = 0
    while incoming.unread and dropped < _DRAIN_BYTES:
        dropped += len((await incoming()).get("body", b""))
