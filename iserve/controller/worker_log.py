"""Log of one replica of a deployment: its end, or part by part while the workers change."""

from __future__ import annotations

from collections.abc import Callable

from daemon.client import DaemonClient
from daemon.worker_log import LogPart
from daemon.worker_spec import WorkerSpec
from fingerprint.errors import NotFoundError
from iserve.api_documents import LogDocument
from iserve.controller.stored_values import recorded_workers
from iserve.state.store import DeploymentRow

__all__ = ["end_of", "part_of"]


def end_of(daemon: DaemonClient, row: DeploymentRow, lines: int, replica: int) -> str:
    """Return the last lines of a replica, counted from 1.

    Raises:
        NotFoundError: no such replica, or no worker yet.
    """
    worker = _worker(row, replica)
    if worker is None:
        raise NotFoundError(f"the deployment {row.name!r} has no worker yet (it is {row.phase})")
    return daemon.log(worker.worker_id, lines)


def part_of(
    daemon: Callable[[], DaemonClient], row: DeploymentRow, lines: int, replica: int, position: str | None
) -> LogDocument:
    """Return what the replica printed behind ``position``, ``WORKER/PLACE``; nothing while it has no worker.

    The log of another worker than that of ``position``, one that took its place, is returned from its begin.

    Raises:
        NotFoundError: no such replica.
        BadInputError: no position that a part had.
    """
    worker = _worker(row, replica)
    part = LogPart(text="", position="")
    if worker is not None:
        before, _, place = (position or "").rpartition("/")
        if position is not None and before != worker.worker_id:
            place = ""
        try:
            part = daemon().log_part(worker.worker_id, lines=lines, position=None if position is None else place)
        except NotFoundError:  # the daemon does not know it yet, or any more: scaled to zero, say
            return LogDocument(text="", position=position, created_at=row.created_at)
    following = f"{worker.worker_id}/{part.position}" if worker is not None and part.position else position
    return LogDocument(text=part.text, position=following, created_at=row.created_at)


def _worker(row: DeploymentRow, replica: int) -> WorkerSpec | None:
    workers = recorded_workers(row)
    if workers and replica > len(workers):
        raise NotFoundError(f"the deployment {row.name!r} has no replica {replica}, it has {len(workers)}")
    return workers[replica - 1] if workers else None
