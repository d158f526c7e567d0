"""The HTTP server of a profiling worker in an interpreter of its own: bounded like every other port."""

from __future__ import annotations

import contextlib
import importlib
import select
import socket
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from daemon.engines.external import PROFILING_PATH
from tests.waiting import PATIENCE_S


@pytest.fixture
def hosted_http(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, found as in the engine's interpreter."""
    monkeypatch.syspath_prepend(PROFILING_PATH)
    return importlib.import_module("iserve_profiling.http")


@pytest.fixture
def serve(hosted_http: ModuleType) -> Iterator[Callable[[], tuple[str, int]]]:
    """Starts a server and returns its address."""
    with contextlib.ExitStack() as stack:

        def start() -> tuple[str, int]:
            worker = hosted_http._Worker(None, None)
            server = hosted_http._Server(("127.0.0.1", 0), hosted_http._handler(worker, None))
            stack.callback(server.server_close)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.server_address

        yield start


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /health HTTP/1.0\r\nX: ", id="head"),
        pytest.param(b"POST /profile/run HTTP/1.0\r\nContent-Length: 1000000\r\n\r\n", id="body"),
    ],
)
def test_a_request_that_drips_is_hung_up(
    hosted_http: ModuleType, monkeypatch: pytest.MonkeyPatch, serve: Callable[[], tuple[str, int]], head: bytes
) -> None:
    """The pauses may be short: the connection would be held for as long as bytes arrive."""
    monkeypatch.setattr(hosted_http, "_REQUEST_TIMEOUT_S", 0.5)
    with (
        socket.create_connection(serve(), timeout=PATIENCE_S) as connection,
        contextlib.suppress(ConnectionError),  # a byte was on its way
    ):
        connection.sendall(head)
        pauses = 0
        while not select.select([connection], [], [], 0.02)[0]:
            connection.sendall(b"1")
            pauses += 1
            assert pauses < 1000
        assert connection.recv(1) == b""


def test_no_more_connections_are_held_than_allowed(
    hosted_http: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_http, "_MAX_CONNECTIONS", 2)
    server = hosted_http._Server(("127.0.0.1", 0), hosted_http._handler(None, None))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()

    def ask(connection: socket.socket) -> bytes:
        connection.settimeout(30)
        try:
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return connection.recv(4096)
        except ConnectionError:
            return b""

    def connect() -> socket.socket:
        return socket.create_connection(server.server_address, timeout=PATIENCE_S)

    try:
        with connect() as first, connect() as second:
            with connect() as third:
                assert third.recv(1) == b""  # closed at once
            assert ask(first).startswith(b"HTTP/1.0 200")
            assert ask(second).startswith(b"HTTP/1.0 200")
        while True:  # their threads end by themselves
            with connect() as late:
                if ask(late).startswith(b"HTTP/1.0 200"):
                    break
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
