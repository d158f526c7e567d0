"""The client of many streams against a server that says exactly what a test wants, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iserve.http_stream import AnswerLostError, NotReachedError, Origin, StreamAnswer, StreamClient
from tests.waiting import PATIENCE_S

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: Application/JSON; charset=utf-8\r\nContent-Length: 4\r\n\r\nbody"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n4;x=y\r\ntwo!\r\n0\r\n\r\n"


class Server:
    """Answers every request of a connection with the next of ``answers``; None closes it without a word."""

    def __init__(self, *answers: bytes | list[bytes] | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.num_ended = 0  # connections that the other side ended

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if answer[-4:] == b"hold":  # and say no more
                    await reader.read()
                    self.num_ended += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_ended += 1
        finally:
            writer.close()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(server: Handler, test: Callable[[StreamClient, str], Awaitable[None]]) -> None:
    async def go() -> None:
        listener = await asyncio.start_server(server, "127.0.0.1", 0)
        client = StreamClient()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await test(client, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        finally:
            client.close()
            listener.close()

    asyncio.run(go())


async def post(client: StreamClient, url: str, body: bytes = b"{}", silence_s: float = PATIENCE_S) -> StreamAnswer:
    authority = url.removeprefix("http://")
    origin = Origin("127.0.0.1", int(authority.rpartition(":")[2]), authority)
    return await client.post(
        origin, "/v1/completions", b"X-Request-Id: req-1\r\n", body, silence_s=silence_s, connect_s=PATIENCE_S
    )


async def ask(
    client: StreamClient, url: str, body: bytes = b"{}", silence_s: float = PATIENCE_S
) -> tuple[int, bytes]:
    answer = await post(client, url, body, silence_s)
    parts = []
    while part := await answer.read(silence_s):
        parts.append(part)
    await answer.finish(0.0)
    return answer.status, b"".join(parts)


def test_the_request_as_it_is_sent() -> None:
    server = Server(WHOLE)

    async def test(client: StreamClient, url: str) -> None:
        answer = await post(client, url, b'{"a":1}')
        assert (answer.status, answer.content_type) == (200, b"application/json")
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        assert body == b'{"a":1}'
        assert head.splitlines()[0] == b"POST /v1/completions HTTP/1.1"
        assert b"Host: " + url.removeprefix("http://").encode() in head.splitlines()
        assert b"X-Request-Id: req-1" in head.splitlines()
        assert b"Authorization" not in head

    run(server, test)


@given(at=st.lists(st.integers(1, 200), max_size=6, unique=True), answer=st.sampled_from([WHOLE, CHUNKED]))
@settings(max_examples=30, deadline=None)
def test_an_answer_is_the_same_however_it_is_cut(at: list[int], answer: bytes) -> None:
    places = [0, *sorted(place for place in at if place < len(answer)), len(answer)]
    pieces = [answer[a:b] for a, b in pairwise(places)]

    async def test(client: StreamClient, url: str) -> None:
        assert await ask(client, url) == (200, b"body" if answer is WHOLE else b"onetwo!")

    run(Server(pieces), test)


def test_a_connection_is_used_again() -> None:
    server = Server(WHOLE, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, WHOLE)

    async def test(client: StreamClient, url: str) -> None:
        for expected in (b"body", b"onetwo!", b"body", b"body"):
            assert await ask(client, url, b"x" * 200_000) == (200, expected)

    run(server, test)
    assert server.num_connections == 1


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), id="it-says-close"),
        pytest.param(WHOLE.replace(b"1.1", b"1.0"), id="http-1.0"),
        pytest.param(WHOLE + b"HTTP/1.1 200 OK\r\n", id="it-says-more-than-it-was-asked"),
    ],
)
def test_a_connection_is_not_used_again(first: bytes) -> None:
    server = Server(first, WHOLE)

    async def test(client: StreamClient, url: str) -> None:
        try:
            assert await ask(client, url) == (200, b"body")
        except AnswerLostError:
            assert first.startswith(WHOLE)
        assert await ask(client, url) == (200, b"body")

    run(server, test)
    assert server.num_connections == 2


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async def test(client: StreamClient, url: str) -> None:
        assert await ask(client, url) == (200, b"all of it")

    run(Server(b"HTTP/1.1 200 OK\r\n\r\nall of it"), test)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(None, id="no-word"),
        pytest.param(b"\x16\x03\x01", id="no-http"),
        pytest.param(WHOLE.replace(b"200", b"099"), id="no-status"),
        pytest.param(CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 4\r\n\r\n", 1), id="two-lengths"),
        pytest.param(WHOLE.replace(b"4\r\n", b"4\r\nContent-Length: 3\r\n"), id="length-twice"),
        pytest.param(WHOLE[:30], id="cut-in-the-head"),
        pytest.param(WHOLE[:-2], id="cut-in-the-body"),
        pytest.param(CHUNKED[:-8], id="cut-in-a-chunk"),
        pytest.param(CHUNKED[:-5], id="cut-before-the-last-chunk"),
        pytest.param(CHUNKED.replace(b"4;x=y", b"no length"), id="malformed-chunk"),
        pytest.param(
            b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc", id="another-protocol"
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, id="giant-head"),
    ],
)
def test_what_is_no_answer_is_lost(answer: bytes | None) -> None:
    async def test(client: StreamClient, url: str) -> None:
        with pytest.raises(AnswerLostError):
            await ask(client, url)

    run(Server(answer), test)


def test_nobody_there_is_not_reached() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def test(client: StreamClient, url: str) -> None:
        with pytest.raises(NotReachedError):
            await ask(client, f"http://127.0.0.1:{port}")

    run(Server(), test)


def test_silence_is_bounded_by_each_wait() -> None:
    async def test(client: StreamClient, url: str) -> None:
        answer = await post(client, url)
        assert await answer.read(PATIENCE_S) == b"hold"
        with pytest.raises(TimeoutError):
            await answer.read(0.05)  # the timer of a longer wait is there already
        with pytest.raises(TimeoutError):
            await answer.read(0.05)
        answer.close()
        with pytest.raises(AnswerLostError):
            await answer.read(PATIENCE_S)

    run(Server(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhold"), test)


@given(
    sizes=st.lists(st.integers(1, 40), max_size=12),
    wanted=st.lists(st.booleans(), min_size=1, max_size=5),
)
@settings(max_examples=30, deadline=None)
def test_what_is_taken_and_what_is_read_are_the_answer_in_its_order(sizes: list[int], wanted: list[bool]) -> None:
    """The order holds however the answer arrives, and whatever of it is taken on the way."""
    places = [0, *(sum(sizes[: i + 1]) for i in range(len(sizes)))]
    answer = CHUNKED.replace(b"0\r\n\r\n", b"".join(b"5\r\n<%03d>\r\n" % i for i in range(60)) + b"0\r\n\r\n")
    pieces = [piece for a, b in pairwise([*places, len(answer)]) if (piece := answer[a:b])]
    came: list[bytes] = []
    offered: list[bool] = []

    def take(data: bytes) -> bool:
        offered.append(wanted[len(offered) % len(wanted)])
        if offered[-1]:
            came.append(data)
        return offered[-1]

    async def test(client: StreamClient, url: str) -> None:
        answer = await post(client, url)
        while part := await answer.read(PATIENCE_S, take):
            came.append(part)
        await answer.finish(0.0)
        assert b"".join(came) == b"onetwo!" + b"".join(b"<%03d>" % i for i in range(60))

    run(Server(pieces), test)


def test_what_is_taken_is_no_silence_and_what_is_not_wakes() -> None:
    """The wait lasts as long as pieces arrive; a late reader is not overtaken."""
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        if data == b"stop":
            return False
        taken.append(data)
        return True

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (*[b"goon"] * 20, b"stop", b"late"):
            await asyncio.sleep(0.02)
            writer.write(b"4\r\n%b\r\n" % piece)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def test(client: StreamClient, url: str) -> None:
        answer = await post(client, url)
        assert await answer.read(0.3, take) == b"stop"  # twenty pieces take longer than that
        assert taken == [b"goon"] * 20
        while b"late" not in (held := answer._connection._parts):
            await asyncio.sleep(0.001)
        assert taken == [b"goon"] * 20
        assert await answer.read(PATIENCE_S, take) == b"late"
        assert not held
        with pytest.raises(TimeoutError):
            await answer.read(0.05, take)
        answer.close()

    run(answer, test)


def test_a_request_that_is_cancelled_ends_its_connection() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\nX: hold")

    async def test(client: StreamClient, url: str) -> None:
        task = asyncio.create_task(ask(client, url))
        while not server.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not server.num_ended:
            await asyncio.sleep(0.001)

    run(server, test)


def test_an_answer_that_nobody_reads_is_not_held() -> None:
    """The worker is slowed down instead; read on, all of it arrives."""
    size = 16 * 2**20
    held: list[int] = []

    async def test(client: StreamClient, url: str) -> None:
        answer = await post(client, url)
        await asyncio.sleep(0.1)
        first = await answer.read(PATIENCE_S)
        held.append(len(first))
        total = len(first)
        while part := await answer.read(PATIENCE_S):
            total += len(part)
        assert total == size

    run(Server([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size]), test)
    assert held[0] < 2**20


class Deaf:
    """Answers at once and reads no body."""

    def __init__(self, answer: bytes, *, ends: bool) -> None:
        self.answer, self.ends = answer, ends
        self.num_connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(self.answer)
        if self.ends:
            writer.write_eof()
        with suppress(ConnectionError):
            await writer.wait_closed()


LARGE = b"x" * (32 * 2**20)  # more than fits into the sockets' buffers


def test_a_connection_on_which_a_body_is_still_under_way_is_not_used_again() -> None:
    """The next request would wait behind what the worker, which has answered, does not read."""

    async def test(client: StreamClient, url: str) -> None:
        assert await ask(client, url, LARGE) == (200, b"body")
        assert await ask(client, url) == (200, b"body")

    server = Deaf(WHOLE, ends=False)
    run(server, test)
    assert server.num_connections == 2


@pytest.mark.parametrize("answer", [WHOLE[:-2], b""])
def test_a_worker_that_says_no_more_is_lost_though_it_reads_no_more_either(answer: bytes) -> None:
    async def test(client: StreamClient, url: str) -> None:
        with pytest.raises(AnswerLostError):
            await ask(client, url, LARGE)

    run(Deaf(answer, ends=True), test)


def test_a_body_ends_with_the_workers_side_though_it_reads_no_more() -> None:
    async def test(client: StreamClient, url: str) -> None:
        assert await ask(client, url, LARGE) == (200, b"all of it")

    run(Deaf(b"HTTP/1.1 200 OK\r\n\r\nall of it", ends=True), test)


def endless(beginning: bytes, piece: bytes, pause_s: float = 0.0) -> Handler:
    """Return a handler that repeats ``piece`` for as long as a client is there."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            writer.write(beginning)
            while not writer.is_closing():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)

    return answer


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        pytest.param(CHUNKED[:-2] + b"X: ", b"a" * 2**16, id="one-trailer"),
        pytest.param(CHUNKED[:-2], b"X: a\r\n" * 2**13, id="trailers"),
        pytest.param(CHUNKED[:-5] + b"1;", b"a" * 2**16, id="chunk-extension"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, id="interim-answers"),
    ],
)
def test_what_is_no_part_of_the_body_has_an_end(beginning: bytes, piece: bytes) -> None:
    """Else it would be held, or listened to, for ever."""

    async def test(client: StreamClient, url: str) -> None:
        with pytest.raises(AnswerLostError):
            await ask(client, url)

    run(endless(beginning, piece), test)


