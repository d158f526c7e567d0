"""The command line's request for a deploy: repeated under one key until it is answered, by any controller."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from daemon.process import own_record, write_record
from fingerprint.codec import to_json
from fingerprint.errors import (
    BusyError,
    ConflictError,
    EngineError,
    IserveError,
    NoAnswerError,
    NotFoundError,
    UnavailableError,
)
from iserve import client
from iserve.api_documents import DeploymentDocument
from iserve.cli import update
from iserve.cli.app import make_app
from iserve.cli.deploy import accepted_by, wait_until_ready
from iserve.client import ControllerClient, check_running_settings, post_once, post_when_free
from iserve.settings import Settings
from tests.golden_words import Golden

Answer = tuple[int, object] | None  # None: the connection ends without one

DOCUMENT = DeploymentDocument(
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


class Peer:
    """Reads one request per connection and gives the next of its answers."""

    def __init__(self, answers: list[Answer]) -> None:
        self.keys: list[str] = []
        self.asked: list[str] = []
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
                self.asked.append(lines.readline().decode().rpartition(" ")[0])
                while line := lines.readline().strip():
                    name, _, value = line.decode().partition(": ")
                    headers[name.lower()] = value
                self.bodies.append(lines.read(int(headers.get("content-length", 0))))
                self.keys.append(headers.get("idempotency-key", ""))
                if answer is not None:
                    said = answer[1]
                    body = to_json(said) if isinstance(said, DeploymentDocument) else json.dumps(said).encode()
                    head = f"HTTP/1.1 {answer[0]} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                    connection.sendall(head.encode() + body)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_POST_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(client, "_FREE_PAUSES_S", (0.0, 0.0))


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.close()


def test_a_lost_answer_is_asked_for_again_under_the_same_key(peers: list[Peer]) -> None:
    """Another controller is asked, should there be one by then."""
    unwritten = (503, {"error": "StateUnavailableError", "message": "wait"})
    peers += [Peer([None]), Peer([unwritten, (202, {"name": "a"})])]
    urls = iter([peers[0].url, peers[1].url, peers[1].url])
    answered, answer = post_once(lambda: ControllerClient(next(urls), "t"), "/x", {"n": 1}, dict[str, str], "k")
    assert answer == {"name": "a"}
    assert answered.get is not None
    assert [key for peer in peers for key in peer.keys] == ["k"] * 3
    assert [body for peer in peers for body in peer.bodies] == [b'{"n":1}'] * 3


@pytest.mark.parametrize(
    ("status", "error"), [(409, ConflictError), (404, NotFoundError), (503, UnavailableError)], ids=str
)
def test_a_refusal_is_an_answer(peers: list[Peer], status: int, error: type[IserveError]) -> None:
    """The refusal is passed on: a model that the hub cannot be asked about was not accepted."""
    peers.append(Peer([(status, {"error": error.__name__, "message": "no such model"})]))
    with pytest.raises(error, match=r"^no such model$"):
        post_once(lambda: ControllerClient(peers[0].url, "t"), "/x", {}, dict[str, str], "k")
    assert peers[0].keys == ["k"]


BUSY: Answer = (503, {"error": "UnavailableError", "message": "256 wait", "is_busy": True})


def post_to(peer: Peer, patience_s: float = 300.0) -> dict[str, str]:
    return post_when_free(ControllerClient(peer.url, "t"), "/x", {"n": 1}, dict[str, str], patience_s=patience_s)


def test_a_busy_controller_and_one_that_ends_connections_are_asked_again(peers: list[Peer]) -> None:
    peers.append(Peer([BUSY, None, None, BUSY, (201, {"name": "a"})]))
    assert post_to(peers[0]) == {"name": "a"}
    assert peers[0].bodies == [b'{"n":1}'] * 5


def test_a_busy_controller_is_asked_for_as_long_as_was_said(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FREE_PAUSES_S", (1.0, 1.0))  # the next would end after the patience
    peers.append(Peer([BUSY]))
    with pytest.raises(BusyError, match=r"^256 wait$"):
        post_to(peers[0], patience_s=0.5)


@pytest.mark.parametrize("status", [400, 404, 409, 503])
def test_what_a_pause_does_not_mend_is_not_asked_again(peers: list[Peer], status: int) -> None:
    """A full disk is a 503, too."""
    peers.append(Peer([(status, {"error": "UnavailableError", "message": "the disk is full"})]))
    with pytest.raises(UnavailableError, match="full"):
        post_to(peers[0])
    assert len(peers[0].bodies) == 1


@pytest.mark.parametrize(("bound", "answers"), [("_RESET_S", 1), ("_REFUSED_S", 0)])
def test_a_controller_that_has_gone_is_not_asked_for_ever(
    peers: list[Peer], bound: str, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.append(Peer([None] * answers))
    monkeypatch.setattr(client, bound, -1.0)
    if not answers:
        peers[0].close()
    with pytest.raises(NoAnswerError):
        post_to(peers[0])


def test_in_the_end_it_says_how_to_ask_again(peers: list[Peer], golden: Golden) -> None:
    peers.append(Peer([None] * 3))
    with golden.raises("cli", UnavailableError):
        post_once(lambda: ControllerClient(peers[0].url, "t"), "/x", {}, dict[str, str], "k")


def test_it_says_so_too_when_there_is_no_controller_any_more(peers: list[Peer], golden: Golden) -> None:
    peers.append(Peer([None]))
    first = [ControllerClient(peers[0].url, "t")]

    def connect() -> ControllerClient:
        if first:
            return first.pop()
        raise UnavailableError("the controller did not start")

    with golden.raises("cli", UnavailableError):
        post_once(connect, "/x", {}, dict[str, str], "k")


def test_without_a_controller_from_the_beginning_nothing_was_asked(golden: Golden) -> None:
    def connect() -> ControllerClient:
        raise UnavailableError("the controller did not start")

    with golden.raises("cli", UnavailableError):
        post_once(connect, "/x", {}, dict[str, str], "k")


def test_a_later_deployment_of_the_same_name_is_not_the_one_that_was_asked_for(
    peers: list[Peer], golden: Golden
) -> None:
    """The failure of the later one is not ours to clear away."""
    another = replace(DOCUMENT, created_at=2000.5, status="failed", error="out of memory")
    peers.append(Peer([(200, json.loads(to_json(another)))]))
    with golden.raises("cli", NotFoundError):
        wait_until_ready(ControllerClient(peers[0].url, "t"), DOCUMENT, quiet=True)


@pytest.mark.parametrize(
    "later",
    [
        pytest.param([(404, {"error": "NotFoundError", "message": "not the one"})], id="before the removal"),
        pytest.param([(202, {}), (200, replace(DOCUMENT, created_at=2000.5))], id="after it"),
    ],
)
def test_a_failed_deployment_is_removed_and_not_one_that_took_its_name(
    peers: list[Peer], later: list[Answer]
) -> None:
    """Another client, which followed the same deployment, may have deployed anew."""
    failed = replace(DOCUMENT, status="failed", error="out of memory")
    peers.append(Peer([(200, failed), *later]))
    with pytest.raises(EngineError, match="out of memory"):
        wait_until_ready(ControllerClient(peers[0].url, "t"), DOCUMENT, quiet=True)
    path = "/api/v1/deployments/a"
    assert peers[0].asked == [f"GET {path}", f"DELETE {path}?created_at=1000.25", f"GET {path}"][: len(later) + 1]


def test_an_update_is_followed_on_the_controller_that_takes_the_place_of_one_that_was_killed(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None may run for a while, and the next one may have another address."""
    updating = replace(DOCUMENT, status="ready", updating=True)
    peers.append(Peer([(200, updating), None, None]))
    peers.append(Peer([(200, updating), (200, replace(updating, updating=False))]))
    second = ControllerClient(peers[1].url, "t")
    found: Iterator[ControllerClient | None] = iter([None, second])

    def connect(*, start: bool) -> ControllerClient:
        assert not start
        if (one := next(found)) is None:
            raise UnavailableError("no controller runs")
        return one

    monkeypatch.setattr("iserve.cli.connection.client", connect)
    first = ControllerClient(peers[0].url, "t")
    assert update._follow(first, updating, stop_first=False, as_json=True) is second
    assert len(peers[1].asked) == 2


