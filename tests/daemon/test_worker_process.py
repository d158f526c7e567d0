"""Processes of one worker as the daemon sees them: looks while a start is under way, which are its own to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from daemon import worker_process
from daemon.engines.base import Command
from daemon.engines.torch import TorchEngine
from daemon.lease import LEASE_FILE, LOCK_FILE, Lease, shim_is_alive, write_file
from daemon.probe import Prober
from daemon.process import is_alive, own_record, read_record, write_record
from daemon.procfs import boot_id, processes, start_time_ticks, started_as
from daemon.settings import DaemonSettings
from daemon.status import WorkerState
from daemon.worker import SupervisedWorker
from daemon.worker_process import WORKER_MARK, Phase, WorkerProcess
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig
from fingerprint.errors import UnavailableError
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S, wait_until

SPEC = WorkerSpec(
    worker_id="w1",
    served_model="m",
    checkpoint="/nowhere",
    config=DeploymentConfig(),
    stages=(StageAssignment(device_ids=("cpu:0",), num_layers=1),),
    limits=WorkerLimits(
        max_batch=1, max_batched_tokens=1, max_context_tokens=1, kv_tokens=1, memory_bytes_per_device=1
    ),
)
GONE = Lease(
    worker_id="w1",
    pid=2**22 + 1,  # above any process id
    start_time_ticks=1,
    shim_pid=2**22 + 2,
    shim_start_time_ticks=1,
    port=1,
    config_hash="",
    started_at=0.0,
    lease_ttl_s=1.0,
)


def test_who_looks_during_a_restart_does_not_take_up_the_last_workers_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease's worker is gone, so the new start would be taken for ended, and its shim be killed."""
    process = WorkerProcess(tmp_path / "w1")
    process.folder.mkdir()
    write_file(process.folder / LEASE_FILE, GONE)
    assert process.look() is Phase.ENDED
    real, seen = Path.mkdir, []

    def mkdir_and_look(path: Path, *args: object, **kwargs: object) -> None:
        real(path, *args, **kwargs)  # type: ignore[arg-type]
        seen.append(process.look())  # the last worker's lease still lies there

    monkeypatch.setattr(Path, "mkdir", mkdir_and_look)
    monkeypatch.setattr(worker_process, "spawn_detached", lambda *_: None)
    process.start(SPEC, Command(argv=("true",)), (), DaemonSettings(home=tmp_path))
    assert seen
    assert process.lease is None
    with no_file_left():
        assert process.look() is Phase.STARTING  # and not ended, as it was at the last look
    assert process.look() is Phase.STARTING


def test_a_shim_that_begins_while_its_worker_is_ended_does_not_make_the_end_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shim takes the folder's lock for the moment in which it finds that its orders were withdrawn."""
    process = WorkerProcess(tmp_path / "w1")
    process.folder.mkdir()
    looks = [False, False, True]  # before the end, after it, and at the last look

    def shim_is_alive(_folder: Path) -> bool:
        return looks.pop(0) if looks else False

    monkeypatch.setattr(worker_process, "shim_is_alive", shim_is_alive)
    assert process.end(grace_s=0.0)
    assert not looks