@pytest.mark.parametrize("beginning", [b"HTTP/1.1 200 OK\r\nX: ", CHUNKED[:-5] + b"1;"])
def test_what_a_worker_trickles_beside_its_answer_is_silence(beginning: bytes) -> None:
    async def test(client: StreamClient, url: str) -> None:
        with pytest.raises(TimeoutError):
            await ask(client, url, silence_s=0.1)

    run(endless(beginning, b"a", 0.01), test)


def test_headers_of_an_interim_answer_are_not_those_of_the_answer() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n"

    async def test(client: StreamClient, url: str) -> None:
        answer = await post(client, url)
        assert (answer.content_type, await answer.read(PATIENCE_S)) == (b"", b"all of it")
        assert await answer.read(PATIENCE_S) == b""

    run(Server(hints + b"HTTP/1.1 200 OK\r\n\r\nall of it"), test)


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_that_has_no_body_by_its_status(status: int) -> None:
    bare = b"HTTP/1.1 %d None\r\nContent-Length: 4\r\n\r\n" % status
    server = Server(bare, WHOLE)

    async def test(client: StreamClient, url: str) -> None:
        assert await ask(client, url) == (status, b"")
        assert await ask(client, url) == (200, b"body")

    run(server, test)
    assert server.num_connections == 1


def test_an_idle_connection_that_has_just_ended_is_not_taken() -> None:
    """Taking it would cost a request one of its two tries."""

    async def test(client: StreamClient, url: str) -> None:
        assert await ask(client, url) == (200, b"body")
        (connection,) = client._open
        connection._transport.close()  # as at its end; the loop has not yet reported it
        assert await ask(client, url) == (200, b"body")

    run(Server(WHOLE, WHOLE), test)
