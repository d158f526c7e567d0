"""Keeps the running world as the state wants it: companions up, workers there, routes published, orphans ended.

One pass looks, compares and acts once; it never sleeps, so a test calls it directly. A pass that fails is tried
again at the next tick: nothing it knows outlives it.
"""

from __future__ import annotations

import logging
import threading
import time

from daemon.engines.base import WorkerSpec
from daemon.process import write_file_atomically
from daemon.status import NodeStatus, WorkerState
from fingerprint.codec import from_json, to_json
from fingerprint.errors import IserveError, NotFoundError, UnavailableError
from iserve.controller.service import Controller
from iserve.routes import ApiKeyRecord, GatewayLimits, Route, RouteTable, WorkerTarget
from iserve.state.store import DeploymentRow

__all__ = ["Reconciler"]

log = logging.getLogger(__name__)

_UNFINISHED = frozenset({"accepted", "resolving", "profiling", "planning", "launching"})
_ORPHAN_GRACE_S = 5.0  # a worker may be launched a moment before its record is read


class Reconciler:
    """The loop behind one controller."""

    def __init__(self, controller: Controller, *, tick_s: float = 0.3) -> None:
        self._controller = controller
        self._tick_s = tick_s
        self._published: tuple[object, ...] | None = None
        self._orphans: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reconcile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=30)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self.tick()
            except IserveError as error:
                log.warning("%s", error)
            except Exception:
                log.exception("reconcile")
            self._stopping.wait(self._tick_s)

    def tick(self) -> None:
        """One pass."""
        controller = self._controller
        for companion in (controller.daemon_process, controller.gateway_process):
            try:
                companion.ensure()
            except UnavailableError as error:
                log.warning("%s", error)
        node = controller.observe()
        rows = controller.store.deployments()
        for row in rows:
            self._settle(row, node)
        if node is not None:
            self._end_orphans(rows, node)
        self.publish(controller.store.deployments(), node)

    def _settle(self, row: DeploymentRow, node: NodeStatus | None) -> None:
        controller = self._controller
        if controller.is_active(row):
            return
        if row.desired == "removed":
            self._remove(row)
        elif row.phase in _UNFINISHED or (row.phase == "ready" and node is not None and _is_lost(row, node)):
            controller.work_on(row)

    def _remove(self, row: DeploymentRow) -> None:
        if row.worker is not None:
            worker_id = from_json(row.worker, WorkerSpec).worker_id
            try:
                self._controller.daemon().stop(worker_id)
            except NotFoundError:
                pass
            except UnavailableError as error:
                log.warning("removing %s: %s", row.name, error)
                return
        self._controller.store.delete_deployment(row.id)
        self._controller.store.add_event(None, "removed", f"{row.name}: removed")

    def _end_orphans(self, rows: tuple[DeploymentRow, ...], node: NodeStatus) -> None:
        """Stop workers that no deployment owns, such as those of a profile whose controller was killed."""
        owned = {from_json(row.worker, WorkerSpec).worker_id for row in rows if row.worker is not None}
        present = {w.spec.worker_id for w in node.workers if w.state is not WorkerState.STOPPED}
        if self._controller.profiler.is_busy:
            present = {worker_id for worker_id in present if not worker_id.startswith("profile-")}
        now = time.monotonic()
        self._orphans = {w: self._orphans.get(w, now) for w in present - owned}
        for worker_id, since in self._orphans.items():
            if now - since >= _ORPHAN_GRACE_S:
                log.warning("ending worker %s: no deployment owns it", worker_id)
                self._controller.daemon().stop(worker_id)

    def publish(self, rows: tuple[DeploymentRow, ...], node: NodeStatus | None) -> None:
        """Write routes.json when its content changes. With the daemon away the last routes stay in force."""
        settings, store = self._controller.settings, self._controller.store
        if node is None and self._published is not None:
            return
        routes = tuple(
            route
            for row in rows
            if row.desired == "running"
            for route in (_route(row, node),)
            if route is not None
        )
        keys = tuple(
            ApiKeyRecord(key_id=k.key_id, sha256=k.sha256, scope=k.scope)
            for k in store.api_keys()
            if not k.revoked
        )
        content = (settings.keys_required, routes, keys)
        if content == self._published:
            return
        table = RouteTable(
            version=store.next_route_version(),
            auth_required=settings.keys_required,
            routes=routes,
            keys=keys,
            limits=GatewayLimits(),
        )
        settings.run_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file_atomically(settings.run_folder / "routes.json", to_json(table))
        self._published = content


def _is_lost(row: DeploymentRow, node: NodeStatus) -> bool:
    """Whether the daemon does not know the worker of a deployment that was ready, or it was stopped there."""
    if row.worker is None:
        return True
    worker_id = from_json(row.worker, WorkerSpec).worker_id
    states = [w.state for w in node.workers if w.spec.worker_id == worker_id]
    return not states or states[0] is WorkerState.STOPPED


def _route(row: DeploymentRow, node: NodeStatus | None) -> Route | None:
    if row.worker is None or row.phase != "ready":
        return None
    spec = from_json(row.worker, WorkerSpec)
    seen = next((w for w in node.workers if w.spec.worker_id == spec.worker_id), None) if node else None
    return Route(
        name=row.name,
        model=spec.served_model,
        created=int(row.created_at),
        max_context_tokens=spec.limits.max_context_tokens,
        workers=(
            WorkerTarget(
                worker_id=spec.worker_id,
                url=f"http://{spec.host}:{spec.port}" if seen is None else seen.url,
                ready=seen is not None and seen.state is WorkerState.READY,
            ),
        ),
    )
