"""Reconciliation: child processes and workers run, routes are published and orphans ended, as the state says.

One pass looks, compares and acts once; it never sleeps, so a test calls it directly. A pass that fails is tried
again at the next tick: nothing it knows outlives it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from daemon.atomic_file import write_file_atomically
from daemon.home import make_private
from daemon.settings import DaemonSettings
from daemon.status import NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.engines import traits_of
from fingerprint.errors import BadInputError, ConfigError, IserveError, UnavailableError
from fingerprint.service_model import ServiceModel
from iserve.controller.autoscaling import Autoscaler
from iserve.controller.deployment_status import seen_of
from iserve.controller.draining import Drainer
from iserve.controller.service import Controller
from iserve.controller.stored_values import (
    DRAINING,
    SCALING_UP,
    SERVED_PHASES,
    STARTED_SOON_PHASES,
    draining_workers,
    is_routed,
    recorded_request,
    recorded_workers,
    update_workers,
)
from iserve.controller.variant_events import VariantEvents
from iserve.controller.variant_serving import adapter_slots, has_served, loaded_adapters, variant_servers
from iserve.planning.document import PlanDocument
from iserve.route_table import ApiKeyRecord, GatewayLimits, Route, RouteTable, VariantRoute, WorkerTarget
from iserve.state.store import DeploymentRow
from planner.admission import AdmissionPolicy

__all__ = ["ROUTES_FILE", "Patience", "Reconciler", "admission_policy_of", "planned_service"]

log = logging.getLogger(__name__)

ROUTES_FILE = "routes.json"

_UNFINISHED = frozenset({"accepted", "resolving", "profiling", "planning", "launching", SCALING_UP})
_GIVEN_UP = frozenset({"refused", "failed"})
_SAY_AGAIN_S = 60.0
_TRY_AGAIN_S = 10.0  # a replica that could not be started again, while the rest serve
_LOST_AGAIN_S = 1.0  # one that could, and is lost once more
_ORPHAN_GRACE_S = 5.0  # a worker may be launched a moment before its record is read


class Reconciler:
    """The loop behind one controller."""

    def __init__(self, controller: Controller, *, tick_s: float = 0.3) -> None:
        self._controller = controller
        self._tick_s = tick_s
        self._autoscaler = Autoscaler(controller)
        self._drainer = Drainer(controller)
        self._variant_events = VariantEvents(controller.store, controller.variant_demand)
        self._patience = Patience(controller.settings.ready_timeout_s + DaemonSettings.unresponsive_s)
        self._published: tuple[object, ...] | None = None
        self._targets = _targets_in_force(controller)  # by worker, as last published
        self._version = 0
        self._orphans: dict[str, float] = {}
        self._said_s: dict[str, float] = {}
        self._tried_s: dict[int, float] = {}  # deployment -> when a lost worker of it was started again
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="reconcile", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self.tick()
            except IserveError as error:
                self._warn(error)
            except Exception:
                log.exception("reconcile")
            self._stopping.wait(self._tick_s)

    def _warn(self, error: IserveError) -> None:
        """Log a warning, once a minute for one reason: it recurs at every pass, and would fill the disk."""
        now_s, text = time.monotonic(), str(error)
        self._said_s = {said: at_s for said, at_s in self._said_s.items() if now_s - at_s < _SAY_AGAIN_S}
        if text not in self._said_s:
            self._said_s[text] = now_s
            log.warning("%s", text)

    def tick(self) -> None:
        """Make one pass."""
        controller = self._controller
        for child in (controller.daemon_process, controller.gateway_process):
            try:
                child.ensure()
            except UnavailableError as error:
                self._warn(error)
        controller.store.hold()  # one that has lost its database to another does nothing
        rows = controller.store.deployments()  # before the node: what is recorded as ready is then seen there
        node = controller.observe()
        self.publish(rows, node)  # first, so that no request is sent to a worker that is about to be stopped
        if node is not None:
            self._end_overdue(rows, node)
        for row in rows:
            self._settle(row, node)
        self._autoscaler.look(rows, node, self._version)
        self._variant_events.look(rows)
        if node is not None:
            self._drainer.look(rows, node, self._version)
            self._end_orphans(rows, node)

    def _settle(self, row: DeploymentRow, node: NodeStatus | None) -> None:
        if row.desired == "removed" or row.phase in _UNFINISHED:
            self._controller.work_on(row)
            return
        is_at_work = row.phase != DRAINING and (row.phase != "ready" or _is_any_there(row, node))
        if row.update_request is not None and is_at_work:
            self._controller.work_on_update(row)
        if row.phase == "ready" and node is not None and self._is_lost(row, node):
            now_s = time.monotonic()
            pause_s = _LOST_AGAIN_S if row.error is None else _TRY_AGAIN_S
            if now_s - self._tried_s.get(row.id, -pause_s) >= pause_s:
                self._tried_s[row.id] = now_s
                self._controller.work_on(row)

    def _is_lost(self, row: DeploymentRow, node: NodeStatus) -> bool:
        """Return whether the daemon does not know a worker of a ready deployment, or it was stopped there.

        A worker that rests is not missed while another is there.
        """
        there = {w.spec.worker_id: w for w in node.workers if w.state is not WorkerState.STOPPED}
        recorded = recorded_workers(row)
        workers = {spec.worker_id for spec in recorded}
        lost = workers - {spec.worker_id for spec in recorded if seen_of(spec, there) is not None}
        return lost == workers or not all(self._patience.rests(one) for one in lost)

    def _end_overdue(self, rows: tuple[DeploymentRow, ...], node: NodeStatus) -> None:
        """End workers of ready deployments that do not become ready again, and say so."""
        ready = [row for row in rows if row.phase == "ready" and row.desired == "running"]
        owners = {worker.worker_id: row for row in ready for worker in recorded_workers(row)}
        for worker_id in self._patience.given_up(w for w in node.workers if w.spec.worker_id in owners):
            row, limit_s = owners[worker_id], self._patience.limit_s
            error = (
                f"{worker_id} did not serve for {limit_s:.0f} s and is ended; it is started again in "
                f"{limit_s:.0f} s, or as soon as no other replica is there. Why: iserve logs {row.name}"
            )
            if self._controller.store.update_deployment(row.id, phase="ready", error=error, as_read=row):
                self._controller.store.add_event(row.id, "ready", error)
            self._controller.end_worker(worker_id, "it does not become ready")

    def _end_orphans(self, rows: tuple[DeploymentRow, ...], node: NodeStatus) -> None:
        """Stop workers that no deployment owns.

        They are those of a profile whose controller was killed, say, or one that did not become ready in time and
        would hold its memory for no deployment.
        """
        owned = {w.worker_id for row in rows if row.phase not in _GIVEN_UP for w in recorded_workers(row)}
        owned |= {w.worker_id for row in rows for w in (*update_workers(row), *draining_workers(row))}
        present = {w.spec.worker_id for w in node.workers if w.state is not WorkerState.STOPPED}
        now = time.monotonic()
        orphans = present - owned - self._controller.profiler.workers
        self._orphans = {w: self._orphans.get(w, now) for w in orphans}
        for worker_id, since in self._orphans.items():
            if now - since >= _ORPHAN_GRACE_S:
                self._controller.end_worker(worker_id)

    def publish(self, rows: tuple[DeploymentRow, ...], node: NodeStatus | None) -> None:
        """Write routes.json when its content changes. With the daemon away workers stay as they were last seen.

        Raises:
            UnavailableError: it cannot be written; it is tried again at the next pass.
        """
        settings, store, followed = (
            self._controller.settings,
            self._controller.store,
            self._controller.followed_routes,
        )
        ticket = followed.begin()
        routes = self._routes(rows, node)
        keys = tuple(
            ApiKeyRecord(key_id=k.key_id, sha256=k.sha256, scope=k.scope)
            for k in store.api_keys()
            if not k.revoked
        )
        content = (settings.keys_required, routes, keys)
        if content == self._published:
            followed.publish(ticket, self._version)
            return
        table = RouteTable(
            version=store.next_route_version(),
            auth_required=settings.keys_required,
            routes=routes,
            keys=keys,
            limits=GatewayLimits(),
        )
        path = settings.run_folder / ROUTES_FILE
        try:
            make_private(settings.run_folder)
            write_file_atomically(path, to_json(table))
        except OSError as error:
            raise UnavailableError(
                f"cannot write {path}: {error.strerror}; free space or mend the folder"
            ) from error
        self._published, self._version = content, table.version
        self._targets = _targets_of(routes)
        followed.publish(ticket, table.version)

    def _routes(self, rows: tuple[DeploymentRow, ...], node: NodeStatus | None) -> tuple[Route, ...]:
        """Return the routes; one name leads to one deployment, which is the variant's own as soon as it serves."""
        own = {row.name for row in rows if has_served(row)}
        found = self._controller.variants.routes(variant_servers(rows))
        variants = {name: tuple(one for one in of_base if one.name not in own) for name, of_base in found.items()}
        of_bases = {one.name for of_base in variants.values() for one in of_base}
        routes = (
            self._route(row, node, variants.get(row.name, ()))
            for row in rows
            if row.desired == "running" and row.name not in of_bases
        )
        return tuple(route for route in routes if route is not None)

    def _route(
        self, row: DeploymentRow, node: NodeStatus | None, variants: tuple[VariantRoute, ...]
    ) -> Route | None:
        specs = recorded_workers(row)
        if not specs or not is_routed(row):
            return None
        there = None if node is None else {w.spec.worker_id: w for w in node.workers}
        refusal = self._autoscaler.refusal(row)
        patience_s = self._controller.settings.start_timeout_s if row.phase in STARTED_SOON_PHASES else None
        first, admission = specs[0], admission_policy_of(row, specs[0].limits.max_batch)
        # As many again wait at the worker as run there, so that a slot that frees is filled at once; but where
        # late requests are rejected: all of those wait in the gateway, which then knows when each began.
        a_slot = 2 if admission is None else 1
        return Route(
            name=row.name,
            model=first.served_model,
            created=int(row.created_at),
            max_context_tokens=first.limits.max_context_tokens,
            workers=tuple(self._target(spec, there, row.phase, a_slot) for spec in specs),
            ready_wait_s=patience_s,
            refusal=None if refusal is None else refusal.reason,
            retry_after_s=1 if refusal is None else refusal.retry_after_s,
            admission=admission,
            adapter_slots=adapter_slots(specs),
            loaded_adapters=loaded_adapters(specs),
            variants=variants,
            loads_on_gpu=traits_of(first.config.engine).loads_on_gpu,
        )

    def _target(
        self, spec: WorkerSpec, there: Mapping[str, WorkerStatus] | None, phase: str, a_slot: int
    ) -> WorkerTarget:
        """Return the worker as it is among those ``there``; None, the daemon is away: as it was last published."""
        target = WorkerTarget(worker_id=spec.worker_id, url=f"http://{spec.host}:{spec.port}", ready=False)
        if there is None:
            target = self._targets.get(spec.worker_id, target)
        elif (seen := seen_of(spec, there)) is not None:
            target = replace(target, url=seen.url, token=seen.token, ready=seen.state is WorkerState.READY)
        return replace(
            target, ready=target.ready and phase in SERVED_PHASES, max_outstanding=a_slot * spec.limits.max_batch
        )


