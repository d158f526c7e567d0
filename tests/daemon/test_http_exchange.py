"""A synchronous exchange with a server that says exactly what a test wants, on real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from daemon.http_exchange import EXCHANGE_ERRORS, exchange
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S


@contextlib.contextmanager
def server(answer: bytes, *, then_trickles: bool = False) -> Iterator[str]:
    """The URL of a server that gives one client ``answer``, and then a byte now and again until it leaves."""
    left = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65_536)
            connection.sendall(answer)
            while then_trickles and not left.wait(0.02):
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            left.set()
            thread.join(PATIENCE_S)


def test_an_answer_is_cut_at_the_bound() -> None:
    with server(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nmuch more") as url:
        assert exchange(url, "GET", "/", timeout_s=PATIENCE_S, max_bytes=4) == (200, b"much")


def test_what_trickles_in_is_no_answer_in_time(golden: Golden) -> None:
    with (
        server(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", then_trickles=True) as url,
        golden.raises("daemon", TimeoutError),
    ):
        exchange(url, "GET", "/", timeout_s=0.2, max_bytes=2**20, in_all=True)


@pytest.mark.parametrize("answer", [b"", b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000])
def test_what_is_no_answer_is_an_error_that_callers_catch(answer: bytes) -> None:
    with server(answer) as url, pytest.raises(EXCHANGE_ERRORS):
        exchange(url, "GET", "/", timeout_s=PATIENCE_S, max_bytes=100)


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with server(b"HTTP/1.1 204 None\r\n\r\n") as url:
        assert exchange(url, "GET", "/", timeout_s=PATIENCE_S, max_bytes=100) == (204, b"")
