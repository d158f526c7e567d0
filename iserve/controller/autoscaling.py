"""Scaling of idle deployments to zero replicas, and back at the next request (``deploy --scale-to-zero``).

``placement.scaling`` decides, as in the simulator. This module carries the decision out and records it, each
step written down before it is taken:

``ready`` -> ``scaled-to-zero``: recorded first. The gateway then sends nothing to the workers any more. Only when
it says so, and that it has nothing left there, they are ended: no request is cut short by it.

``scaled-to-zero`` -> ``scaling-up``: when requests wait in the gateway. The deployer takes it to ``ready``, or
back to ``scaled-to-zero`` with the reason, which the waiting requests are answered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from daemon.status import NodeStatus, WorkerState, WorkerStatus
from fingerprint.errors import ConfigError
from iserve.controller.deployment_status import workers_seen
from iserve.controller.service import Controller
from iserve.controller.stored_values import SCALED_TO_ZERO, SCALING_UP, recorded_request, recorded_workers
from iserve.route_table import Demand, DeploymentDemand
from iserve.state.store import DeploymentRow
from placement.scaling import Scaling, replicas_for
from placement.types import DeploymentState

__all__ = ["Autoscaler", "Refusal"]


_TRY_AGAIN_S = 10.0  # after a start that failed: meanwhile requests are refused
_DRAIN_PATIENCE_S = 60.0  # for a gateway that does not answer; a worker that is ended then drains by itself


class Refusal(NamedTuple):
    """Refusal of requests for a deployment that cannot be started."""

    reason: str
    retry_after_s: int


class Autoscaler:
    """Autoscaler of one controller.

    It remembers only since when a deployment has been as it is; a new one begins to count anew.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, controller: Controller, clock: Callable[[], float] = time.monotonic) -> None:
        self._controller, self._clock = controller, clock
        self._since: dict[int, tuple[str, float]] = {}  # deployment -> its phase, and since when
        self._not_started: set[int] = set()  # deployments at zero whose start failed

    def look(self, rows: tuple[DeploymentRow, ...], node: NodeStatus | None, routes_version: int) -> None:
        """Make one pass over ``rows``; routes of at least ``routes_version`` have reached the gateway."""
        now_s = self._clock()
        self._not_started = {row.id for row in rows if row.phase == SCALED_TO_ZERO and self._start_failed(row)}
        self._since = {row.id: (row.phase, self._since_s(row, now_s)) for row in rows}
        steady = [row for row in rows if row.desired == "running" and row.update_request is None]
        watched = [(row, _idle_limit_s(row)) for row in steady]
        watched = [
            (row, limit_s) for row, limit_s in watched if limit_s is not None or row.phase == SCALED_TO_ZERO
        ]
        if not watched or node is None:
            return
        demand = self._controller.demand()
        if demand is not None and demand.routes_version < routes_version:
            demand = None  # it has not read the last ones yet
        for row, limit_s in watched:
            asked = _of(demand, row.name)
            steady_s = now_s - self._since[row.id][1]
            if row.phase == SCALED_TO_ZERO:
                self._keep_at_zero(row, node, asked, steady_s)
            elif row.phase == "ready" and limit_s is not None and asked is not None:
                is_ready = any(worker.state is WorkerState.READY for worker in _living_workers(row, node))
                if is_ready and replicas_for(_state(row, asked, steady_s), _rule(limit_s)) == 0:
                    self._scale_to_zero(row, limit_s)

    def refusal(self, row: DeploymentRow) -> Refusal | None:
        """Return the refusal of ``row``, at zero replicas, whose start just failed; None: a request starts it."""
        if row.phase != SCALED_TO_ZERO or row.error is None or not self._start_failed(row):
            return None
        now_s = self._clock()
        if now_s - self._since_s(row, now_s) >= _TRY_AGAIN_S:
            return None
        return Refusal(row.error, math.ceil(_TRY_AGAIN_S))

    def _start_failed(self, row: DeploymentRow) -> bool:
        """Return whether ``row`` is at zero because a start failed while this autoscaler ran. Any other error
        is of an earlier time, or of an update that failed."""
        phase, _ = self._since.get(row.id, (None, 0.0))
        return phase == SCALING_UP or row.id in self._not_started

    def _since_s(self, row: DeploymentRow, now_s: float) -> float:
        phase, since_s = self._since.get(row.id, (None, now_s))
        return since_s if phase == row.phase else now_s

    def _scale_to_zero(self, row: DeploymentRow, limit_s: float) -> None:
        with self._controller.profiler.paused_now() as alone:  # not while it is being checked
            if alone:
                self._record(
                    row, SCALED_TO_ZERO, f"{row.name}: scaled to zero after {limit_s:g} s without a request"
                )

    def _keep_at_zero(
        self, row: DeploymentRow, node: NodeStatus, asked: DeploymentDemand | None, steady_s: float
    ) -> None:
        workers = _living_workers(row, node)
        if any(w.state is WorkerState.STOPPING or self._controller.is_ending(w.spec.worker_id) for w in workers):
            return
        wanted = asked is not None and replicas_for(_state(row, asked, steady_s), _rule(None)) > 0
        if wanted and self.refusal(row) is None:
            self._record(row, SCALING_UP, f"{row.name}: scaling up, requests wait")
            self._since[row.id] = (SCALING_UP, self._clock())  # it may be at zero again before the next look
            return
        drained = steady_s > _DRAIN_PATIENCE_S if asked is None else not asked.outstanding
        for worker in workers if drained else ():
            self._controller.end_worker(worker.spec.worker_id, f"{row.name} is scaled to zero")

    def _record(self, row: DeploymentRow, phase: str, message: str) -> None:
        """Change the phase, unless an update was accepted meanwhile: it has workers of its own to start."""
        store = self._controller.store
        if store.update_deployment(row.id, phase=phase, as_read=row, unless_updating=True):
            store.add_event(row.id, phase, message)


def _idle_limit_s(row: DeploymentRow) -> float | None:
    try:
        return recorded_request(row).scale_to_zero_s
    except ConfigError:  # its trouble is reported where it is asked for
        return None


def _of(demand: Demand | None, name: str) -> DeploymentDemand | None:
    return None if demand is None else next((d for d in demand.deployments if d.name == name), None)


def _rule(idle_s: float | None) -> Scaling:
    return Scaling(min_replicas=1, max_replicas=1, idle_s=idle_s)


def _state(row: DeploymentRow, asked: DeploymentDemand, steady_s: float) -> DeploymentState:
    """Return the state as the decision sees it.

    All replicas are scaled to zero and back together, so that the rate decides nothing, and is not given.
    """
    return DeploymentState(
        name=row.name,
        model=row.name,
        wanted=int(row.phase == "ready"),
        replicas=(),
        moving=False,
        waiting=asked.waiting,
        requests_per_s=0.0,
        service_s=0.0,
        idle_s=asked.idle_s,
        steady_s=steady_s,
    )


def _living_workers(row: DeploymentRow, node: NodeStatus) -> tuple[WorkerStatus, ...]:
    living = (worker for worker in node.workers if worker.state is not WorkerState.STOPPED)
    return workers_seen(recorded_workers(row), living)
