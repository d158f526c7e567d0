"""Ends of messages, against h11: bytes that are almost HTTP, cut anywhere, in the gateway's own protocols.

Ours may refuse what h11 takes (it is the stricter of the two), but never read another body out of the same bytes,
and never another one because they arrived in other pieces.
"""

from __future__ import annotations

import asyncio
import itertools
from itertools import pairwise
from typing import Any

import h11
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from iserve import http_stream
from iserve.gateway.http_server import GatewayProtocol
from iserve.http_stream import AnswerLostError, Origin, StreamClient

law = settings(max_examples=120, deadline=None)

ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n4;x=y\r\ntwo!\r\n0\r\nT: u\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\nall of it",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 304 Not\r\nContent-Length: 9\r\n\r\n",
]
HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\n"
REQUESTS = [
    HEAD + b"Content-Length: 2\r\n\r\nab",
    HEAD + b"Content-Length: 2\r\n\r\nabGET /y HTTP/1.1\r\nHost: a\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\nT: u\r\n\r\n",
    HEAD
    + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab"
    + HEAD
    + b"Content-Length: 1\r\n\r\nz",
    HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n" + HEAD,
]
SPLINTERS = [b"\r\n", b"\n", b"\r", b" ", b"\t", b"0", b"2", b"a", b":", b";", b",", b"\0", b"\xff"]
SPLINTERS += [b"Content-Length: 2\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n"]
SPLINTERS += [b"Connection: close\r\n", b"Connection: upgrade\r\nUpgrade: x\r\n", b"Expect: 100-continue\r\n"]


@st.composite
def almost(draw: st.DrawFn, originals: list[bytes]) -> tuple[bytes, list[bytes]]:
    """Bytes, and the same in pieces."""
    data = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.integers(0, 3))
        data = data[:at] + draw(st.sampled_from([b"", *SPLINTERS])) + data[at + gone :]
    cuts = draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=6))
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    return data, [data[a:b] for a, b in pairwise(places) if b > a]


class Wire(asyncio.Transport):
    """Takes what is written, and closes."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: Any) -> None: ...

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def fed(protocol: asyncio.BufferedProtocol, piece: bytes) -> None:
    protocol.get_buffer(-1)[: len(piece)] = piece
    protocol.buffer_updated(len(piece))


async def answer_of_ours(pieces: list[bytes]) -> tuple[int, bytes] | None:
    client, wire = StreamClient(), Wire()
    connection = http_stream._Connection(asyncio.get_running_loop(), client, Origin("127.0.0.1", 1, "127.0.0.1:1"))
    connection.connection_made(wire)

    async def ask() -> tuple[int, bytes] | None:
        try:
            answer = await connection.ask(b"", b"", 20.0)
            body = b""
            while part := await answer.read(20.0):
                body += part
        except AnswerLostError:
            return None
        return answer.status, body

    task = asyncio.create_task(ask())
    for piece in pieces:
        await asyncio.sleep(0)
        if not wire.closed:
            fed(connection, piece)
    if not wire.closed:
        connection.eof_received()
    connection.connection_lost(None)
    return await task


@law
@given(
    turns=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    wanted=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_what_is_taken_on_the_way_is_not_overtaken_nor_overtakes(turns: list[int], wanted: list[bool]) -> None:
    """Pieces may arrive before the task that was woken for the one before had its turn."""

    async def pieces_in_order() -> list[bytes]:
        loop, came, offers = asyncio.get_running_loop(), [], itertools.cycle(wanted)
        connection = http_stream._Connection(loop, StreamClient(), Origin("127.0.0.1", 1, "127.0.0.1:1"))
        connection.connection_made(Wire())

        def take(data: bytes) -> bool:
            is_wanted = next(offers)
            if is_wanted:
                came.append(data)
            return is_wanted

        async def ask() -> None:
            answer = await connection.ask(b"", b"", 20.0)
            while part := await answer.read(20.0, take):
                came.append(part)

        task = asyncio.create_task(ask())
        await asyncio.sleep(0)
        fed(connection, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, num_turns in enumerate(turns):
            for _ in range(num_turns):
                await asyncio.sleep(0)
            fed(connection, b"4\r\n%04d\r\n" % number)
        fed(connection, b"0\r\n\r\n")
        await task
        connection.connection_lost(None)
        return came

    assert b"".join(asyncio.run(pieces_in_order())) == b"".join(b"%04d" % number for number in range(len(turns)))


def answer_of_h11(data: bytes) -> tuple[int, bytes] | None:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "a"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, b""
    try:
        connection.receive_data(data)
        connection.receive_data(b"")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None
    return status, body


@law
@given(almost(ANSWERS))
def test_an_answer_has_the_body_that_h11_reads_or_none(sent: tuple[bytes, list[bytes]]) -> None:
    data, pieces = sent
    ours = asyncio.run(answer_of_ours([data]))
    assert asyncio.run(answer_of_ours(pieces)) == ours
    theirs = answer_of_h11(data)
    assert ours is None or theirs is None or ours == theirs


async def bodies_of_ours(pieces: list[bytes]) -> list[tuple[str, bytes]]:
    """Return method and body of each request that arrived whole."""
    asked: list[tuple[str, bytes]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        asked.append((scope["method"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
    config.load()
    protocol, wire = GatewayProtocol(config, ServerState(), {}), Wire()
    protocol.connection_made(wire)
    for piece in pieces:
        if not wire.closed:
            fed(protocol, piece)
        for _ in range(8):  # a request is answered before the next piece arrives
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    await asyncio.sleep(0)
    return asked


def first_of_h11(data: bytes) -> tuple[str, bytes] | None:
    connection = h11.Connection(h11.SERVER)
    method, body = "", b""
    try:
        connection.receive_data(data)
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Request):
                method = event.method.decode()
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return None
    except h11.RemoteProtocolError:
        return None
    return method, body


@law
@given(almost(REQUESTS))
def test_a_request_has_the_body_that_h11_reads_or_is_refused(sent: tuple[bytes, list[bytes]]) -> None:
    data, pieces = sent
    whole, cut = asyncio.run(bodies_of_ours([data])), asyncio.run(bodies_of_ours(pieces))
    # What follows a request in the same piece and is no HTTP refuses it too; else they are the same.
    assert whole == cut or not whole
    theirs = first_of_h11(data)
    assert not cut or theirs is None or cut[0] == theirs
