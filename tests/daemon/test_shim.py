"""The shim and the files it shares with the daemon, without a daemon."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.atomic_file import write_file_atomically
from daemon.backoff import RestartHistory, RestartPolicy
from daemon.lease import (
    COMMAND_FILE,
    EXIT_FILE,
    LEASE_FILE,
    LOCK_FILE,
    ExitRecord,
    Lease,
    LeaseFileError,
    ShimOrder,
    read_file,
    shim_is_alive,
    try_lock,
    write_file,
)
from daemon.process import (
    ProcessRecord,
    group_members,
    is_alive,
    kept_record,
    kill_group,
    own_record,
    read_record,
    spawn_detached,
    write_record,
)
from daemon.procfs import is_running, read_stat, start_time_ticks
from daemon.shim import RotatingLog
from daemon.worker_process import WorkerProcess
from fingerprint.errors import UnavailableError
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

ORDER = ShimOrder(
    worker_id="w",
    argv=[],
    env={},
    cores=[],
    port=1,
    config_hash="0",
    lease_ttl_s=600.0,
    grace_s=0.5,
    log_max_bytes=10_000,
    log_files=1,
    log_tail_bytes=200,
)


@pytest.fixture
def keep(tmp_path):
    """Start a shim over a Python program; every process of its session is killed in the end."""
    shims = []

    def start(code: str, **changes: object) -> subprocess.Popen[bytes]:
        argv = changes.pop("argv", [sys.executable, "-S", "-c", code])
        write_file(tmp_path / COMMAND_FILE, replace(ORDER, argv=argv, **changes))
        shim = subprocess.Popen(
            [sys.executable, "-m", "daemon.shim", str(tmp_path)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        shims.append(shim)
        return shim

    yield start
    for shim in shims:
        if shim.poll() is None:
            shim.terminate()
        shim.wait(PATIENCE_S)


def test_it_says_how_its_program_ended(keep, tmp_path):
    assert keep("print('the last words'); raise SystemExit(7)").wait(PATIENCE_S) == 0
    record = read_file(tmp_path / EXIT_FILE, ExitRecord)
    assert (record.exit_code, record.signal, record.reason) == (7, None, "exited")
    assert record.log_tail == "the last words\n"
    assert (tmp_path / "worker.log").read_text() == "the last words\n"


def test_its_program_may_open_as_many_files_as_are_allowed(keep, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        shim = keep("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert shim.wait(PATIENCE_S) == 0
    assert read_file(tmp_path / EXIT_FILE, ExitRecord).log_tail == f"{min(limits[1], 65_536)}\n"


def test_a_program_ended_by_a_signal_has_no_exit_code(keep, tmp_path):
    keep("import os; os.abort()").wait(PATIENCE_S)
    record = read_file(tmp_path / EXIT_FILE, ExitRecord)
    assert (record.exit_code, record.signal) == (None, signal.SIGABRT)


@pytest.mark.parametrize("argv", [["/nowhere/engine"], ["/bin/sh", "a\0b"]], ids=["not-there", "not-an-argument"])
def test_a_program_that_cannot_be_started_is_an_exit_too(keep, tmp_path, argv):
    keep("", argv=argv).wait(PATIENCE_S)
    record = read_file(tmp_path / EXIT_FILE, ExitRecord)
    assert record.exit_code == 127
    assert record.reason.startswith("could not start: ")


def test_the_lease_names_the_very_process(keep, tmp_path, until):
    shim = keep("import time; time.sleep(60)")
    until((tmp_path / LEASE_FILE).exists)
    lease = read_file(tmp_path / LEASE_FILE, Lease)
    assert is_running(lease.pid, lease.start_time_ticks)
    assert not is_running(lease.pid, lease.start_time_ticks + 1)  # the same id, another process
    assert is_running(lease.shim_pid, lease.shim_start_time_ticks)
    assert lease.shim_pid == shim.pid
    assert group_members(lease.pid) == (lease.pid,)
    assert shim_is_alive(tmp_path)
    shim.terminate()
    shim.wait(PATIENCE_S)
    assert not shim_is_alive(tmp_path)
    assert read_file(tmp_path / EXIT_FILE, ExitRecord).reason == "told to stop"


def test_the_program_gets_its_environment_and_cores(keep, tmp_path):
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.environ['WHO'], sorted(os.sched_getaffinity(0)), os.getcwd())"
    keep(code, env={"WHO": "me"}, cores=[core]).wait(PATIENCE_S)
    assert (tmp_path / "worker.log").read_text() == f"me [{core}] {tmp_path}\n"


DEAF_FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
for own_session in (False, True):
    child = subprocess.Popen([sys.executable, "-S", "-c", sleeper], start_new_session=own_session,
                             stdout=subprocess.PIPE)
    child.stdout.readline()
    with open("family", "a") as file:
        print(child.pid, file=file)
with open("ready", "w"):
    pass
"""


