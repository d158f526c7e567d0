"""Connections that stay half-open or are not read, against uvicorn with our protocol and short limits."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import uvicorn

from iserve.gateway import http_server, request_body
from iserve.gateway.errors import ApiError
from iserve.gateway.reply import WRITE_NOW
from iserve.gateway.request_body import BodyBudget
from tests.waiting import PATIENCE_S


class Endless:
    """An ASGI application that writes until its client is gone."""

    def __init__(self) -> None:
        self.client_gone = threading.Event()
        self.asked = threading.Event()
        self.answered = threading.Event()
        self.bodies: list[bytes] = []
        self.written: list[bytes] = []  # on "/now", at once
        self.connections: Callable[[], set[object]] = set

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == "/body":
            try:
                body = await request_body.read_body(
                    receive, scope["headers"], max_body_bytes=10_000, budget=BodyBudget(10_000)
                )
                self.bodies.append(body)
                status = 200
            except ApiError as error:
                status = error.status
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await receive()
        if scope["path"] == "/now":
            await self._write_now(scope["extensions"][WRITE_NOW], receive, send)
            return
        if scope["path"] == "/never":
            self.asked.set()
            await receive()
            self.client_gone.set()
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/end":
            await send({"type": "http.response.body", "body": b"x" * 60_000, "more_body": False})
            self.answered.set()
            return
        if scope["path"] == "/short":
            await send({"type": "http.response.body", "body": b"short", "more_body": False})
            return
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        self.client_gone.set()

    async def _write_now(self, write_now, receive, send) -> None:
        """Pieces at once, until one would have to wait; that one waits."""
        assert not write_now(b"too early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(1000):
            piece = b"piece %06d;" % number * 1000
            if not write_now(piece):
                break
            self.written.append(piece)
        assert not write_now(b"while another waits")
        await send({"type": "http.response.body", "body": b"waited", "more_body": True})
        assert write_now(b"again")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert not write_now(b"too late")
        self.answered.set()


@pytest.fixture(params=["asyncio", "uvloop"])
def served(monkeypatch, request):
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_server, "STALLED_CLIENT_S", 0.3)
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.2)
    app = Endless()
    config = uvicorn.Config(
        app,
        loop=request.param,
        http=http_server.GatewayProtocol,
        lifespan="off",
        ws="none",
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )  # a client that does not read is soon noticed
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        app.connections = lambda: set(server.server_state.connections)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(20)
            client.connect(listener.getsockname())
            yield client, app
        server.should_exit = True
        thread.join(PATIENCE_S)
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
    assert app.client_gone.wait(PATIENCE_S)


def test_a_client_that_reads_is_kept(served) -> None:
    client, app = served
    client.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
    read = 0
    while read < 20 * 2**20:
        read += len(client.recv(2**20))
    assert not app.client_gone.is_set()


def test_what_is_written_at_once_comes_in_its_order_and_not_without_bounds(served) -> None:
    """Writing stops as soon as the client does not read; what waits for the client then follows it."""
    client, app = served
    client.sendall(b"GET /now HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    said = rest(client)
    assert app.answered.wait(PATIENCE_S)
    body, data = b"", said.partition(b"\r\n\r\n")[2]
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    assert body == b"".join(app.written) + b"waitedagain"
    assert 0 < len(app.written) * 13_000 < 2**20  # the sockets' buffers are small


@pytest.mark.parametrize(
    "framing",
    [
        pytest.param((b"Content-Length: 2", b"ab"), id="length"),
        pytest.param((b"Transfer-Encoding: chunked", b"2\r\nab\r\n0\r\n\r\n"), id="chunked"),
    ],
)
def test_a_request_behind_a_refused_upgrade_is_no_part_of_its_body(served, framing) -> None:
    """A proxy before us would else see two requests where we see one."""
    client, app = served
    header, body = framing
    head = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b\r\n"
    upgrade = head % b"Connection: upgrade\r\nUpgrade: h2c\r\n%b\r\n" % header
    client.sendall(upgrade + body + head % b"Content-Length: 4\r\n" + b"EVIL")
    assert rest(client).count(b"HTTP/1.1 ") == 1
    assert app.bodies == [b"ab"]


@pytest.mark.parametrize("count", [10, 1000])
def test_only_a_few_requests_wait_for_the_answer_before_them(served, count: int) -> None:
    """Each request costs a hundred times its bytes.

    Those are answered, and the connection's end shows the rest.
    """
    client, _ = served
    client.sendall(b"GET /short HTTP/1.1\r\nHost: x\r\n\r\n" * count)
    said = b""
    with suppress(ConnectionResetError):  # of what was not read
        while data := client.recv(65536):
            said += data
    assert said.count(b"HTTP/1.1 200 ") == said.count(b"short") == 9
    assert said.count(b"HTTP/1.1 ") == 9


def test_a_client_that_leaves_is_noticed_though_it_has_asked_too_much(served) -> None:
    client, app = served
    client.sendall(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
    assert app.asked.wait(PATIENCE_S)
    client.close()
    assert app.client_gone.wait(PATIENCE_S)


def test_a_client_that_leaves_is_noticed_though_it_has_asked_again(served) -> None:
    client, app = served
    client.sendall(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
    assert app.asked.wait(PATIENCE_S)
    client.sendall(b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n")
    time.sleep(0.05)
    client.close()
    assert app.client_gone.wait(PATIENCE_S)


def test_a_closed_connection_whose_client_does_not_read_is_let_go(served) -> None:
    """The answer's end, too little to be called much, waits in us after the connection has been closed."""
    client, app = served
    client.sendall(b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert app.answered.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while app.connections():
        assert time.monotonic() < deadline
        time.sleep(0.01)
