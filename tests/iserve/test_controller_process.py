"""The controller as a process: what it says when it cannot start, what it leaves, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from daemon.process import own_record, read_record, write_record
from daemon.procfs import start_time_ticks
from fingerprint.errors import ConflictError
from iserve.controller.home_lock import hold_home
from iserve.settings import Settings
from iserve.state.store import Store
from tests.golden_words import Golden
from tests.iserve.postgres_server import PostgresServer
from tests.waiting import PATIENCE_S

NAMES = ("controller", "daemon", "gateway")


def start(installation: Any, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Start a controller that is expected to be refused."""
    environment = installation.environment | ({} if home is None else {"ISERVE_HOME": str(home)})
    command = [sys.executable, "-m", "iserve.controller"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return its last line; before that it may have logged what it had started."""
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def test_a_start_loads_no_engine_and_no_regressions() -> None:
    """So that it answers soon; what estimates with them loads them then."""
    code = "import sys, iserve.controller.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert {"torch", "transformers", "sklearn", "scipy"}.isdisjoint(done.stdout.split())


@pytest.mark.slow
def test_the_collector_is_off_until_all_is_made_and_then_on(make_installation: Callable[..., Any]) -> None:
    code = (
        "import gc, uvicorn, iserve.controller.__main__ as controller\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "uvicorn.Server.run = lambda _, sockets: print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "controller.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=make_installation().environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.splitlines() == ["False False", "True True"], done.stderr


@pytest.mark.parametrize(
    ("in_the_way", "is_folder"),
    [
        ("run/controller.lock", True),
        ("logs", False),
        ("run/routes.json", True),
    ],
)
def test_a_home_that_cannot_be_written_is_one_line_and_leaves_nothing(
    make_installation: Callable[..., Any], in_the_way: str, is_folder: bool, golden: Golden
) -> None:
    installation = make_installation()
    path = installation.home / in_the_way
    path.parent.mkdir(parents=True)
    path.mkdir() if is_folder else path.touch()
    said = refusal(start(installation))
    golden("controller", said)
    assert installation.processes() == {}
    assert not (installation.home / "run" / "controller.json").exists()


def test_a_home_that_cannot_be(make_installation: Callable[..., Any], one_line: Callable[..., str]) -> None:
    assert "cannot write /dev/null/home/run/controller.lock" in one_line(
        start(make_installation(), Path("/dev/null/home"))
    )


def test_a_state_of_a_newer_version_is_left_as_it_is(
    make_installation: Callable[..., Any], one_line: Callable[..., str], golden: Golden
) -> None:
    installation = make_installation()
    Store.open(installation.home / "state.db").close()
    with sqlite3.connect(installation.home / "state.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    golden("controller", one_line(start(installation)))
    assert not (installation.home / "run" / "controller.json").exists()
    assert installation.processes() == {}


def test_a_home_whose_controller_was_killed_and_still_holds_its_lock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may show a killed process as gone before it has closed its files."""
    settings = Settings(home=tmp_path / "home")
    with ExitStack() as killed:
        killed.enter_context(hold_home(settings))
        monkeypatch.setattr("daemon.role_lock.time.sleep", lambda _: killed.close())
        with hold_home(settings):
            pass


def test_a_home_that_another_process_holds_on_is_refused_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path / "home")
    monkeypatch.setattr("daemon.role_lock._PATIENCE_S", 0.0)
    with hold_home(settings):
        with pytest.raises(ConflictError, match="another controller"), hold_home(settings):
            pass
        write_record(settings.run_folder / "controller.json", own_record(url="http://127.0.0.1:1", token=""))
        monkeypatch.setattr("daemon.role_lock._PATIENCE_S", 1e9)  # a living one is not waited for
        with (
            pytest.raises(ConflictError, match=rf"pid {os.getpid()}, http://127.0.0.1:1"),
            hold_home(settings),
        ):
            pass


@pytest.mark.long  # the first may be just ending: it is waited for
def test_a_second_controller_on_one_database_is_refused_whatever_its_home(
    make_installation: Callable[..., Any], one_line: Callable[..., str], postgres: PostgresServer
) -> None:
    url = postgres.make_database()
    first, second = (make_installation(ISERVE_DATABASE_URL=url) for _ in range(2))
    first.run("up")
    assert "another controller (iserve " in one_line(start(second))
    assert second.processes() == {}
    assert first.json("ps") == []
    first.kill("controller")
    second.run("up")  # the database is its own now
    assert "another controller (iserve " in refusal(start(first))


