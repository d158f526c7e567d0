"""Looks at a worker's open ``/health``: they carry no token, for the worker may not have its port yet."""

from __future__ import annotations

from typing import NamedTuple

from daemon.profile_client import WorkerProfileSession
from tests.daemon.conftest import Node


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
