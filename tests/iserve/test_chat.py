"""``iserve chat`` against an endpoint that says all kinds of things."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fingerprint.errors import BadInputError, IserveError, NotFoundError, UnavailableError
from iserve.cli.chat import ChatLine
from tests.golden_words import Golden

DONE = b"data: [DONE]\n\n"


def chunk(text: str | None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


class Endpoint(ThreadingHTTPServer):
    """Gives every request the same answer and keeps what was asked."""

    def __init__(self, status: int, answer: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.answer = status, answer
        self.asked: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.authorizations.append(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Callable[..., Endpoint]]:
    started: list[Endpoint] = []

    def start(answer: bytes, status: int = 200) -> Endpoint:
        started.append(Endpoint(status, answer))
        threading.Thread(target=started[-1].serve_forever, args=(0.01,), daemon=True).start()
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def say(url: str, *, key: str | None = None) -> str:
    out = io.StringIO()
    ChatLine(url, "m", key=key, max_tokens=5, temperature=0.5).say("hello", out)
    return out.getvalue()


def test_the_pieces_are_put_together(endpoint: Callable[..., Endpoint]) -> None:
    server = endpoint(b": a comment\n\n" + chunk(None) + chunk("one ") + chunk("two") + DONE)
    assert say(server.url, key="isk-1") == "one two\n"
    (asked,) = server.asked
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "temperature": 0.5,
        "max_tokens": 5,
    }
    assert server.authorizations == ["Bearer isk-1"]


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b'data: {"error": {"message": "out of memory"}}\n\n',
        b'data: {"error": "odd"}\n\n',
        b"data: {\n\n",
        b"data: \xff\n\n",
        b"data: []\n\n",
        b"data: 3\n\n",
        b'data: {"choices": [{}]}\n\n',
        b'data: {"choices": 1}\n\n',
    ],
)
def test_an_answer_that_is_cut_is_never_taken_for_a_whole_one(
    endpoint: Callable[..., Endpoint], rest: bytes, golden: Golden
) -> None:
    with golden.raises("cli", UnavailableError):
        say(endpoint(chunk("one ") + rest).url)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadInputError),
        (401, BadInputError),
        (404, NotFoundError),
        (429, UnavailableError),
        (503, UnavailableError),
    ],
)
def test_a_refusal_is_told_in_the_endpoints_words(
    endpoint: Callable[..., Endpoint], status: int, kind: type[IserveError]
) -> None:
    with pytest.raises(kind, match="no such luck"):
        say(endpoint(b'{"error": {"message": "no such luck"}}', status).url)
    with pytest.raises(kind, match=str(status)):
        say(endpoint(b"<html>", status).url)


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "a\x00"])
def test_a_key_that_no_header_can_hold_is_one_error(endpoint: Callable[..., Endpoint], key: str) -> None:
    server = endpoint(DONE)
    with pytest.raises(BadInputError, match="API key"):
        say(server.url, key=key)
    assert server.asked == []


def test_nobody_there_is_one_error(endpoint: Callable[..., Endpoint]) -> None:
    server = endpoint(DONE)
    server.shutdown()
    server.server_close()
    with pytest.raises(UnavailableError, match="does not answer"):
        say(server.url)