def test_a_port_in_use_is_one_line_and_starts_nothing(
    make_installation: Callable[..., Any], one_line: Callable[..., str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        installation = make_installation(ISERVE_API_PORT=str(port))
        assert f"cannot listen on 127.0.0.1:{port}" in one_line(start(installation))
    assert not (installation.home / "run" / "daemon.json").exists()


def test_fingerprints_of_a_killed_controller_are_gone_at_the_next_start(
    make_installation: Callable[..., Any],
) -> None:
    """The fingerprints take disk, up to two layers of a model, and would not be used again."""
    installation = make_installation()
    left = installation.home / "fingerprints" / "0123" / "1-layers"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"x" * 1000)
    installation.run("up")
    assert not left.parent.exists()


def size_of(file: Path) -> int:
    """Return a file's size in bytes; -1 where it is not there, as between a turn's two renames."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return -1


def test_logs_are_bounded_while_their_processes_run(
    make_installation: Callable[..., Any], until: Callable[..., Any]
) -> None:
    installation = make_installation()
    installation.run("up")
    for name in NAMES:
        log = installation.home / "logs" / f"{name}.log"
        with log.open("ab") as file:
            file.write(b"x" * 9 * 2**20 + b"\n")
        until(lambda log=log: 0 <= size_of(log) < 2**20, f"{log} is begun anew")
        assert log.with_name(f"{name}.log.1").stat().st_size > 8 * 2**20


def test_only_the_gateway_runs_on_uvloop(make_installation: Callable[..., Any]) -> None:
    """The end of the other processes is known for asyncio's loop; uvicorn by itself would take uvloop's."""
    installation = make_installation()
    installation.run("up")
    records = {name: read_record(installation.home / "run" / f"{name}.json") for name in NAMES}
    maps = {name: Path(f"/proc/{record.pid}/maps").read_text() for name, record in records.items() if record}
    assert {name: "/uvloop/" in text for name, text in maps.items()} == {
        "controller": False,
        "daemon": False,
        "gateway": True,
    }


def test_a_controller_does_not_take_up_a_gateway_of_other_settings(
    make_installation: Callable[..., Any], kill: Callable[[int], None], until: Callable[..., Any]
) -> None:
    """The gateway's keys are required by address: a controller on loopback would have an open one ask for none."""
    installation = make_installation()
    installation.run("up")
    record = read_record(installation.home / "run" / "controller.json")
    assert record is not None
    kill(record.pid)
    until(lambda: "controller" not in installation.processes(), "it is gone")
    before = installation.processes()
    for name, value in (("ISERVE_HOST", "localhost"), ("ISERVE_PORT", "1")):
        installation.settings[name] = value
        assert f"this home runs with other settings: {name} is " in refusal(start(installation))
        refused = installation.run("keys", "create", check=False)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert f"this home runs with other settings: {name} is " in refused.stderr
        del installation.settings[name]
        assert installation.processes() == before


def test_sigterm_ends_it_in_the_middle_of_a_profile(
    make_installation: Callable[..., Any], until: Callable[..., Any]
) -> None:
    """A profile taken to its end would go on next to the next controller's, and both be wrong."""
    installation = make_installation(ISERVE_PROFILE_SECONDS="45")
    waiting = installation.start("deploy", "--json")
    until(lambda: any(w.startswith("profile-") for w in installation.worker_pids()), "a profile is being taken")
    pid = installation.record("controller").pid
    started = start_time_ticks(pid)
    os.kill(pid, signal.SIGTERM)
    until(lambda: start_time_ticks(pid) != started, "the controller has ended")
    waiting.communicate(timeout=PATIENCE_S)
    store = Store.read_only(installation.home / "state.db")
    assert store.profiles() == ()
    assert store.deployment("iserve-demo").phase == "profiling"  # the next controller takes it up
    store.close()
    assert not (installation.home / "run" / "controller.json").exists()
