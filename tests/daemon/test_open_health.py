"""A worker's token is sent neither to the open ``/health`` nor to a stranger on a port the worker has not yet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from daemon import port_owner
from daemon.port_owner import is_listening
from daemon.profile_client import WorkerProfileSession
from daemon.status import WorkerState
from tests.daemon.conftest import Node
from tests.daemon.stranger import Stranger
from tests.golden_words import Golden


class Handle(NamedTuple):
    url: str
    token: str

    def failure(self) -> None:
        return None

    def stop(self) -> None:
        return None


def test_neither_the_daemon_nor_a_profile_sends_the_token_there(node: Node) -> None:
    """The stand-in's ``/health`` answers 400 to a request with one."""
    node.start()
    status = node.ready()
    assert status.token is not None
    WorkerProfileSession(Handle(status.url, status.token), call_timeout_s=30).wait_ready(timeout_s=0)


def test_a_stranger_on_the_port_of_a_loading_worker_is_not_taken_for_it(
    node: Node, until: Callable[..., object], tmp_path: Path, golden: Golden
) -> None:
    node.start()
    node.behave(bind_file=str(tmp_path / "loaded"))
    stranger, port = Stranger(), node.client.launch(node.spec()).spec.port
    with stranger.listening(port):
        until(lambda: len(stranger.asked) >= 5)
        status = node.client.worker("w1")
    assert status.state is WorkerState.STARTING
    golden.hide(port, "PORT")
    golden("daemon", status.error or "")
    assert set(stranger.asked) == {("/health", None)}
    assert node.daemon_log.count("another process listens") == 1
    until(lambda: node.client.worker("w1").error is None)  # it has left
    (tmp_path / "loaded").touch()
    assert node.wait("w1", WorkerState.READY).error is None


def test_a_worker_that_waits_for_its_port_in_vain_says_why(node: Node, golden: Golden) -> None:
    node.start(start_timeout_s=2.0, restart={"max_starts": 1, "window_s": 600.0})
    node.behave(bind_file="/no such file")
    with Stranger().listening(node.client.launch(node.spec()).spec.port):
        status = node.wait("w1", WorkerState.FAILED)
    golden("daemon", status.error or "")


@pytest.fixture
def child() -> Iterator[tuple[int, int]]:
    """A process, and the port that it listens on."""
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate(b"\n")


def test_a_port_is_of_the_process_that_listens_on_it(child: tuple[int, int]) -> None:
    pid, port = child
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_connection(own.getsockname()) as joined:
        assert is_listening([pid], port)
        assert is_listening([pid], own.getsockname()[1]) is False
        assert is_listening([2**22 + 1], port) is False  # no such process
        mine = os.getpid()
        assert is_listening([2**22 + 1, mine], own.getsockname()[1])
        assert is_listening([mine], joined.getsockname()[1]) is False  # has it, and does not listen


def test_what_cannot_be_seen_is_neither_the_workers_nor_a_strangers(
    child: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, port = child

    def hidden(asked: int, _inodes: frozenset[str]) -> bool:
        raise PermissionError(f"/proc/{asked}/fd")

    with monkeypatch.context() as patch:
        patch.setattr(port_owner, "_holds", hidden)
        assert is_listening([pid], port) is None
    assert is_listening([pid], port)
    monkeypatch.setattr(port_owner, "_TABLES", ())  # a sandbox that lists no socket, not even our own
    port_owner._is_shown.cache_clear()
    try:
        assert is_listening([pid], port) is None
    finally:
        port_owner._is_shown.cache_clear()
