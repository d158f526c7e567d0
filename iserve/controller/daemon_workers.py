"""Workers of the daemon: launched, looked at and waited for, while the daemon itself may be away for a moment."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from daemon.client import DaemonClient
from daemon.profile_client import WorkerHandle
from daemon.status import WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from fingerprint.errors import ConflictError, EngineError, NotFoundError, UnavailableError

__all__ = ["ask_daemon", "end_workers", "launched", "start_profiling_worker", "wait_until_ready"]

T = TypeVar("T")

log = logging.getLogger(__name__)

_ENDED = {WorkerState.FAILED, WorkerState.STOPPED, WorkerState.STOPPING}


def ask_daemon(
    daemon: Callable[[], DaemonClient], question: Callable[[DaemonClient], T], *, patience_s: float = 30.0
) -> T:
    """Return what the daemon answers.

    One that is killed meanwhile is back within a few seconds, and is asked again.

    Args:
        question: may be asked twice, the answer to the first being lost.

    Raises:
        UnavailableError: it is not back, or cannot do what is asked now (its disk is full, say).
        IserveError: what the daemon answered with.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return question(daemon())
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def launched(daemon: DaemonClient, spec: WorkerSpec) -> WorkerStatus:
    """Return the worker of ``spec``: the one that is there, a stopped one not counted, or one that is launched
    now.

    A worker with the same id and another spec is ended: a state that was put back gives out ids again.

    Raises:
        IserveError: as ``DaemonClient.launch``.
    """
    if (there := _the_one_there(daemon, spec)) is not None:
        return there
    try:
        return daemon.launch(replace(spec, port=0))  # any free port: the one it had may be another's by now
    except ConflictError:  # what a controller asked a moment before it was killed was done in between
        if (there := _the_one_there(daemon, spec)) is not None:
            return there
        raise


def _the_one_there(daemon: DaemonClient, spec: WorkerSpec) -> WorkerStatus | None:
    """Return the worker of ``spec``, unless it was stopped; end one that only has the same id."""
    with contextlib.suppress(NotFoundError):
        status = daemon.worker(spec.worker_id)
        if status.state is WorkerState.STOPPED:
            return None
        if status.is_of(spec):
            return status
        log.warning("worker %s is not the one that is recorded, and is ended", spec.worker_id)
        daemon.stop(spec.worker_id)
    return None


def wait_until_ready(
    daemon: Callable[[], DaemonClient], worker_id: str, timeout_s: float, *, go_on: Callable[[], None]
) -> WorkerStatus:
    """Return the worker's status once it serves; a daemon that is away for a while is waited for.

    Args:
        go_on: called between looks; what it raises ends the waiting.

    Raises:
        NotFoundError: the daemon does not know it.
        EngineError: the worker gave up, was stopped, or is not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    last = "unknown, not ready,"
    while time.monotonic() < deadline:
        go_on()
        try:
            status = daemon().worker(worker_id)
        except UnavailableError:
            time.sleep(0.2)
            continue
        if status.state is WorkerState.READY:
            return status
        if status.state in _ENDED:
            raise EngineError(status.error or f"the worker {worker_id} is {status.state}")
        last = f"{status.state}, not ready," if status.error is None else f"{status.state} ({status.error})"
        time.sleep(0.1)
    raise EngineError(f"the worker {worker_id} is {last} after {timeout_s:.0f} s")


class _DaemonWorker:
    """A worker that the daemon runs, as the profiling client wants it."""

    def __init__(self, daemon: Callable[[], DaemonClient], status: WorkerStatus) -> None:
        self._daemon, self._worker_id = daemon, status.spec.worker_id
        self.url, self.token = status.url, status.token

    def failure(self) -> str | None:
        status = ask_daemon(self._daemon, lambda there: there.worker(self._worker_id))
        if status.state in _ENDED or status.restarts:
            return status.error or f"the profiling worker is {status.state}"
        return None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the daemon has seen it serve; before, another program may answer on its port.

        Raises:
            EngineError: it has ended, or is not ready in time.
        """
        status = wait_until_ready(self._daemon, self._worker_id, timeout_s, go_on=self._check_alive)
        self.url, self.token = status.url, status.token

    def _check_alive(self) -> None:
        if (failure := self.failure()) is not None:
            raise EngineError(failure)

    def stop(self) -> None:
        try:
            ask_daemon(self._daemon, lambda there: there.stop(self._worker_id))
        except NotFoundError:
            return


def start_profiling_worker(daemon: Callable[[], DaemonClient], spec: WorkerSpec, timeout_s: float) -> WorkerHandle:
    """Return a worker that serves; nothing is left of one that does not within ``timeout_s``.

    Raises:
        EngineError: it has ended, or is not ready in time.
    """
    worker = _DaemonWorker(daemon, ask_daemon(daemon, lambda there: launched(there, spec)))
    try:
        worker.wait_until_ready(timeout_s)
    except BaseException:
        worker.stop()
        raise
    return worker


def end_workers(daemon: DaemonClient, workers: Sequence[WorkerSpec]) -> None:
    """End workers; return when all are gone, and their memory is free.

    Raises:
        UnavailableError: the daemon is away; some may be left.
    """

    def end(worker: WorkerSpec) -> None:
        with contextlib.suppress(NotFoundError):
            daemon.stop(worker.worker_id)

    if workers:
        with ThreadPoolExecutor(len(workers), thread_name_prefix="ending") as pool:
            list(pool.map(end, workers))