@pytest.mark.parametrize("end", ["exits", "is-told", "loses-its-lease"])
def test_nothing_of_a_worker_outlives_it(keep, tmp_path, until, alive, end):
    """Children in the group and out of it, deaf to SIGTERM, are ended, whichever way the worker ends."""
    last = "" if end == "exits" else "time.sleep(99)"
    shim = keep(DEAF_FAMILY + last, lease_ttl_s=1.0 if end == "loses-its-lease" else 600.0)
    until((tmp_path / "ready").exists)
    family = [int(line) for line in (tmp_path / "family").read_text().split()]
    if end == "is-told":
        shim.terminate()
    assert shim.wait(PATIENCE_S) == 0
    assert not any(alive(pid) for pid in family)
    expected = {"exits": "exited", "is-told": "told to stop", "loses-its-lease": "lease expired"}[end]
    assert read_file(tmp_path / EXIT_FILE, ExitRecord).reason == expected


def test_the_kernel_ends_the_worker_of_a_killed_shim(keep, tmp_path, until, alive):
    shim = keep("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    until((tmp_path / LEASE_FILE).exists)
    pid = read_file(tmp_path / LEASE_FILE, Lease).pid
    shim.kill()
    until(lambda: not alive(pid))
    assert not shim_is_alive(tmp_path)


def test_a_folder_has_one_shim(tmp_path, until):
    write_file(tmp_path / COMMAND_FILE, replace(ORDER, argv=["true"]))
    with try_lock(tmp_path / LOCK_FILE) as ours:
        assert ours
        with try_lock(tmp_path / LOCK_FILE) as again:
            assert not again
        assert shim_is_alive(tmp_path)


def test_withdrawn_orders_start_nothing(keep, tmp_path):
    shim = subprocess.run(
        [sys.executable, "-m", "daemon.shim", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert shim.returncode == 1
    assert b"command.json cannot be read" in shim.stderr
    assert not (tmp_path / LEASE_FILE).exists()


def test_a_shim_that_does_not_get_on_is_ended_though_it_has_no_lease(tmp_path, until):
    """A disk that hangs, say; here it waits for its orders to be written."""
    os.mkfifo(tmp_path / COMMAND_FILE)
    with subprocess.Popen([sys.executable, "-m", "daemon.shim", str(tmp_path)]) as shim:
        until(lambda: shim_is_alive(tmp_path))
        ended = WorkerProcess(tmp_path).end(grace_s=0.0)
        shim.kill()
        assert ended
        assert not shim_is_alive(tmp_path)


def test_the_shim_imports_the_standard_library_only():
    code = "import sys; before = set(sys.modules); import daemon.shim; print(*(set(sys.modules) - before))"
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split()
    foreign = {name.split(".")[0] for name in out} - set(sys.stdlib_module_names)
    assert foreign == {"daemon"}


# --- files -----------------------------------------------------------------------------------------------------

TEXT = st.text(max_size=20)
LEASES = st.builds(
    Lease,
    worker_id=TEXT,
    pid=st.integers(1, 2**22),
    start_time_ticks=st.integers(0, 2**60),
    shim_pid=st.integers(1, 2**22),
    shim_start_time_ticks=st.integers(0, 2**60),
    port=st.integers(0, 65535),
    config_hash=TEXT,
    started_at=st.floats(0, 4e9),
    lease_ttl_s=st.floats(1, 1e5),
)


@given(lease=LEASES)
def test_what_is_written_is_read(tmp_path_factory, lease):
    path = tmp_path_factory.getbasetemp() / "lease-round-trip.json"
    write_file(path, lease)
    assert read_file(path, Lease) == lease


@given(
    data=st.one_of(
        st.binary(max_size=60),
        st.dictionaries(TEXT, st.integers(), max_size=3).map(lambda value: json.dumps(value).encode()),
        st.lists(st.integers(), max_size=3).map(lambda value: json.dumps(value).encode()),
    )
)
def test_anything_else_is_refused_as_one_kind_of_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "lease-nonsense.json"
    path.write_bytes(data)
    with pytest.raises(LeaseFileError):
        read_file(path, Lease)


@pytest.mark.parametrize("change", [{"pid": "1"}, {"pid": True}, {"pid": None}, {"extra": 1}, {"lease_ttl_s": []}])
def test_a_lease_with_one_wrong_field_is_refused(tmp_path, change):
    lease = dict.fromkeys(Lease.__dataclass_fields__, 1) | {"worker_id": "w", "config_hash": "0", "boot_id": "b"}
    (tmp_path / "good").write_text(json.dumps(lease))
    assert read_file(tmp_path / "good", Lease).pid == 1
    (tmp_path / "bad").write_text(json.dumps(lease | change))
    with pytest.raises(LeaseFileError, match="bad"):
        read_file(tmp_path / "bad", Lease)


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file_atomically(path, b"old")
    write_file(tmp_path / COMMAND_FILE, ORDER)

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_file_atomically(path, b"new")
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / COMMAND_FILE, replace(ORDER, port=2))
    with pytest.raises(UnavailableError, match="No space left"):
        write_record(tmp_path / "record.json", own_record(url="", token=""))
    assert path.read_bytes() == b"old"
    assert asdict(read_file(tmp_path / COMMAND_FILE, ShimOrder)) == asdict(ORDER)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [COMMAND_FILE, "file"]


def test_a_log_that_cannot_be_written_does_not_stop_the_worker(tmp_path):
    (tmp_path / "worker.log").mkdir()
    log = RotatingLog(tmp_path / "worker.log", max_bytes=100, files=1)
    log.write(b"lost")
    (tmp_path / "worker.log").rmdir()
    log.write(b"kept")
    assert (tmp_path / "worker.log").read_bytes() == b"kept"


def test_a_log_whose_next_cannot_be_opened_stays_where_it_is(tmp_path, monkeypatch):
    path, real = tmp_path / "worker.log", os.open
    log = RotatingLog(path, max_bytes=10, files=2)
    log.write(b"0123456789")

    def full(*_arguments: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    log.write(b"lost")
    assert [entry.name for entry in tmp_path.iterdir()] == ["worker.log"]
    monkeypatch.setattr(os, "open", real)
    log.write(b"kept")
    assert path.read_bytes() == b"kept"
    assert (tmp_path / "worker.log.1").read_bytes() == b"0123456789"


@given(lines=st.lists(st.binary(min_size=1, max_size=150), max_size=30), files=st.integers(0, 3))
def test_logs_never_exceed_their_size_and_end_with_the_last_line(tmp_path_factory, lines, files):
    path = tmp_path_factory.mktemp("log") / "worker.log"
    log = RotatingLog(path, max_bytes=64, files=files)
    for line in lines:
        log.write(line)
    kept = sorted(path.parent.iterdir(), reverse=True)
    assert len(kept) <= files + 1
    assert all(part.stat().st_size <= 64 for part in kept)
    if lines:
        assert path.read_bytes().endswith(lines[-1][-1:])
        assert b"".join(lines).endswith(b"".join(part.read_bytes() for part in kept))


def test_a_record_that_is_lost_is_there_again_and_goes_with_its_process(tmp_path, until):
    path = tmp_path / "run" / "gateway.json"
    record = own_record(url="http://127.0.0.1:1", token="t")
    with kept_record(path, record, look_s=0.01):
        assert read_record(path) == record
        for lose in (path.unlink, lambda: path.write_text("{"), lambda: path.parent.rename(tmp_path / "gone")):
            lose()
            until(lambda: read_record(path) == record)
        write_record(path, replace(record, start_time_ticks=1))  # of a process that is gone
        until(lambda: read_record(path) == record)
    assert not path.exists()


def test_the_record_of_another_process_that_lives_is_left_alone(tmp_path):
    path, other = tmp_path / "run" / "gateway.json", os.getppid()
    ours = own_record(url="http://127.0.0.1:1", token="t")
    theirs = replace(ours, pid=other, start_time_ticks=start_time_ticks(other))
    with kept_record(path, ours, look_s=0.001):
        write_record(path, theirs)
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert read_record(path) == theirs
    assert read_record(path) == theirs


def test_no_record_is_written_into_a_home_that_was_taken_away(tmp_path, monkeypatch):
    home, looks = tmp_path / "home", threading.Semaphore(0)
    real = Path.is_dir

    def is_dir(path: Path) -> bool:
        looks.release()
        return real(path)

    with kept_record(home / "run" / "gateway.json", own_record(url="", token=""), look_s=0.01):
        shutil.rmtree(home)
        monkeypatch.setattr(Path, "is_dir", is_dir)
        for _ in range(3):
            assert looks.acquire(timeout=PATIENCE_S)
        assert not home.exists()


# --- processes -------------------------------------------------------------------------------------------------


def test_a_record_names_one_process_for_good(tmp_path):
    path = tmp_path / "run" / "daemon.json"
    assert read_record(path) is None
    record = own_record(url="http://127.0.0.1:1", token="t")
    write_record(path, record)
    assert read_record(path) == record
    assert path.stat().st_mode & 0o777 == 0o600
    assert is_alive(record)
    assert not is_alive(replace(record, start_time_ticks=record.start_time_ticks + 1))
    assert not is_alive(None)
    path.write_text("{}")
    assert read_record(path) is None


def test_a_zombie_is_gone():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    stat = read_stat(child.pid)
    assert stat is not None
    assert not is_alive(ProcessRecord(pid=child.pid, start_time_ticks=stat.start_time_ticks, url="", token=""))
    assert start_time_ticks(child.pid) is None
    child.wait()


def test_a_detached_program_is_nobodys_child_and_leads_its_session(tmp_path, until):
    code = "import sys, time; print('out', flush=True); print('err', file=sys.stderr, flush=True); time.sleep(60)"
    pid = spawn_detached([sys.executable, "-S", "-c", code], tmp_path / "log", dict(os.environ))
    try:
        until(lambda: (tmp_path / "log").read_text() == "out\nerr\n")
        stat = read_stat(pid)
        assert (stat.group_id, stat.session_id) == (pid, pid)
        assert stat.parent_pid != os.getpid()
    finally:
        assert kill_group(pid, grace_s=5.0)
    assert group_members(pid) == ()


@pytest.mark.parametrize("fault", ["program", "log"])
def test_what_cannot_be_spawned_is_a_clear_error(tmp_path, fault, golden: Golden):
    argv = ["/nowhere/program"] if fault == "program" else ["true"]
    log = tmp_path / "nowhere" / "log" if fault == "log" else tmp_path / "log"
    with golden.raises("daemon", UnavailableError):
        spawn_detached(argv, log)


def test_a_deaf_group_is_killed_after_its_grace(tmp_path, until):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    pid = spawn_detached([sys.executable, "-S", "-c", code], tmp_path / "log")
    until(lambda: (tmp_path / "log").read_text() == "up\n")
    assert kill_group(pid, grace_s=0.2)
    assert kill_group(pid, grace_s=0.2)  # gone already


@pytest.mark.parametrize("group", [0, 1, -5])
def test_no_group_but_a_workers_is_ever_signalled(group):
    with pytest.raises(ValueError, match="refusing"):
        kill_group(group, grace_s=0.1)
    with pytest.raises(ValueError, match="refusing"):
        kill_group(os.getpgrp(), grace_s=0.1)


# --- backoff ---------------------------------------------------------------------------------------------------


def test_waits_double_up_to_the_limit_and_then_it_gives_up():
    history = RestartHistory(RestartPolicy(max_starts=6, window_s=600.0, first_delay_s=0.5, max_delay_s=3.0))
    delays = []
    for now_s in range(6):
        history.note_start(float(now_s))
        delays.append(history.delay_s(float(now_s)))
    assert delays == [0.5, 1.0, 2.0, 3.0, 3.0, None]


def test_a_start_long_ago_is_forgiven():
    history = RestartHistory(RestartPolicy(max_starts=2, window_s=600.0, first_delay_s=0.5))
    history.note_start(0.0)
    history.note_start(1.0)
    assert history.delay_s(2.0) is None
    assert history.delay_s(600.5) == 0.5
    assert history.delay_s(700.0) == 0.5


@given(starts_s=st.lists(st.floats(0, 5000), min_size=1, max_size=40).map(sorted))
def test_never_more_starts_than_allowed_in_any_window(starts_s):
    """A supervisor that obeys starts at most five times in any ten minutes."""
    policy = RestartPolicy()
    history, obeyed = RestartHistory(policy), []
    for now_s in starts_s:
        if history.delay_s(now_s) is not None:
            history.note_start(now_s)
            obeyed.append(now_s)
    for start_s in obeyed:
        assert sum(start_s <= other_s < start_s + policy.window_s for other_s in obeyed) <= policy.max_starts
