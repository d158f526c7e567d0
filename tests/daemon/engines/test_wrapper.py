"""The wrapper around an external engine: the port, the signals, the status, and that no death leaves a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from daemon.engines.wrapper import port_is_free
from daemon.procfs import processes, read_stat
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]

# An engine of two processes, one of them in a session of its own and deaf; it tells their ids, then sleeps.
ENGINE = """
import os, signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
{then}
time.sleep(600)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def argv(then: str = "", port: int | None = None) -> list[str]:
    wrapper = [
        sys.executable,
        "-m",
        "daemon.engines.wrapper",
        "--host",
        "127.0.0.1",
        "--port",
        str(port or free_port()),
    ]
    return [*wrapper, "--", sys.executable, "-S", "-c", ENGINE.format(then=then)]


@pytest.fixture
def wrapper():
    """Start a wrapper; every process of its session is killed in the end."""
    started = []

    def start(then: str = "", **changes: object) -> tuple[subprocess.Popen[str], list[int]]:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            argv(then, **changes), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        return process, [int(word) for word in process.stdout.readline().split()]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lives(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.is_gone


def gone(*pids: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while any(lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(lives(pid) for pid in pids)


def test_it_ends_with_the_engines_status_and_leaves_none_of_its_processes(wrapper):
    process, pids = wrapper("sys.exit(7)")
    assert process.wait(PATIENCE_S) == 7
    assert len(pids) == 2
    assert gone(*pids)


def test_it_ends_by_the_signal_that_ended_the_engine(wrapper):
    process, pids = wrapper()
    os.kill(pids[0], signal.SIGSEGV)
    assert process.wait(PATIENCE_S) == -signal.SIGSEGV
    assert gone(*pids)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_once(wrapper, signum):
    """The engine decides what it means: here to count it and to end with the count."""
    then = f"""
got = []
signal.signal({int(signum)}, lambda *_: got.append(1))
print("listening", flush=True)
while not got: time.sleep(0.01)
time.sleep(0.3)
sys.exit(40 + len(got))
"""
    process, pids = wrapper(then)
    assert process.stdout.readline() == "listening\n"
    os.killpg(os.getpgid(process.pid), 0)
    process.send_signal(signum)
    assert process.wait(PATIENCE_S) == 41
    assert gone(*pids)


def test_killed_it_takes_the_engine_along(wrapper):
    """The kernel kills the engine; what the engine started is the shim's, a subreaper's, to end."""
    process, (engine, descendant) = wrapper()
    process.kill()
    assert gone(engine)
    os.kill(descendant, signal.SIGKILL)


def test_when_its_parent_is_killed_it_ends_everything(tmp_path):
    """The parent plays the shim: like it, it asks the kernel to kill the wrapper with it."""
    parent = (
        "import signal, subprocess, sys\n"
        "from daemon.process_tree import set_parent_death_signal\n"
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True,\n"
        "    preexec_fn=lambda: set_parent_death_signal(signal.SIGKILL))\n"
        "print(child.pid, child.stdout.readline(), flush=True)\n"
        "child.wait()\n"
    )
    shim = subprocess.Popen(
        [sys.executable, "-c", parent, *argv()],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert shim.stdout is not None
    pids = [int(word) for word in shim.stdout.readline().split()]
    assert len(pids) == 3
    shim.kill()
    shim.communicate()
    assert gone(*pids)
    assert not [stat for stat in processes() if stat.session_id == shim.pid]


def test_a_program_that_cannot_be_started_is_one_line(tmp_path):
    command = [*argv()[:-4], str(tmp_path / "no-python")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 127
    assert done.stderr.startswith(f"cannot start {tmp_path / 'no-python'}")
    assert done.stderr.count("\n") == 1


def test_the_engine_does_not_see_our_python_path(tmp_path):
    show = "import os; print(os.environ.get('PYTHONPATH'), os.environ.get('PYTHONHOME'))"
    head = argv()[:-5]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for extra, seen in (([], "None None"), (["--python-path", "/opt/timer"], "/opt/timer None")):
        done = subprocess.run(
            [*head, *extra, "--", sys.executable, "-c", show], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == seen


# --- the port --------------------------------------------------------------------------------------------------


def listener(port: int = 0, *, reuse: bool, listen: bool) -> socket.socket:
    taken = socket.socket()
    if reuse:  # as vLLM does
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    taken.bind(("127.0.0.1", port))
    if listen:
        taken.listen()
    return taken


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("listen", [True, False])
def test_a_port_that_anybody_has_bound_is_not_free(reuse, listen):
    with listener(reuse=reuse, listen=listen) as taken:
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
    assert port_is_free("127.0.0.1", port)


def test_connections_that_are_still_closing_do_not_hold_a_port():
    """The server side closes first and keeps its port in TIME_WAIT; a restarted worker may have it again."""
    with listener(reuse=True, listen=True) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()
        assert client.recv(1) == b""
        client.close()
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(("127.0.0.1", port))
    assert port_is_free("127.0.0.1", port)


def test_a_taken_port_is_refused_before_the_engine_starts():
    with listener(reuse=True, listen=False) as taken:
        command = argv(port=taken.getsockname()[1])
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 98
    assert "in use" in done.stderr
    assert done.stdout == ""
