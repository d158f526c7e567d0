"""Workers under a real daemon process: launched, adopted, restarted, ended. Every process here is real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from daemon.engines.torch import TorchEngine
from daemon.probe import Prober
from daemon.process import group_members
from daemon.settings import DaemonSettings
from daemon.status import DeviceHeld, WorkerState
from daemon.worker import SupervisedWorker
from daemon.worker_process import WorkerProcess
from daemon.worker_spec import StageAssignment, WorkerLimits
from daemon.worker_token import authorization
from fingerprint.config import DeploymentConfig
from fingerprint.errors import (
    CheckpointError,
    ConfigError,
    ConflictError,
    EngineError,
    InfeasibleError,
    NotFoundError,
    UnavailableError,
)
from tests.golden_words import Golden

HERE = Path(__file__).parent


def test_a_worker_gets_exactly_its_devices(node):
    """The environment names the CPU shares and their cores, hides every GPU, and the group is pinned."""
    node.start()
    stages = (StageAssignment(device_ids=("cpu:1",), num_layers=2),)
    status = node.ready(stages=stages)
    cores = next(device.cores for device in node.client.node().devices if device.device_id == "cpu:1")
    request = urllib.request.Request(f"{status.url}/env", headers=authorization(status.token))
    with urllib.request.urlopen(request) as answer:
        told = json.load(answer)
    assert told["env"] == {
        "CUDA_VISIBLE_DEVICES": "",
        "ISERVE_DEVICE_CORES": "cpu:1=" + ",".join(map(str, cores)),
    }
    assert tuple(told["cores"]) == cores


def test_what_a_worker_holds_of_a_gpu_is_the_drivers_count_of_its_processes(node, until, tmp_path):
    node.offer_gpus(tmp_path / "nvml")
    node.start(cpu_devices=None)
    status = node.ready(stages=(StageAssignment(device_ids=("GPU-bbbb",), num_layers=2),))
    assert status.held == ()
    processes = {"GPU-bbbb": [[os.getpid(), 2**30], [status.pid, 3 * 2**30]]}
    (tmp_path / "nvml/processes.json").write_text(json.dumps(processes))
    held = until(lambda: node.client.worker("w1").held, "the driver's list was not read")
    assert held == (DeviceHeld(device_id="GPU-bbbb", held_bytes=3 * 2**30),)
    assert node.client.node().workers[0].held == held
    (tmp_path / "nvml/processes.json").write_text("{}")  # else its end waits for the driver


def test_a_slow_worker_is_starting_until_it_is_healthy(node):
    node.start()
    node.behave(slow_start_s=1.0)
    launched = node.client.launch(node.spec())
    assert launched.state is WorkerState.STARTING
    assert launched.spec.port > 0
    node.client.launch(node.spec("quick-to-launch"))  # is not held up by the slow one
    assert node.client.worker("w1").state is WorkerState.STARTING
    assert node.wait("w1", WorkerState.READY).restarts == 0


def test_a_start_asks_for_one_extra_look_at_a_time(node, tmp_path):
    """However often it is looked at: else the looks of a long start would multiply."""
    process = WorkerProcess(tmp_path, None, time.monotonic())
    (tmp_path / "command.json").touch()  # as just handed to a shim that has not begun yet
    extra_looks = []

    async def look_ten_times() -> None:
        settings = DaemonSettings(home=tmp_path)
        worker = SupervisedWorker(
            node.spec(), TorchEngine(), process, settings, {}, extra_looks.append, fixed_port=False
        )
        async with Prober(timeout_s=1.0) as prober:
            for _ in range(10):
                await worker.tick(prober)
        assert worker.state() is WorkerState.STARTING
        while not extra_looks:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)

    asyncio.run(look_ten_times())
    assert len(extra_looks) == 1


def test_the_end_of_a_test_leaves_nothing_of_its_workers(node, alive):
    """Even a process that moved to another session, or one whose shim and lease are gone, is ended."""
    node.start()
    node.behave(grandchildren=True)
    node.ready()
    grandchildren = [int(line) for line in (node.checkpoint / "grandchildren").read_text().split()]
    node.signal_daemon(signal.SIGKILL)
    os.kill(node.lease().shim_pid, signal.SIGKILL)
    (node.home / "workers" / "w1" / "lease.json").unlink()
    assert len(grandchildren) == 2
    node.clear()
    assert not any(alive(pid) for pid in grandchildren)


def test_a_killed_worker_is_started_again(node, alive):
    node.start()
    before = node.ready()
    os.kill(before.pid, signal.SIGKILL)
    after = node.wait("w1", WorkerState.READY, but_not_pid=before.pid)
    assert after.restarts == 1
    assert not alive(before.pid)


def test_a_signal_without_a_name_is_an_end_like_any_other(node):
    node.start()
    before = node.ready()
    os.kill(before.pid, signal.SIGRTMIN + 1)
    after = node.wait("w1", WorkerState.READY, but_not_pid=before.pid)
    assert after.restarts == 1


def test_a_worker_in_its_backoff_is_restarting_and_says_why(node):
    node.start(restart={"max_starts": 3, "window_s": 600.0, "first_delay_s": 30.0, "max_delay_s": 30.0})
    before = node.ready()
    os.kill(before.pid, signal.SIGKILL)
    status = node.wait("w1", WorkerState.RESTARTING)
    assert status.pid is None
    while status.error is None:
        status = node.client.worker("w1")
    assert "SIGKILL" in status.error
    assert node.client.stop("w1").state is WorkerState.STOPPED


def test_too_many_ends_in_a_short_time_are_a_failure(node):
    node.start()
    node.behave(exit_code=7, last_words="the sky fell")
    node.client.launch(node.spec())
    status = node.wait("w1", WorkerState.FAILED)
    assert status.restarts == 2  # three starts are allowed here
    assert "exit code 7" in status.error
    assert "the sky fell" in status.error
    assert "the sky fell" in node.client.log("w1")
    with pytest.raises(ConflictError, match="w1"):
        node.client.launch(node.spec())
    assert node.client.stop("w1").state is WorkerState.STOPPED
    node.behave()
    assert node.ready().restarts == 0


def test_a_bad_checkpoint_is_not_tried_again(node):
    node.start()
    node.behave(exit_code=96, last_words='{"error": "CheckpointError", "message": "layer 3 is missing"}')
    node.client.launch(node.spec())
    status = node.wait("w1", WorkerState.FAILED)
    assert status.restarts == 0
    assert "layer 3 is missing" in status.error


def test_one_that_served_is_started_again_whatever_it_says(node, tmp_path):
    """A start has shown that it can serve, and the log of one that serves may have a client's words."""
    node.start()
    words = '{"error": "CheckpointError", "message": "layer 3 is missing"}'
    node.behave(once=True, exit_file=str(tmp_path / "end"), exit_code=96, last_words=words)
    before = node.ready()
    (tmp_path / "end").touch()
    assert node.wait("w1", WorkerState.READY, but_not_pid=before.pid).restarts == 1


