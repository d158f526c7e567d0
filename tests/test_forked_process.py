"""Forked processes: each has its own environment, folder, arguments and output, and ends as a started one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon.exit_codes import BAD_CHECKPOINT
from daemon.lease import COMMAND_FILE, EXIT_FILE, LEASE_FILE, ExitRecord, Lease, ShimOrder, read_file, write_file
from daemon.procfs import pids_with, read_stat, started_as
from iserve.controller import child_processes
from tests.fork_server import PROGRAMS
from tests.forked_process import ROOT, Forked, Forking
from tests.iserve.forked_programs import SHIMS
from tests.waiting import wait_until

pytestmark = pytest.mark.process

PROCESSES = Forking(__name__)


def main() -> int:
    """Do as the arguments say: the program of the processes below."""
    _, what = sys.argv
    if what == "wait":
        print("waits", flush=True)
        signal.pause()
    if what == "repeat":
        print(sys.stdin.read())
        print("apart", file=sys.stderr)
        return 3
    if what == "detach":
        print(child_processes.spawn_detached([sys.executable, "-m", "named", "wait"], Path("log"), {"OWN": "1"}))
        return 0
    if what == "words":
        sys.exit("words of its own")
    if what == "raise":
        raise ValueError("raised")
    os.environ["LEFT"] = "behind"
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    open_files = [file for file in files if os.path.exists(f"/proc/self/fd/{file}")]  # not that of the listing
    print(json.dumps({"environment": dict(os.environ), "folder": os.getcwd(), "files": open_files}))
    return 7


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_nothing_of_one_is_left_in_the_next(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    for environment in ({"A": "1", "PYTHONPATH": "/nowhere"}, {"B": "2"}):
        log.unlink(missing_ok=True)
        assert PROCESSES.start(["program", "say"], environment, log).wait() == 7
        said.append(json.loads(log.read_text()))
    assert [one["environment"] for one in said] == [
        {"A": "1", "PYTHONPATH": "/nowhere", "LEFT": "behind"},
        {"B": "2", "LEFT": "behind"},
    ]
    for one in said:
        assert one["folder"] == str(tmp_path)
        assert sorted(one["files"]) == [0, 1, 2]


def test_no_file_of_a_starter_with_many_files_is_left_open(log: Path) -> None:
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    try:
        assert Forking(__name__).start(["program", "say"], {}, log).wait() == 7
    finally:
        for file in held:
            os.close(file)
    assert sorted(json.loads(log.read_text())["files"]) == [0, 1, 2]


def test_a_killed_one_ends_by_its_signal_and_the_next_starts(log: Path) -> None:
    first, second = (PROCESSES.start(["program", "wait"], {}, log) for _ in range(2))
    wait_until(lambda: log.exists() and log.read_text().count("waits") == 2, "both wait")
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)
    assert second.wait() == -signal.SIGTERM
    first.kill()  # of one that is gone: nothing
    assert PROCESSES.start(["program", "say"], {}, log).wait() == 7


@pytest.mark.parametrize(("what", "said"), [("words", "words of its own\n"), ("raise", "ValueError: raised\n")])
def test_words_at_the_end_are_in_its_log_as_python_has_them(log: Path, what: str, said: str) -> None:
    assert PROCESSES.start(["program", what], {}, log).wait() == 1
    assert log.read_text().endswith(said)
    assert "os._exit" not in log.read_text()


def test_a_run_is_given_its_input_and_keeps_output_and_errors_apart() -> None:
    done = PROCESSES.run(["program", "repeat"], {}, "what is\ntyped")
    assert (done.returncode, done.stdout, done.stderr) == (3, "what is\ntyped\n", "apart\n")


def test_its_command_line_and_environment_are_found_as_those_of_a_started_one(log: Path, tmp_path: Path) -> None:
    mark = f"{tmp_path}/{'long' * 500}"
    forked = PROCESSES.start(["program", "wait"], {"MARK": mark, "EMPTY": ""}, log)
    wait_until(lambda: log.exists() and "waits" in log.read_text(), "it waits")
    try:
        assert list(pids_with("MARK", mark)) == [forked.pid]
        assert forked.pid in {stat.pid for stat in started_as([sys.executable, "program", "wait"])}
        shown = Path(f"/proc/{forked.pid}/environ").read_bytes().rstrip(b"\0")
        assert shown == f"MARK={mark}\0EMPTY=".encode()
    finally:
        forked.kill()
        forked.wait()


def test_what_one_starts_detached_is_forked_in_a_session_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = PROCESSES.run(["program", "detach"], {PROGRAMS: json.dumps({"named": PROCESSES.socket})})
    pid = int(done.stdout)
    try:
        wait_until(lambda: "waits" in (tmp_path / "log").read_text(), "it waits")
        stat = read_stat(pid)
        assert stat is not None
        assert stat.group_id == pid == os.getsid(pid)
        assert list(pids_with("OWN", "1")) == [pid]
        assert pid in {found.pid for found in started_as(["-m", "named", "wait"])}
    finally:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: read_stat(pid) is None, "it is gone, its exit status fetched")


Shim = Forked | subprocess.Popen[bytes]


@pytest.fixture(params=["forked", "started"])
def start_worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], tuple[Shim, Lease]]]:
    """``start_worker()``: the shim and the lease of an embedded worker that waits for its spec, a pipe."""
    os.mkfifo(tmp_path / "spec.json")
    order = ShimOrder(
        worker_id="w",
        argv=[sys.executable, "-m", "daemon.torch_engine", "--spec", str(tmp_path / "spec.json")],
        env={"MARK": str(tmp_path)},
        cores=[min(os.sched_getaffinity(0))],
        port=1,
        config_hash="0",
        lease_ttl_s=600.0,
        grace_s=0.5,
        log_max_bytes=10_000,
        log_files=1,
        log_tail_bytes=2000,
    )
    write_file(tmp_path / COMMAND_FILE, order)
    shims: list[Shim] = []

    def start() -> tuple[Shim, Lease]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        if request.param == "forked":
            shims.append(SHIMS.start(["daemon.shim", str(tmp_path)], environment, tmp_path / "log"))
        else:
            command = [sys.executable, "-m", "daemon.shim", str(tmp_path)]
            shims.append(subprocess.Popen(command, env=environment, start_new_session=True))
        wait_until((tmp_path / LEASE_FILE).exists, "the worker has its lease")
        return shims[-1], read_file(tmp_path / LEASE_FILE, Lease)

    yield start
    for shim in shims:
        shim.kill()
        shim.wait()


def open_files(pid: int) -> set[str]:
    return set(os.listdir(f"/proc/{pid}/fd"))


def test_a_worker_is_the_same_in_proc(start_worker: Callable[[], tuple[Shim, Lease]], tmp_path: Path) -> None:
    shim, lease = start_worker()
    assert lease.shim_pid == shim.pid
    assert list(pids_with("MARK", str(tmp_path))) == [lease.pid]
    words = ("-m", "daemon.torch_engine", "--spec", str(tmp_path / "spec.json"))
    assert [stat.pid for stat in started_as(words)] == [lease.pid]
    stat = read_stat(lease.pid)
    assert stat is not None
    assert (stat.group_id, stat.parent_pid) == (lease.pid, shim.pid)
    assert os.sched_getaffinity(lease.pid) == {min(os.sched_getaffinity(0))}
    wait_until(lambda: open_files(lease.pid) == {"0", "1", "2"}, "it has no file but the standard ones")
    shim.kill()
    wait_until(lambda: read_stat(lease.pid) is None, "the worker is gone with its shim")


def test_a_worker_ends_the_same(start_worker: Callable[[], tuple[Shim, Lease]], tmp_path: Path) -> None:
    shim, lease = start_worker()
    (tmp_path / "spec.json").write_text("{}")
    assert shim.wait() == 0
    ended = read_file(tmp_path / EXIT_FILE, ExitRecord)
    assert (ended.pid, ended.exit_code, ended.signal, ended.reason) == (lease.pid, BAD_CHECKPOINT, None, "exited")
    assert ended.log_tail.startswith('{"error"')


def test_a_worker_is_ended_the_same(start_worker: Callable[[], tuple[Shim, Lease]], tmp_path: Path) -> None:
    shim, _ = start_worker()
    shim.send_signal(signal.SIGTERM)
    assert shim.wait() == 0
    ended = read_file(tmp_path / EXIT_FILE, ExitRecord)
    assert (ended.exit_code, ended.signal, ended.reason) == (None, signal.SIGTERM, "told to stop")