@pytest.fixture
def session() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``session()``: a shell that leads a session of its own, with two children, one without its environment."""
    begun: list[subprocess.Popen[bytes]] = []

    def make(**env: str) -> subprocess.Popen[bytes]:
        shell = subprocess.Popen(
            ["sh", "-c", "sleep 600 & env -i sh -c 'echo up; exec sleep 600'; exit 7"],
            start_new_session=True,
            stdout=subprocess.PIPE,
            env=os.environ | env,
        )
        begun.append(shell)
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"up\n"
        return shell

    yield make
    for shell in begun:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


def stale_worker(tmp_path: Path, lease: Lease) -> WorkerProcess:
    process = WorkerProcess(tmp_path / "w1")
    process.folder.mkdir()
    write_file(process.folder / LEASE_FILE, lease)
    return process


def members(leader: subprocess.Popen[bytes]) -> set[int]:
    return {stat.pid for stat in processes() if stat.session_id == leader.pid}


def ticks_of(pid: int) -> int:
    ticks = start_time_ticks(pid)
    assert ticks is not None
    return ticks


@pytest.mark.parametrize("named", ["shim", "engine"])
@pytest.mark.parametrize("because", ["it started later", "it is of another boot"])
def test_nothing_of_a_session_that_was_given_a_dead_shims_id_is_ended(
    named: str, because: str, tmp_path: Path, session: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """A lease outlives its processes: a reboot, or a container's restart on a volume, reuses their ids."""
    stranger = session()
    ticks = ticks_of(stranger.pid) - (1 if because == "it started later" else 0)
    boot = boot_id() if because == "it started later" else "another"
    lease = replace(GONE, boot_id=boot)
    if named == "shim":
        lease = replace(lease, shim_pid=stranger.pid, shim_start_time_ticks=ticks)
    else:
        lease = replace(lease, pid=stranger.pid, start_time_ticks=ticks)
    process = stale_worker(tmp_path, lease)
    assert process.look() is Phase.ENDED
    assert process.left() == process.pids() == frozenset()
    assert process.end(grace_s=0.0)
    assert stranger.poll() is None
    assert len(members(stranger)) == 3


