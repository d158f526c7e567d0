"""Connections that stay half-open or are not read, against uvicorn with our protocol and short limits."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
import uvicorn

from iserve.gateway import http_server, limits
from iserve.gateway.errors import ApiError
from iserve.gateway.limits import BodyBudget


class Endless:
    """An ASGI application that writes until its client is gone."""

    def __init__(self) -> None:
        self.client_gone = threading.Event()

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == "/body":
            try:
                await limits.read_body(receive, scope["headers"], max_body_bytes=10_000, budget=BodyBudget(10_000))
            except ApiError as error:
                await send({"type": "http.response.start", "status": error.status, "headers": []})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/short":
            await send({"type": "http.response.body", "body": b"short", "more_body": False})
            return
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        self.client_gone.set()


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_server, "STALLED_CLIENT_S", 0.3)
    monkeypatch.setattr(limits, "BODY_TIMEOUT_S", 0.2)
    app = Endless()
    config = uvicorn.Config(
        app,
        http=http_server.GatewayProtocol,
        lifespan="off",
        ws="none",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        with socket.create_connection(listener.getsockname(), timeout=20) as client:
            yield client, app
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def rest(client: socket.socket) -> bytes:
    said = b""
    while data := client.recv(65536):
        said += data
    return said


def test_a_connection_that_never_asks_is_closed(served) -> None:
    assert rest(served[0]) == b""


def test_half_a_header_is_answered_408_and_closed(served) -> None:
    client, _ = served
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Ha")
    assert rest(client).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "head", [pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nX-Ha", id="header"), pytest.param(b"\r\n", id="nothing")]
)
def test_a_head_that_comes_byte_by_byte_is_cut_off(served, head) -> None:
    """Each byte alone is in time."""
    client, _ = served
    client.sendall(head)
    client.settimeout(0.02)
    for _ in range(500):
        try:
            assert client.recv(65536)[:13] in (b"HTTP/1.1 408 ", b"")
            return
        except TimeoutError:
            client.sendall(b"a" if head.strip() else b"\r\n")
    raise AssertionError("it was let go on")


def test_a_body_that_comes_byte_by_byte_is_cut_off(served) -> None:
    client, _ = served
    client.sendall(
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    )
    client.settimeout(0.02)
    for _ in range(500):
        try:
            assert client.recv(65536).startswith(b"HTTP/1.1 408 ")
            return
        except TimeoutError:
            client.sendall(b"a")
    raise AssertionError("it was let go on")


def test_half_of_a_second_header_too(served) -> None:
    client, _ = served
    client.sendall(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n")
    said = b""
    while b"short" not in said:
        said += client.recv(65536)
    assert said.startswith(b"HTTP/1.1 200 ")
    client.sendall(b"GET /sh")
    assert b"HTTP/1.1 408 " in rest(client)


def test_a_client_that_does_not_read_is_let_go(served) -> None:
    """Else it would hold its place at the worker for as long as it likes."""
    client, app = served
    client.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
    assert app.client_gone.wait(20)


def test_a_client_that_reads_is_kept(served) -> None:
    client, app = served
    client.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
    read = 0
    while read < 20 * 2**20:
        read += len(client.recv(2**20))
    assert not app.client_gone.is_set()
