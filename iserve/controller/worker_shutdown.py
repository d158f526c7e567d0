"""The end of a deployment's workers, at the same time: each may take its while to drain."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from daemon.client import DaemonClient
from daemon.worker_spec import WorkerSpec
from fingerprint.errors import NotFoundError

__all__ = ["end_workers"]


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
