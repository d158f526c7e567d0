"""Connections to the REST API that never send a request are bounded: a real server, real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from iserve.controller.http_protocol import BoundedProtocol
from tests.waiting import PATIENCE_S


class Impatient(BoundedProtocol):
    max_connections = 8
    arrive_s = 0.3


class Unhurried(BoundedProtocol):
    max_connections = 8


begun = threading.Event()


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body, takes its time, and says how long the body was."""
    begun.set()
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    await asyncio.sleep(4 * Impatient.arrive_s)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": str(length).encode()})


@pytest.fixture
def serve() -> Iterator[Callable[[type[BoundedProtocol]], int]]:
    """``serve(Impatient)``: the port of a server that speaks it."""
    ended: list[Callable[[], None]] = []

    def start(protocol: type[BoundedProtocol]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(
                slow_app,
                loop="asyncio",  # as the controller
                http=protocol,
                lifespan="off",
                log_config=None,
                timeout_keep_alive=30,
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def end() -> None:
            server.should_exit = server.force_exit = True
            thread.join()
            listener.close()

        ended.append(end)
        return int(listener.getsockname()[1])

    yield start
    for end in ended:
        end()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def answer(connection: socket.socket) -> bytes:
    """Return all that arrives until the other side closes, or the one byte of a body."""
    data = b""
    try:
        while not data.partition(b"\r\n\r\n")[2] and (more := connection.recv(4096)):
            data += more
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HT",
        b"GET / HTTP/1.1\r\nHost: a\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
    ],
    ids=["nothing", "half-a-line", "half-a-head", "half-a-body"],
)
def test_a_request_that_does_not_arrive_is_given_up(serve: Callable[..., int], sent: bytes) -> None:
    with connect(serve(Impatient)) as connection:
        connection.sendall(sent)
        assert answer(connection) == b""


@pytest.mark.slow
def test_an_answer_may_take_longer_than_a_request(serve: Callable[..., int]) -> None:
    with connect(serve(Impatient)) as connection:
        for _ in range(2):  # on one connection
            connection.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody")
            assert answer(connection).endswith(b"\r\n\r\n4")
        assert answer(connection) == b""  # and then it is closed


def test_who_says_nothing_gives_way_to_who_asks(serve: Callable[..., int]) -> None:
    port = serve(Unhurried)
    begun.clear()
    with connect(port) as early:
        early.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert begun.wait(PATIENCE_S)  # being answered: it is not sent away
        silent = [connect(port) for _ in range(40)]
        try:
            with connect(port) as late:
                late.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert answer(late).startswith(b"HTTP/1.1 200")
            assert answer(early).startswith(b"HTTP/1.1 200")
            for connection in silent[: 40 - Unhurried.max_connections]:
                assert answer(connection) == b""
        finally:
            for connection in silent:
                connection.close()