def test_an_update_that_no_controller_answers_for_ends(monkeypatch: pytest.MonkeyPatch, peers: list[Peer]) -> None:
    monkeypatch.setattr(update, "_SILENT_S", 0.0)
    peers.append(Peer([None]))
    with pytest.raises(UnavailableError, match="the controller"):
        update._follow(
            ControllerClient(peers[0].url, "t"), replace(DOCUMENT, updating=True), stop_first=False, as_json=True
        )


def test_a_deploy_that_failed_before_is_removed_and_tried_again(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    accepted = json.loads(to_json(DOCUMENT))
    failed = accepted | {"status": "failed", "error": "out of memory"}
    gone = (404, {"error": "NotFoundError", "message": "no deployment is named 'a'"})
    peers.append(Peer([(202, failed), (202, failed), gone, (202, accepted)]))
    monkeypatch.setattr("iserve.cli.connection.client", lambda: ControllerClient(peers[0].url, "t"))
    _, answer = accepted_by({"name": "a"}, "k", quiet=False)
    assert answer == DOCUMENT
    golden("cli", capsys.readouterr().err)


def test_a_plan_for_this_machine_where_no_controller_starts_names_the_way_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """A home that cannot be written, say."""

    def connect(*_arguments: object) -> ControllerClient:
        raise UnavailableError("the home cannot be written")

    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    monkeypatch.setattr("iserve.cli.connection.client", connect)
    result = CliRunner().invoke(make_app(), ["plan", "iserve-demo"])
    golden("cli", str(result.exception))


@pytest.mark.parametrize(
    ("running", "given"),
    [
        ({}, {"require_keys": True}),
        ({"require_keys": True}, {}),
        ({}, {"host": "0.0.0.0"}),
        ({}, {"port": 9000}),
        ({}, {"api_port": 9001}),
        ({}, {"database_url": "postgresql://u:secret@h/d"}),
        (
            {"database_url": "postgresql://u:secret@h/d?password=secret&host=/run/pg"},
            {"database_url": "postgresql://u:secret@h/e?password=secret"},
        ),
    ],
    ids=str,
)
def test_settings_that_a_running_home_does_not_have_are_refused(
    tmp_path: Path, running: dict[str, Any], given: dict[str, Any], golden: Golden
) -> None:
    """Else a person believes that keys are required, and they are not."""
    home = Settings(home=tmp_path, **running)
    settings = Settings(home=tmp_path, **given)
    check_running_settings(settings)  # nothing runs
    write_record(
        home.run_folder / "controller.json",
        own_record(url="http://127.0.0.1:1", token="", settings=home.recorded()),
    )
    check_running_settings(home)
    with pytest.raises(ConflictError) as caught:
        check_running_settings(settings)
    assert "secret" not in str(caught.value)
    golden("controller", str(caught.value))


def test_a_gateway_that_outlived_its_controller_keeps_its_address(tmp_path: Path) -> None:
    """A controller on loopback would require keys of no client that reaches that gateway."""
    record = own_record(url="", token="", settings={"ISERVE_HOST": "0.0.0.0", "ISERVE_PORT": "8080"})
    write_record(tmp_path / "run" / "gateway.json", record)
    check_running_settings(Settings(home=tmp_path, host="0.0.0.0"))
    with pytest.raises(ConflictError, match=r"ISERVE_HOST is 0\.0\.0\.0, not 127\.0\.0\.1; run"):
        check_running_settings(Settings(home=tmp_path))


def test_records_of_an_older_release_say_nothing_of_settings_and_no_record_holds_a_password(
    tmp_path: Path,
) -> None:
    for name in ("controller", "gateway"):
        write_record(tmp_path / "run" / f"{name}.json", own_record(url="http://127.0.0.1:1", token=""))
    check_running_settings(Settings(home=tmp_path, require_keys=True, port=9000))
    for url in (
        "postgresql://u:secret@h/d",
        "postgresql://[h/d?password=secret",
        "postgresql:///d?password=secret",
    ):
        assert "secret" not in str(Settings(home=tmp_path, database_url=url).recorded())


def test_a_new_password_of_the_same_database_is_no_other_setting(tmp_path: Path) -> None:
    before, now = (
        Settings(home=tmp_path, database_url=f"postgresql://u:{word}@h/d?sslpassword={word}") for word in "ab"
    )
    record = own_record(url="http://127.0.0.1:1", token="", settings=before.recorded())
    write_record(tmp_path / "run" / "controller.json", record)
    check_running_settings(now)
