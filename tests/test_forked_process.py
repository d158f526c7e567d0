"""Forked processes: each has its own environment, folder, arguments and output, and ends as a started one does."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from daemon.procfs import pids_with, read_stat, started_as
from iserve.controller import child_processes
from tests.fork_server import PROGRAMS
from tests.forked_process import Forking
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
