"""Exchange of one HTTP request and its whole answer, past any proxy, on a connection of its own. Synchronous.

A connection that is not reused leaves nothing half-read. What the bytes mean is the caller's.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

__all__ = ["EXCHANGE_ERRORS", "exchange"]

EXCHANGE_ERRORS = (OSError, http.client.HTTPException)  # of an exchange without a whole answer


def exchange(
    url: str,
    method: str,
    path: str,
    *,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    max_bytes: int,
    in_all: bool = False,
) -> tuple[int, bytes]:
    """Return the status and body of an answer from the server of ``url``, cut at ``max_bytes``.

    Args:
        timeout_s: longest silence.
        in_all: the answer must also be complete by then, however many bytes of it have arrived.

    Raises:
        EXCHANGE_ERRORS: no answer; TimeoutError: not in time.
    """
    where = urlsplit(url)
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    connection = kind(where.hostname or "127.0.0.1", where.port, timeout=timeout_s)
    try:
        connection.connect()
        with _hung_up_after(timeout_s, connection.sock) if in_all else contextlib.nullcontext():
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read(max_bytes)
    finally:
        connection.close()


@contextlib.contextmanager
def _hung_up_after(timeout_s: float, sock: Any) -> Iterator[None]:
    """Hang up ``sock`` when the time is over; a socket's own timeout begins anew with every byte."""
    is_over = threading.Event()

    def hang_up() -> None:
        is_over.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if is_over.is_set():
            raise TimeoutError(f"no whole answer within {timeout_s:g} s")
