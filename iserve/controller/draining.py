"""Draining of the former workers of updated deployments: they end when they have no request left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from daemon.engines.registry import get_engine
from daemon.status import NodeStatus, WorkerState, WorkerStatus
from iserve.controller.deployment_status import workers_seen
from iserve.controller.service import Controller
from iserve.controller.stored_values import DRAINING, REPLACING, draining_workers, recorded_workers
from iserve.state.store import DeploymentRow
from iserve.verify.worker_client import worker_stats

__all__ = ["Drainer"]

_DRAIN_S = 900.0  # a worker with requests longer than that is ended, and drains by itself
_UNHEARD_S = 60.0  # a gateway that in all this time has not reported the new routes once
_NOT_RUNNING = frozenset({WorkerState.FAILED, WorkerState.RESTARTING})  # its process, and its requests with it


class Drainer:
    """Ends former workers of updated deployments when they have nothing left to do; an update that waits for that
    goes on.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, controller: Controller, clock: Callable[[], float] = time.monotonic) -> None:
        self._controller, self._clock = controller, clock
        self._since: Mapping[str, float] = {}  # worker -> since when it drains
        self._heard_s: float | None = None  # when the gateway last reported the new routes; None: nothing drained

    def look(self, rows: tuple[DeploymentRow, ...], node: NodeStatus, routes_version: int) -> None:
        """Make one pass over ``rows``, which the gateway knows by routes of ``routes_version``. A worker under
        check is left alone."""
        draining = {row: draining_workers(row) for row in rows if row.draining is not None}
        closing = {
            row: recorded_workers(row) for row in rows if row.phase == DRAINING and row.desired == "running"
        }
        now_s = self._clock()
        ids = [spec.worker_id for specs in (*draining.values(), *closing.values()) for spec in specs]
        self._since = {worker_id: self._since.get(worker_id, now_s) for worker_id in ids}
        if not draining and not closing:
            self._heard_s = None
            return
        there = [worker for worker in node.workers if worker.state is not WorkerState.STOPPED]
        demand = self._controller.demand()
        heard = demand is not None and demand.routes_version >= routes_version
        if heard or self._heard_s is None:
            self._heard_s = now_s
        for row, specs in draining.items():
            left = workers_seen(specs, there)
            if not left:
                assert row.draining is not None
                self._controller.store.forget_drained(row.id, row.draining)
            for worker in left:
                if self._may_end(worker, now_s, heard=heard):
                    self._controller.end_worker(worker.spec.worker_id, f"{row.name} was updated")
        for row, specs in closing.items():
            left = workers_seen(specs, there)
            if all(self._may_end(worker, now_s, heard=heard) for worker in left):
                message = f"{row.name}: update, the former workers end and the new ones start"
                self._controller.store.move_update(row.id, DRAINING, REPLACING, message)

    def _may_end(self, worker: WorkerStatus, now_s: float, *, heard: bool) -> bool:
        """Return whether a worker is not being checked, and has no request and gets none or had its time."""
        since_s, heard_s = self._since[worker.spec.worker_id], self._heard_s
        assert heard_s is not None
        if worker.spec.worker_id in self._controller.profiler.workers:
            return False
        if now_s - since_s > _DRAIN_S:
            return True
        return not _has_requests(worker) if heard else now_s - max(since_s, heard_s) > _UNHEARD_S


def _has_requests(worker: WorkerStatus) -> bool:
    """Return whether a worker has requests or does not say: a busy one may be silent for a while."""
    if worker.state is not WorkerState.READY:
        return worker.state not in _NOT_RUNNING
    stats = worker_stats(get_engine(worker.spec.config.engine), worker.spec, worker.url, worker.token)
    return stats is None or stats.running + stats.waiting > 0
