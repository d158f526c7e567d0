"""The command line's request for a deploy: repeated under one key until it is answered, whoever answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fingerprint.codec import to_json
from fingerprint.errors import ConflictError, NotFoundError, UnavailableError
from iserve import client
from iserve.api_types import DeploymentDocument
from iserve.cli.serving import _follow
from iserve.client import ControllerClient, post_once

Answer = tuple[int, object] | None  # None: the connection ends without one


class Peer:
    """Reads one request per connection and gives the next of its answers."""

    def __init__(self, answers: list[Answer]) -> None:
        self.keys: list[str] = []
        self.bodies: list[bytes] = []
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for answer in self._answers:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as lines:
                headers = {}
                while line := lines.readline().strip():
                    name, _, value = line.decode().partition(": ")
                    headers[name.lower()] = value
                self.bodies.append(lines.read(int(headers.get("content-length", 0))))
                self.keys.append(headers.get("idempotency-key", ""))
                if answer is not None:
                    body = json.dumps(answer[1]).encode()
                    head = f"HTTP/1.1 {answer[0]} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                    connection.sendall(head.encode() + body)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_POST_PAUSES_S", (0.0, 0.0, 0.0))


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.close()


def test_a_lost_answer_is_asked_for_again_under_the_same_key(peers: list[Peer]) -> None:
    """Of another controller, should there be one by then."""
    peers += [Peer([None]), Peer([(503, {"error": "UnavailableError", "message": "wait"}), (202, {"name": "a"})])]
    urls = iter([peers[0].url, peers[1].url, peers[1].url])
    answered, answer = post_once(lambda: ControllerClient(next(urls), "t"), "/x", {"n": 1}, dict[str, str], "k")
    assert answer == {"name": "a"}
    assert answered.get is not None
    assert [key for peer in peers for key in peer.keys] == ["k"] * 3
    assert [body for peer in peers for body in peer.bodies] == [b'{"n":1}'] * 3


def test_a_refusal_is_an_answer(peers: list[Peer]) -> None:
    peers.append(Peer([(409, {"error": "ConflictError", "message": "taken"})]))
    with pytest.raises(ConflictError, match="taken"):
        post_once(lambda: ControllerClient(peers[0].url, "t"), "/x", {}, dict[str, str], "k")


def test_in_the_end_it_says_how_to_ask_again(peers: list[Peer]) -> None:
    peers.append(Peer([None] * 3))
    with pytest.raises(UnavailableError, match="not known: the same command with --idempotency-key k asks again"):
        post_once(lambda: ControllerClient(peers[0].url, "t"), "/x", {}, dict[str, str], "k")


def test_it_says_so_too_when_there_is_no_controller_any_more(peers: list[Peer]) -> None:
    peers.append(Peer([None]))
    first = [ControllerClient(peers[0].url, "t")]

    def connect() -> ControllerClient:
        if first:
            return first.pop()
        raise UnavailableError("the controller did not start")

    with pytest.raises(UnavailableError, match=r"did not start; whether it was accepted .* --idempotency-key k"):
        post_once(connect, "/x", {}, dict[str, str], "k")


def test_without_a_controller_from_the_beginning_nothing_was_asked() -> None:
    def connect() -> ControllerClient:
        raise UnavailableError("the controller did not start")

    with pytest.raises(UnavailableError, match=r"^the controller did not start$"):
        post_once(connect, "/x", {}, dict[str, str], "k")


def test_a_later_deployment_of_the_same_name_is_not_the_one_that_was_asked_for(peers: list[Peer]) -> None:
    """Its failure is not ours to clear away."""
    accepted = DeploymentDocument(
        name="a",
        model="m",
        intent="min-cost",
        status="accepted",
        error=None,
        base_url=None,
        config=None,
        layers_per_stage=(),
        device_ids=(),
        worker_url=None,
        restarts=0,
        created_at=1000.25,
    )
    another = replace(accepted, created_at=2000.5, status="failed", error="out of memory")
    peers.append(Peer([(200, json.loads(to_json(another)))]))
    with pytest.raises(NotFoundError, match="a was accepted, and has been removed since"):
        _follow(ControllerClient(peers[0].url, "t"), accepted, as_json=True)