def test_a_killed_shim_takes_the_worker_along_and_it_is_started_again(node, alive, until):
    node.start()
    node.behave(grandchildren=True)
    before = node.ready()
    grandchildren = [int(line) for line in (node.checkpoint / "grandchildren").read_text().split()]
    node.behave()
    os.kill(node.lease().shim_pid, signal.SIGKILL)
    after = node.wait("w1", WorkerState.READY, but_not_pid=before.pid)
    assert not alive(before.pid)
    assert group_members(before.pid) == ()
    assert not any(alive(pid) for pid in grandchildren)  # not even the one in a session of its own
    assert after.restarts == 1


def test_stopping_ends_a_deaf_worker_and_all_its_descendants(node, alive):
    node.start()
    node.behave(ignore_sigterm=True, grandchildren=True)
    before = node.ready()
    grandchildren = [int(line) for line in (node.checkpoint / "grandchildren").read_text().split()]
    assert all(alive(pid) for pid in grandchildren)
    shim_pid = node.lease().shim_pid
    stopped = node.client.stop("w1")
    assert (stopped.state, stopped.pid, stopped.error) == (WorkerState.STOPPED, None, None)
    assert group_members(before.pid) == ()
    assert not any(alive(pid) for pid in (before.pid, shim_pid, *grandchildren))
    assert node.client.stop("w1") == stopped  # idempotent
    assert node.client.workers() == ()


def test_stopping_during_the_start_leaves_nothing(node, until, alive):
    node.start()
    node.behave(slow_start_s=60)
    node.client.launch(node.spec())
    assert node.client.stop("w1").state is WorkerState.STOPPED
    assert not (node.home / "workers" / "w1" / "lease.json").exists()
    assert b"fake_worker" not in b"".join(
        _cmdline(pid) for pid in os.listdir("/proc") if pid.isdigit() and str(node.home).encode() in _cmdline(pid)
    )


