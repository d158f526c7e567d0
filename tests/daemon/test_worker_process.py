"""One worker's processes as the daemon sees them: what is looked at while a start is under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon import worker_process
from daemon.engines.base import Command, StageAssignment, WorkerLimits, WorkerSpec
from daemon.lease import LEASE_FILE, Lease, write_file
from daemon.settings import DaemonSettings
from daemon.worker_process import Phase, WorkerProcess
from fingerprint.config import DeploymentConfig

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
    keeper_pid=2**22 + 2,
    keeper_start_time_ticks=1,
    port=1,
    config_hash="",
    started_at=0.0,
    lease_ttl_s=1.0,
)


def test_who_looks_during_a_restart_does_not_take_up_the_last_workers_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is gone, so the new start would be taken for ended, and its keeper be killed."""
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
    assert process.look() is Phase.STARTING


def test_a_keeper_that_begins_while_its_worker_is_ended_does_not_make_the_end_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the folder's lock for the moment in which it finds that its orders were withdrawn."""
    process = WorkerProcess(tmp_path / "w1")
    process.folder.mkdir()
    looks = [False, False, True]  # before the end, after it, and at the last look

    def keeper_is_alive(_folder: Path) -> bool:
        return looks.pop(0) if looks else False

    monkeypatch.setattr(worker_process, "keeper_is_alive", keeper_is_alive)
    assert process.end(grace_s=0.0)
    assert not looks
