"""Workers after their daemon's death, and their adoption by the next one: real processes, kill -9."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from daemon.engines.base import Command
from daemon.engines.torch import TorchEngine
from daemon.lease import LEASE_FILE
from daemon.port_owner import free_port
from daemon.procfs import pids_with, started_as
from daemon.settings import DaemonSettings
from daemon.status import WorkerState
from daemon.worker_process import WORKER_MARK, Phase, WorkerProcess
from daemon.worker_spec import StageAssignment
from fingerprint.codec import to_json
from fingerprint.errors import (
    ConflictError,
    NotFoundError,
)
from tests.golden_words import Golden

HERE = Path(__file__).parent


def test_killing_the_daemon_leaves_the_worker_to_the_next_one(node, alive):
    node.start()
    before = node.ready()
    node.signal_daemon(signal.SIGKILL)
    assert alive(before.pid)
    node.start()
    after = node.client.worker("w1")
    assert (after.state, after.pid, after.spec, after.restarts) == (WorkerState.READY, before.pid, before.spec, 0)


def test_sigterm_ends_the_daemon_and_not_the_worker(node, alive):
    node.start()
    before = node.ready()
    node.signal_daemon(signal.SIGTERM)
    assert node.process.returncode == 0
    assert alive(before.pid)
    node.start()
    assert node.client.stop("w1").state is WorkerState.STOPPED
    assert not alive(before.pid)


def test_an_adopted_worker_may_have_served_and_is_not_given_up_at_its_end(node, tmp_path, until):
    """The next daemon does not know; one that cannot be started is given up at the start after that."""
    node.start()
    node.behave(slow_start_s=600, once=True, exit_file=str(tmp_path / "end"), exit_code=96)
    node.client.launch(node.spec())
    pid = until(lambda: node.client.worker("w1").pid, "its process runs")
    node.signal_daemon(signal.SIGKILL)
    node.start()
    (tmp_path / "end").touch()
    assert node.wait("w1", WorkerState.READY, but_not_pid=pid).restarts == 1


def test_a_daemon_killed_during_a_start_adopts_what_came_of_it(node, until):
    node.start()
    node.behave(slow_start_s=1.0)
    node.client.launch(node.spec())
    node.signal_daemon(signal.SIGKILL)
    # A forked daemon is there before the worker's shim is, which a started one never was.
    until((node.home / "workers" / "w1" / LEASE_FILE).exists)
    node.start()
    assert node.wait("w1", WorkerState.READY).restarts == 0


def test_a_daemon_that_is_back_before_the_shim_adopts_the_worker_or_leaves_nothing_of_it(node, until):
    """Whichever is first: the shim with its lease, or the daemon that withdraws orders without one."""
    node.start()
    node.client.launch(node.spec())
    node.signal_daemon(signal.SIGKILL)
    node.start()
    if node.client.workers():
        assert node.wait("w1", WorkerState.READY).restarts == 0
        return
    folder = node.home / "workers" / "w1"
    until(lambda: not list(started_as(("-m", "daemon.shim", str(folder)))), "the shim ends without orders")
    assert not list(pids_with(WORKER_MARK, str(folder)))
    assert node.ready().restarts == 0


def test_a_worker_of_a_version_that_knew_fewer_fields_is_adopted(node, until, monkeypatch):
    def older(value, **options):
        """Return what a version wrote that had no ``dummy_weights`` yet."""
        fields = json.loads(to_json(value, **options))
        del fields["dummy_weights"]
        return json.dumps(fields).encode()

    monkeypatch.setattr("daemon.worker_process.to_json", older)
    process = WorkerProcess(node.home / "workers" / "w1")
    command = Command((sys.executable, str(HERE / "fake_worker.py"), str(process.folder / "spec.json")))
    process.start(node.spec(port=free_port("127.0.0.1")), command, (), DaemonSettings(home=node.home))
    until(lambda: process.look() is Phase.RUNNING)
    node.start()
    after = node.wait("w1", WorkerState.READY)
    assert (after.pid, after.restarts) == (process.lease.pid, 0)
    assert after.token is None  # nor does it want one; started again, it does
    os.kill(after.pid, signal.SIGKILL)
    again = node.wait("w1", WorkerState.READY, but_not_pid=after.pid)
    assert again.token is not None
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{again.url}/stats")


def test_a_worker_whose_lease_has_the_former_names_is_adopted(node, alive):
    """Shims were called keepers: a home that is updated without `iserve down` loses no worker."""
    node.start()
    before = node.ready()
    node.signal_daemon(signal.SIGKILL)
    path = node.home / "workers" / "w1" / "lease.json"
    renewed = path.stat()
    lease = {name.replace("shim_", "keeper_"): value for name, value in json.loads(path.read_text()).items()}
    assert {"keeper_pid", "keeper_start_time_ticks"} <= lease.keys()
    path.write_text(json.dumps(lease))
    os.utime(path, ns=(renewed.st_atime_ns, renewed.st_mtime_ns))
    assert (path.parent / "keeper.lock").exists()
    node.start()
    after = node.client.worker("w1")
    assert (after.state, after.pid, after.restarts) == (WorkerState.READY, before.pid, 0)
    assert alive(before.pid)


def test_a_worker_keeps_its_token_when_it_and_its_daemon_are_started_again(node):
    """The gateway's table has it."""
    node.start()
    before = node.ready()
    node.signal_daemon(signal.SIGKILL)
    node.start()
    assert node.wait("w1", WorkerState.READY).token == before.token
    os.kill(before.pid, signal.SIGKILL)
    assert node.wait("w1", WorkerState.READY, but_not_pid=before.pid).token == before.token
    assert before.token != node.ready("w2", stages=(StageAssignment(device_ids=("cpu:1",), num_layers=2),)).token


