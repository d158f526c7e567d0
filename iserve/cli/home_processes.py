"""Looking at and ending the processes of one home, with or without a controller to ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from daemon.client import DaemonClient
from daemon.process import is_alive, read_record
from daemon.status import WorkerState
from daemon.worker_process import Phase, WorkerProcess
from fingerprint.errors import ConflictError, NotFoundError, StateUnavailableError, UnavailableError
from iserve.controller.child_processes import daemon_process, end_controllers, gateway_process
from iserve.settings import Settings
from iserve.state.backup import join_log

__all__ = ["ProcessState", "daemon_client", "living_workers", "process_states", "take_down"]


@dataclass(frozen=True, slots=True)
class ProcessState:
    name: str
    pid: int | None
    url: str | None


def process_states(settings: Settings) -> tuple[ProcessState, ...]:
    """Return controller, gateway, daemon and workers, as their records and the kernel say."""
    states = []
    for name in ("controller", "gateway", "daemon"):
        record = read_record(settings.run_folder / f"{name}.json")
        alive = record is not None and is_alive(record)
        states.append(
            ProcessState(name, record.pid, record.url) if record and alive else ProcessState(name, None, None)
        )
    daemon = daemon_client(settings)
    if daemon is not None:
        with contextlib.suppress(UnavailableError):
            states += [
                ProcessState(f"worker {w.spec.worker_id} ({w.state})", w.pid, w.url) for w in daemon.workers()
            ]
    return tuple(states)


def daemon_client(settings: Settings) -> DaemonClient | None:
    """Return a client of the home's daemon; None where none lives."""
    record = daemon_process(settings).record()
    return None if record is None else DaemonClient(record.url, record.token)


def take_down(settings: Settings) -> Iterator[str]:
    """End controller, gateway, workers and daemon, in that order, and say what was ended.

    A process that has no record yet is ended as well: it would appear a moment later, and stay.

    Raises:
        UnavailableError: something would not end.
    """
    if end_controllers(settings):
        yield "controller ended"
    if isinstance(settings.state, Path):
        # A killed controller leaves commits in the log next to the file. The next start would join them too.
        with contextlib.suppress(ConflictError, StateUnavailableError):
            join_log(settings.state)
    if gateway_process(settings).stop():
        yield "gateway ended"
    child = daemon_process(settings)
    if child.record() is None and any((settings.home / "workers").glob("*/lease.json")):
        child.ensure()  # it adopts what was left, so that it can be ended properly
    daemon = daemon_client(settings)
    if daemon is not None:
        for worker in daemon.workers():
            if worker.state is not WorkerState.STOPPED:
                with contextlib.suppress(NotFoundError):
                    daemon.stop(worker.spec.worker_id)
                yield f"worker {worker.spec.worker_id} ended"
    yield "daemon ended" if child.stop() else "nothing else runs"


def living_workers(settings: Settings) -> Iterator[WorkerProcess]:
    """Yield the home's workers that have a process, as their leases and the kernel say; a daemon is not asked."""
    for path in sorted((settings.home / "workers").glob("*/lease.json")):
        worker = WorkerProcess(path.parent)
        if worker.look() is not Phase.ENDED or worker.left():
            yield worker