def test_what_carries_the_workers_mark_is_ended_with_all_of_its_session(
    tmp_path: Path, session: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Engine and shim are gone; as long as one of their session lives, no other session has its id."""
    ours = session(**{WORKER_MARK: str(tmp_path / "w1")})
    unmarked = subprocess.Popen(["env", "-i", "sleep", "600"], process_group=0)
    moved, stranger = (
        session(**{WORKER_MARK: str(tmp_path / "w1")}),
        session(**{WORKER_MARK: str(tmp_path / "w2")}),
    )
    try:
        lease = replace(GONE, shim_pid=ours.pid, shim_start_time_ticks=ticks_of(ours.pid) - 1)
        process = stale_worker(tmp_path, lease)
        process.look()
        left = {stat.session_id for stat in processes() if stat.pid in process.left()}
        assert left == {ours.pid, moved.pid}
        assert process.end(grace_s=0.0)
        assert {ours.wait(), moved.wait()} <= {-9, 7}  # 7: the shell's last child was killed a moment before it
        assert (stranger.poll(), unmarked.poll()) == (None, None)
    finally:
        unmarked.kill()
        unmarked.wait()


def test_a_leased_engine_that_lives_names_its_session(
    tmp_path: Path, session: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """The session's children need no mark: they may have cleared their environment."""
    ours = session()
    lease = replace(GONE, pid=ours.pid, start_time_ticks=ticks_of(ours.pid), shim_pid=ours.pid, boot_id=boot_id())
    process = stale_worker(tmp_path, lease)
    assert process.look() is Phase.RUNNING
    assert process.left() == members(ours) - {ours.pid}  # the shell is the shim here


# An engine whose child, in a session of its own, writes over its environment as setproctitle 1.3.8 does.
ENGINE = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""
TITLED = """
import ctypes, os, pathlib, time
if "SPT_NOENV" not in os.environ:
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
pathlib.Path("titled.new").write_text(str(os.getpid()))
os.rename("titled.new", "titled")
time.sleep(600)
"""


@pytest.mark.process
def test_a_process_that_names_itself_keeps_the_workers_mark(tmp_path: Path) -> None:
    """An EngineCore of vLLM whose shim and API server were killed together is found by its environment alone."""
    process = WorkerProcess(tmp_path / "w1")
    command = Command(argv=(sys.executable, "-S", "-c", ENGINE, TITLED))
    process.start(SPEC, command, (), DaemonSettings(home=tmp_path))
    try:
        wait_until(lambda: process.look() is Phase.RUNNING, "the engine runs")
        titled = process.folder / "titled"
        wait_until(titled.exists, "its child has named itself")
        assert process.lease is not None
        os.kill(process.lease.shim_pid, signal.SIGKILL)  # and the kernel kills the engine
        wait_until(lambda: process.look() is Phase.ENDED, "shim and engine are gone")
        assert process.left() == {int(titled.read_text())}
        assert process.end(grace_s=0.0)
        assert process.left() == frozenset()
    finally:
        for stat in started_as((TITLED,)):
            os.kill(stat.pid, signal.SIGKILL)


@contextlib.contextmanager
def no_file_left() -> Iterator[None]:
    """Let this process open no file (EMFILE) inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_worker_that_cannot_be_looked_at_is_not_taken_for_dead(
    tmp_path: Path, session: Callable[..., subprocess.Popen[bytes]], golden: Golden
) -> None:
    """A daemon without a file descriptor left would else kill and restart every healthy worker."""
    ours = session()
    process = stale_worker(tmp_path, replace(GONE, pid=ours.pid, start_time_ticks=ticks_of(ours.pid)))
    first_looked_at = WorkerProcess(process.folder, lease=process._read_lease())
    assert process.look() is Phase.RUNNING
    with no_file_left():
        assert process.look() is Phase.RUNNING
        with pytest.raises(UnavailableError) as unknown:
            first_looked_at.look()
        with pytest.raises(OSError) as refused:  # noqa: PT011  # its number is looked at below
            process.left()
    golden("daemon", str(unknown.value))
    assert refused.value.errno == errno.EMFILE
    os.killpg(ours.pid, signal.SIGKILL)
    ours.wait()
    assert process.look() is Phase.ENDED


def test_a_stop_that_failed_is_finished_by_a_later_pass(
    tmp_path: Path, session: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Whatever ends the processes, the worker must not be stopping for ever: its caller has had the error."""
    ours = session()
    lease = replace(GONE, pid=ours.pid, start_time_ticks=ticks_of(ours.pid), shim_pid=ours.pid, boot_id=boot_id())
    worker = SupervisedWorker(
        SPEC,
        TorchEngine(),
        stale_worker(tmp_path, lease),
        DaemonSettings(home=tmp_path),
        {},
        lambda _: None,
        fixed_port=False,
    )

    async def stop() -> None:
        prober = Prober(timeout_s=1.0)
        with no_file_left():
            with pytest.raises(UnavailableError):
                await worker.stop()
            await worker.tick(prober)
            assert worker.state() is WorkerState.STOPPING
        async with asyncio.timeout(PATIENCE_S):
            while worker.state() is WorkerState.STOPPING:
                await worker.tick(prober)
                await asyncio.sleep(0)

    asyncio.run(stop())
    assert worker.state() is WorkerState.STOPPED
    assert members(ours) == set()


def test_a_shim_that_cannot_be_looked_for_is_not_taken_for_dead(tmp_path: Path) -> None:
    lock = tmp_path / LOCK_FILE
    assert not shim_is_alive(tmp_path)
    with lock.open("w") as shim:
        fcntl.flock(shim, fcntl.LOCK_EX)
        assert shim_is_alive(tmp_path)
        with no_file_left(), pytest.raises(OSError) as refused:  # noqa: PT011  # its number is looked at below
            shim_is_alive(tmp_path)
        assert refused.value.errno == errno.EMFILE
    assert not shim_is_alive(tmp_path)


def test_a_record_that_cannot_be_read_now_is_not_taken_for_absent(tmp_path: Path, golden: Golden) -> None:
    """A controller would otherwise start a second daemon, and a second gateway, next to those that live."""
    path = tmp_path / "daemon.json"
    record = own_record(url="", token="")
    write_record(path, record)
    with no_file_left():
        with pytest.raises(UnavailableError) as unread:
            read_record(path)
        with pytest.raises(UnavailableError) as unknown:
            is_alive(record)
        with pytest.raises(OSError) as refused:  # noqa: PT011  # its number is looked at below
            list(started_as(["python"]))
    golden("daemon", [str(unread.value), str(unknown.value)])
    assert refused.value.errno == errno.EMFILE
    assert is_alive(read_record(path))