def _targets_of(routes: Iterable[Route]) -> dict[str, WorkerTarget]:
    return {target.worker_id: target for route in routes for target in route.workers}


def _targets_in_force(controller: Controller) -> dict[str, WorkerTarget]:
    """Return the targets of the gateway that runs, from an earlier controller of this home; none without one:
    its workers may have ended since, and their ports be other programs'.
    """
    try:
        if controller.gateway_process.record() is None:
            return {}
        text = (controller.settings.run_folder / ROUTES_FILE).read_bytes()
        return _targets_of(from_json(text, RouteTable, what=ROUTES_FILE).routes)
    except (OSError, BadInputError, UnavailableError):
        return {}


def _is_any_there(row: DeploymentRow, node: NodeStatus | None) -> bool:
    """Return whether the daemon knows a worker of the deployment. After `iserve down` it knows none until the
    deployer has started them again, which must not work on the deployment at the same time as an update."""
    workers = () if node is None else node.workers
    there = {w.spec.worker_id: w for w in workers if w.state is not WorkerState.STOPPED}
    return any(seen_of(spec, there) is not None for spec in recorded_workers(row))


_NOT_YET = frozenset({WorkerState.STARTING, WorkerState.RESTARTING})


class Patience:
    """Deadlines for workers of ready deployments to become ready again; a new controller begins to count anew.

    The daemon ends a start that takes too long and starts the worker once more. A worker that hangs each time is
    never given up there: the daemon counts the starts of some minutes, which such starts outlast. Here it is,
    after as long as a worker may take to start and one that serves may be silent before. It then rests for as
    long, so that half of the time its memory is free.

    Args:
        limit_s: that a worker may not serve in one go, and then rests.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._clock = limit_s, clock
        self._since_s: dict[str, float] = {}  # worker -> when it was first seen not to serve
        self._rests_until_s: dict[str, float] = {}

    def given_up(self, workers: Iterable[WorkerStatus]) -> tuple[str, ...]:
        """Return the ids of those of ``workers``, all of ready deployments, whose time is up; they rest from now
        on.
        """
        now_s = self._clock()
        late = [worker.spec.worker_id for worker in workers if worker.state in _NOT_YET]
        self._since_s = {one: self._since_s.get(one, now_s) for one in late}
        self._rests_until_s = {one: until_s for one, until_s in self._rests_until_s.items() if until_s > now_s}
        over = tuple(one for one, since_s in self._since_s.items() if now_s - since_s > self.limit_s)
        for one in over:
            del self._since_s[one]
            self._rests_until_s[one] = now_s + self.limit_s
        return over

    def rests(self, worker_id: str) -> bool:
        """Return whether a worker rests, as of the last look."""
        return worker_id in self._rests_until_s


def admission_policy_of(row: DeploymentRow, slots: int) -> AdmissionPolicy | None:
    """Return the admission policy of a deployment whose replicas run ``slots`` requests at once.

    None: it rejects no late requests, or nothing is planned yet.
    """
    if row.plan is None:
        return None
    try:
        request = recorded_request(row)
    except ConfigError:  # its trouble is reported where it is asked for
        return None
    service = planned_service(row.plan) if request.reject_late else None
    if service is None or request.slo is None:
        return None
    return AdmissionPolicy(slo=request.slo, service=service, slots=slots)


@lru_cache(maxsize=256)
def planned_service(plan: str) -> ServiceModel | None:
    """Return the service model of the chosen configuration of a plan's JSON.

    None: nothing is chosen, or the plan is of another version of iServe.
    """
    try:
        document = from_json(plan, PlanDocument, what="the recorded plan")
    except BadInputError:
        return None
    chosen = None if document.chosen is None else document.candidates[document.chosen]
    return None if chosen is None else document.service_of(chosen.config)
