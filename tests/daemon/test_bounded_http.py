"""Connections to an aiohttp server that never send a request are bounded: a real server, real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web

from daemon.bounded_http import BoundedRunner

WAIT_S = 30.0  # only a hang runs into it
MOST = 8


class Served:
    """A server in a thread of its own."""

    def __init__(self, wait_s: float) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._wait_s, self._up = wait_s, threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=[self._run()])
        self._thread.start()
        assert self._up.wait(WAIT_S)

    async def _run(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.add_routes([web.post("/", self._answer), web.post("/unread", self._refuse)])
        runner = BoundedRunner(app, most=MOST, wait_s=self._wait_s, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._up.set()
        await self._leave.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        """The length of the body, after some time."""
        body = await request.read()
        self.begun.set()
        await asyncio.to_thread(self.go_on.wait)
        return web.Response(text=str(len(body)))

    async def _refuse(self, _request: web.Request) -> web.Response:
        return web.Response(status=401)

    def end(self) -> None:
        self.go_on.set()
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join()

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        connection.sendall(sent)
        return connection


@pytest.fixture
def serve() -> Iterator[Callable[[float], Served]]:
    begun: list[Served] = []

    def start(wait_s: float) -> Served:
        begun.append(Served(wait_s))
        return begun[-1]

    yield start
    for served in begun:
        served.end()


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side has closed it; waits for that."""
    try:
        return connection.recv(4096) == b""
    except ConnectionResetError:
        return True


WHOLE = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody"


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost: a\r\n", WHOLE[:-1]],
    ids=["nothing", "half-a-line", "half-a-head", "half-a-body"],
)
def test_a_request_that_does_not_arrive_is_given_up(serve: Callable[[float], Served], sent: bytes) -> None:
    with serve(0.3).connect(sent) as connection:
        assert is_closed(connection)


def test_a_body_that_comes_after_its_answer_keeps_no_connection(serve: Callable[[float], Served]) -> None:
    with serve(0.3).connect(WHOLE.replace(b"POST /", b"POST /unread")[:-1]) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        connection.sendall(b"y")
        assert is_closed(connection)


def test_an_answer_may_take_longer_than_a_request(serve: Callable[[float], Served]) -> None:
    served = serve(0.1)
    with served.connect(WHOLE) as connection, served.connect() as silent:
        assert served.begun.wait(WAIT_S)
        assert is_closed(silent)
        served.go_on.set()
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_beyond_the_limit_those_that_ask_nothing_give_way(serve: Callable[[float], Served]) -> None:
    served = serve(WAIT_S)
    with served.connect(WHOLE) as early:
        assert served.begun.wait(WAIT_S)
        silent = [served.connect() for _ in range(40)]
        try:
            for connection in silent[: 40 - MOST]:
                assert is_closed(connection)
            served.go_on.set()
            assert early.recv(4096).startswith(b"HTTP/1.1 200")
            with served.connect(WHOLE) as late:
                assert late.recv(4096).startswith(b"HTTP/1.1 200")
        finally:
            for connection in silent:
                connection.close()