def test_a_worker_tells_the_release_that_it_was_started_with_until_it_is_started_anew(node):
    """A worker keeps its version, whatever is installed by now and whichever daemon watches it."""
    node.start()
    before = node.ready()
    assert before.versions == TorchEngine().versions()
    node.signal_daemon(signal.SIGKILL)
    (node.home / "workers/w1/versions.json").write_text('[["engine", "torch 0.0.1"]]')  # upgraded meanwhile
    node.start()
    assert node.wait("w1", WorkerState.READY).versions == (("engine", "torch 0.0.1"),)
    os.kill(before.pid, signal.SIGKILL)
    assert node.wait("w1", WorkerState.READY, but_not_pid=before.pid).versions == TorchEngine().versions()


@pytest.mark.parametrize("text", [None, "", '{"engine": 1}'])
def test_what_an_older_daemon_did_not_record_is_not_told(text, tmp_path):
    if text is not None:
        (tmp_path / "versions.json").write_text(text)
    assert WorkerProcess(tmp_path).versions() == ()


def test_a_worker_whose_spec_was_written_anew_is_ended(node, until, alive, golden: Golden):
    """The next daemon does not run what the file says."""
    node.start()
    before = node.ready()
    node.signal_daemon(signal.SIGKILL)
    file = node.home / "workers" / "w1" / "spec.json"
    file.write_text(file.read_text().replace('"max_batch": 1', '"max_batch": 2'))
    node.start()
    golden("daemon", [line for line in node.daemon_log.splitlines() if "cannot be adopted" in line])
    until(lambda: not alive(before.pid))


def test_a_worker_that_died_with_its_daemon_is_not_listed(node, until, alive):
    node.start()
    before = node.ready()
    shim_pid = node.lease().shim_pid
    node.signal_daemon(signal.SIGKILL)
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: not alive(shim_pid))
    node.start()
    assert node.client.workers() == ()
    with pytest.raises(NotFoundError, match="w1"):
        node.client.worker("w1")
    assert node.ready("w1").pid != before.pid  # and its id is free again


def test_nothing_of_a_worker_outlives_its_shim_and_the_daemon(node, alive):
    """Both killed at once: the next daemon ends what is left, though nothing but a mark tells whose it is."""
    node.start()
    node.behave(grandchildren=True)
    node.ready()
    grandchildren = [int(line) for line in (node.checkpoint / "grandchildren").read_text().split()]
    shim_pid = node.lease().shim_pid
    node.signal_daemon(signal.SIGKILL)
    os.kill(shim_pid, signal.SIGKILL)
    assert any(alive(pid) for pid in grandchildren)
    node.start()
    assert node.client.workers() == ()
    assert not any(alive(pid) for pid in grandchildren)


def test_an_orphan_ends_when_its_lease_runs_out(node, alive, until):
    """Three facts: a renewed worker outlives its lease; without renewal it ends, and so does its shim."""
    node.start()
    before = node.ready(lease_ttl_s=1.0)
    lease = node.lease()
    renewed = os.stat(node.home / "workers" / "w1" / "lease.json").st_mtime
    until(lambda: os.stat(node.home / "workers" / "w1" / "lease.json").st_mtime > renewed + 2.0)
    assert alive(before.pid)
    node.signal_daemon(signal.SIGKILL)
    until(lambda: not alive(before.pid))
    until(lambda: not alive(lease.shim_pid))
    assert json.loads((node.home / "workers" / "w1" / "exit.json").read_text())["reason"] == "lease expired"


def test_damaged_files_of_one_worker_do_not_hinder_the_others(node, alive, until, golden: Golden):
    node.start()
    good, no_lease, no_spec = (node.ready(name) for name in ("good", "no-lease", "no-spec"))
    shim_pid = node.lease("no-lease").shim_pid
    workers = node.home / "workers"
    node.signal_daemon(signal.SIGKILL)
    (workers / "no-lease" / "lease.json").write_text('{"pid": "many"}')
    (workers / "no-spec" / "spec.json").write_bytes(b"\x00\xff")
    (workers / "stray").mkdir()
    try:
        node.start()
        assert [status.pid for status in node.client.workers()] == [good.pid]
        golden("daemon", sorted(line for line in node.daemon_log.splitlines() if line.startswith("WARNING")))
        until(lambda: not alive(no_spec.pid))
        assert alive(no_lease.pid)  # no daemon knows it; its lease bounds its life
        with pytest.raises(ConflictError, match="no-lease"):
            node.client.launch(node.spec("no-lease"))
    finally:
        os.kill(shim_pid, signal.SIGKILL)
