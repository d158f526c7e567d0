"""A home as its processes find and keep it: private, with records that return, and limits on files raised."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROLES = ("controller", "daemon", "gateway")


@pytest.fixture
def low_soft_limit() -> Iterator[int]:
    """On open files, for what is started; the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def soft_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


def mode(folder: Path) -> int:
    return folder.stat().st_mode & 0o777


def test_a_home_is_closed_to_others_and_its_processes_survive_the_loss_of_their_records(
    make_installation: Callable[..., Any], until: Callable[..., Any], low_soft_limit: int
) -> None:
    """An older release left it open; a record that is lost by accident ended a gateway that served."""
    installation = make_installation()
    home, run = installation.home, installation.home / "run"
    for folder in (home, run, home / "workers"):
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)  # whatever the umask
    for name in ("routes", *ROLES):
        (run / f".{name}.json.a1b2c3d4").write_text("of a process that was killed while it wrote")
    (home / "workers" / "w1").mkdir()
    (home / "workers" / "w1" / ".lease.json.a1b2c3d4").touch()
    installation.run("up")
    assert {mode(home / part) for part in (".", "run", "logs", "workers")} == {0o700}
    assert [*run.glob(".*"), *home.glob("workers/*/.*.json.*")] == []
    records = {role: installation.record(role) for role in ROLES}
    assert {soft_limit(record.pid) for record in records.values()} == {min(low_soft_limit, 65_536)}
    for role in ROLES:
        (run / f"{role}.json").unlink()
    until(lambda: all((run / f"{role}.json").exists() for role in ROLES), "the records are back")
    assert {role: installation.record(role) for role in ROLES} == records
    assert len(installation.processes()) == len(ROLES)
    installation.run("down")
    assert list(run.glob("*.json")) == [run / "routes.json"]


def test_a_fresh_home_is_closed_to_others(make_installation: Callable[..., Any]) -> None:
    installation = make_installation()
    old = os.umask(0o022)
    try:
        installation.run("up")
    finally:
        os.umask(old)
    assert {mode(installation.home / part) for part in (".", "run", "logs")} == {0o700}