def _cmdline(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_a_port_that_was_taken_is_exchanged(node):
    """Between choosing and binding another process may take the port; that is no restart."""
    node.start()
    node.behave(exit_code=98, once=True)
    first = node.client.launch(node.spec()).spec.port
    status = node.wait("w1", WorkerState.READY)
    assert status.spec.port != first
    assert status.restarts == 0


def test_a_fixed_port_that_is_taken_is_a_failure(node, golden: Golden):
    node.start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        node.client.launch(node.spec(port=port))
        status = node.wait("w1", WorkerState.FAILED)
    golden("daemon", status.error.partition("; last words")[0])


def test_a_worker_that_says_it_does_not_serve_is_not_ready(node, tmp_path):
    """The same process is ready again when its health is: nothing is latched."""
    node.start()
    node.behave(fail_health_file=str(tmp_path / "unwell"))
    before = node.ready()
    (tmp_path / "unwell").touch()
    assert node.wait("w1", WorkerState.STARTING).pid == before.pid
    (tmp_path / "unwell").unlink()
    assert node.wait("w1", WorkerState.READY).pid == before.pid


def test_a_worker_that_never_gets_healthy_is_ended(node, alive):
    node.start(start_timeout_s=0.5, restart={"max_starts": 1, "window_s": 600.0})
    node.behave(slow_start_s=600)
    node.client.launch(node.spec())
    status = node.wait("w1", WorkerState.FAILED)
    assert "not healthy" in status.error


def test_promises_are_taken_off_what_is_free(node, golden: Golden):
    node.start()
    before = {device.device_id: device.free_bytes for device in node.client.node().devices}
    limits = WorkerLimits(
        max_batch=1,
        max_batched_tokens=64,
        max_context_tokens=64,
        kv_tokens=64,
        memory_bytes_per_device=before["cpu:0"] * 3 // 4,
    )
    node.ready(limits=limits)
    after = {device.device_id: device.free_bytes for device in node.client.node().devices}
    assert after["cpu:0"] < before["cpu:0"] // 2
    assert after["cpu:1"] > before["cpu:1"] // 2
    with golden.raises("daemon", InfeasibleError, numbers=False):
        node.client.launch(node.spec("w2", limits=limits))
    other_share = (StageAssignment(device_ids=("cpu:1",), num_layers=2),)
    node.ready("w3", limits=limits, stages=other_share)
    node.client.stop("w1")
    node.ready("w2", limits=limits)


def test_busy_seconds_become_the_load_of_their_device_only(node, until):
    node.start(load_window_s=1.0)
    node.behave(busy_fraction=0.6)
    node.ready()

    def loads() -> dict[str, float]:
        return {device.device_id: device.load_fraction for device in node.client.node().devices}

    until(lambda: abs(loads()["cpu:0"] - 0.6) < 0.05)
    assert loads()["cpu:1"] == 0.0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        pytest.param(
            {"stages": (StageAssignment(device_ids=("cpu:7",), num_layers=2),)}, NotFoundError, id="device"
        ),
        pytest.param({"checkpoint": "/nowhere"}, CheckpointError, id="checkpoint"),
        pytest.param({"config": DeploymentConfig(engine="vllm")}, EngineError, id="not-there-yet"),
        pytest.param({"config": DeploymentConfig(engine="abacus")}, ConfigError, id="unknown-engine"),
        pytest.param({"host": "0.0.0.0"}, ConfigError, id="exposed"),
        pytest.param({"port": 70000}, ConfigError, id="port"),
        pytest.param({"worker_id": "x" * 65}, ConfigError, id="long-id"),
        pytest.param({"lease_ttl_s": 0.0}, ConfigError, id="lease"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_and_leaves_nothing(calm_node, changes, error, golden: Golden):
    with golden.raises("daemon", error) as caught:
        calm_node.client.launch(calm_node.spec(**changes))
    assert type(caught.value) is error
    assert calm_node.client.workers() == ()
    assert not list((calm_node.home / "workers").glob("*"))


def test_one_id_is_one_worker(node):
    node.start()
    node.ready()
    with pytest.raises(ConflictError, match="w1 is there already"):
        node.client.launch(node.spec())


def test_a_folder_that_cannot_be_written_is_a_clear_refusal(node):
    node.start()
    (node.home / "workers").write_text("a file where the folder should be")
    with pytest.raises(UnavailableError, match=r"cannot write .*/workers/w1"):
        node.client.launch(node.spec())
    assert node.client.workers() == ()
    (node.home / "workers").unlink()
    node.ready()


def test_a_chatty_worker_keeps_its_log_bounded_and_its_last_lines(node, until):
    node.start(log_max_bytes=20_000, log_files=2)
    node.behave(print_lines=2000)  # 200 kB
    node.ready()
    try:
        until(lambda: node.client.log("w1", 1).startswith("line 1999 "))
    except AssertionError as error:
        raise AssertionError(f"it ends with {node.client.log('w1', 5)[-2000:]!r}") from error
    logs = sorted(path.name for path in (node.home / "workers" / "w1").glob("worker.log*"))
    assert logs == ["worker.log", "worker.log.1", "worker.log.2"]
    assert all((node.home / "workers" / "w1" / name).stat().st_size <= 20_000 for name in logs)
    assert len(node.client.log("w1", 150).splitlines()) == 150


def test_secrets_and_logs_are_their_owners_only(node):
    node.start()
    node.ready()
    folder = node.home / "workers" / "w1"
    assert (node.home / "run" / "daemon.json").stat().st_mode & 0o777 == 0o600
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in folder.iterdir()} == {
        path.name: "0o0" for path in folder.iterdir()
    }


def test_a_daemon_without_a_file_descriptor_left_ends_no_worker(node, until):
    """Any client that may connect to its port can bring that about; what cannot be looked at is not dead."""
    node.start()
    before = node.ready()
    assert node.process is not None
    limits = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (100, limits[1]))
    with contextlib.ExitStack() as stack:
        for _ in range(120):
            stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(node.client.url).port)))
        seen = "worker w1: its processes cannot be looked at: Too many open files"
        until(lambda: node.daemon_log.count(seen) >= 3, "it was never without")
    resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, limits)
    after = node.wait("w1", WorkerState.READY)
    assert (after.pid, after.restarts, after.error) == (before.pid, 0, None)
