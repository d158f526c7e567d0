"""One deployment from its intent to a running worker, step by step, each step recorded before it is taken.

A controller that is killed anywhere in between finds the record and goes on: a worker that was launched is found
at the daemon by its id, so none is ever launched twice.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from daemon.client import DaemonClient
from daemon.engines.base import Engine, WorkerSpec
from daemon.engines.registry import capabilities_for, get_engine
from daemon.status import NodeStatus, WorkerState, WorkerStatus
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.errors import (
    InfeasibleError,
    IserveError,
    NotFoundError,
    StateUnavailableError,
    UnavailableError,
)
from fingerprint.gpus import match_device
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress
from iserve.api_types import DeployBody
from iserve.controller.ending import end_workers
from iserve.controller.node import devices_of, hardware_of
from iserve.controller.profiling import Profiler, ask_daemon, launched, wait_until_ready
from iserve.controller.records import recorded_wish, recorded_workers
from iserve.model_source import ModelSource
from iserve.planning.document import plan_document
from iserve.planning.engine_choice import choose_engine
from iserve.planning.launching import PlannedDeployment, worker_slug
from iserve.planning.making import PlanOptions, alone_of, make_plan
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, Store
from placement.types import DeploymentState
from planner.intent import Quality

__all__ = ["Deployer", "deployable_engine", "engine_for"]

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # at a worker whose time is up when the others of its deployment have been waited for


def deployable_engine(name: str) -> Engine:
    """The engine of that name, or for ``auto`` the first that can start workers.

    Raises:
        ConfigError: no such engine.
        InfeasibleError: it is not installed here.
    """
    tables = capabilities_for(name)
    able = [table.engine for table in tables if table.deployable]
    if not able:
        raise InfeasibleError(
            f"{name} can be planned for, not deployed here: {tables[0].unavailable}; or deploy with --engine torch"
        )
    return get_engine(able[0])


def engine_for(name: str, spec: ModelSpec, node: NodeStatus, quality: Quality) -> tuple[Engine, tuple[str, ...]]:
    """The engine of that name, or for ``auto`` the preferred one that serves ``spec`` on ``node``; and for each
    that is preferred to it, why it is passed over.

    Raises:
        ConfigError, InfeasibleError: as :func:`deployable_engine`.
        UnsupportedModelError: no engine serves the model there.
    """
    if name != "auto":
        return deployable_engine(name), ()
    first = next(iter(node.devices), None)
    on_gpus = first is not None and first.kind == "cuda"
    gpu = match_device(first.name) if first is not None and on_gpus else None
    choice = choose_engine(spec, gpu, capabilities_for("auto"), quality, on_gpus=on_gpus)
    return get_engine(choice.engine), choice.passed_over


class Deployer:
    """Takes accepted deployments to where they run, or says why not."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        profiler: Profiler,
        daemon: Callable[[], DaemonClient],
        resolve: Callable[[str | None], ModelSource],
        report_progress: Callable[[str, ProfileProgress | None], None],
        serving: Callable[[NodeStatus], tuple[DeploymentState, ...]] = lambda _: (),
    ) -> None:
        self._serving = serving
        self._settings, self._store, self._profiler = settings, store, profiler
        self._daemon, self._resolve, self._report_progress = daemon, resolve, report_progress

    def options(self, body: DeployBody) -> PlanOptions:
        return body.options(default_policy=self._settings.policy, load_threshold=self._settings.load_threshold)

    def run(self, row: DeploymentRow) -> None:
        """Carry ``row`` through; every expected failure ends in its record, not in an exception."""
        try:
            self._run(row)
        except _NoLongerWantedError:
            log.info("%s: given up, it is to be removed", row.name)
        except StateUnavailableError as error:
            log.warning("%s: the reconciler takes it up again when the state is back: %s", row.name, error)
        except IserveError as error:
            phase = "refused" if isinstance(error, InfeasibleError) else "failed"
            self._record(row, _given_up(row, phase), error=str(error))
        except Exception as error:
            log.exception("deploying %s", row.name)
            self._record(row, _given_up(row, "failed"), error=f"internal error: {type(error).__name__}: {error}")
        finally:
            self._report_progress(row.name, None)

    def _run(self, row: DeploymentRow) -> None:
        body = recorded_wish(row)
        recorded = recorded_workers(row)
        if row.phase == "ready":
            try:
                serves = self._any_is_there(recorded)
            except StateUnavailableError:
                raise
            except UnavailableError as error:  # who may well serve is not given up for that
                log.warning("%s: looked at again when the daemon is back: %s", row.name, error)
                return
            if serves:
                self._mend(row, recorded)
                return
        if recorded:
            try:
                self._launch(row, lambda: recorded)
                return
            except InfeasibleError as error:
                log.info("%s: what it ran on is no longer free, so it is planned anew: %s", row.name, error)
                ask_daemon(self._daemon, lambda daemon: end_workers(daemon, recorded))  # replicas that had room
        self._move(row, "resolving")
        source = self._resolve(body.model)
        Checkpoint.open(source.directory)  # before minutes are spent on measuring what cannot be served
        options = self.options(body)
        node = ask_daemon(self._daemon, DaemonClient.node)
        engine, notes = engine_for(body.engine, source.spec, node, options.intent.quality)
        profile = self._profiler.enough(source, engine, node, options)
        if profile is None:
            notes += self._profiler.unused(source, engine, node, batch=options.workload.batch)
            profile = self._profile(row, source, engine, options)
        self._move(row, "planning")
        self._launch(row, lambda: self._choose(row, source, engine, profile, options, notes))

    def _profile(self, row: DeploymentRow, source: ModelSource, engine: Engine, options: PlanOptions) -> Profile:
        def find() -> Profile | None:
            node = ask_daemon(self._daemon, DaemonClient.node)
            return self._profiler.enough(source, engine, node, options)

        def report(progress: ProfileProgress) -> None:
            self._check_not_removed(row)
            self._report_progress(row.name, progress)

        self._move(row, "profiling")
        return self._profiler.take(
            source,
            engine,
            self._daemon,
            workload=options.workload,
            wish=options,
            max_seconds=self._settings.profile_seconds,
            progress=report,
            unless=find,
            go_on=lambda: self._check_not_removed(row),
        )

    def plan(
        self,
        source: ModelSource,
        engine: Engine,
        profile: Profile,
        options: PlanOptions,
        notes: tuple[str, ...] = (),
    ) -> PlannedDeployment:
        """Rank everything on the devices that are free now; ``notes`` are told with it."""
        node = ask_daemon(self._daemon, DaemonClient.node)
        hardware = hardware_of(node, profile.machine.device, self._serving(node))
        estimator = self._profiler.estimator(profile, engine, node)
        table = engine.capabilities().unprepared()  # only 16-bit checkpoints are taken in
        plan = make_plan(source.spec, hardware, estimator, [table], options)
        document = plan_document(
            plan,
            model=source.name,
            hardware=hardware.label,
            workload=options.workload,
            notes=notes,
            replicas=options.replicas,
            alone=None if plan.best is None else alone_of(estimator, plan.best.config, options.workload),
        )
        return PlannedDeployment(
            document, plan.best, devices_of(node), {d.device_id: d.free_bytes for d in node.devices}
        )

    def _choose(
        self,
        row: DeploymentRow,
        source: ModelSource,
        engine: Engine,
        profile: Profile,
        options: PlanOptions,
        notes: tuple[str, ...],
    ) -> tuple[WorkerSpec, ...]:
        """The best workers for what is free now, recorded with their plan.

        Raises:
            InfeasibleError: nothing runs here; the message says what comes nearest.
        """
        planned = self.plan(source, engine, profile, options, notes)
        self._store.update_deployment(row.id, plan=to_json(planned.document))
        worker_id = f"{worker_slug(row.name)}-{row.id}"
        specs = planned.workers(row.name, source, worker_id, options.workload, profile)
        self._store.update_deployment(row.id, workers=to_json(specs))
        return specs

    def _any_is_there(self, workers: tuple[WorkerSpec, ...]) -> bool:
        node = ask_daemon(self._daemon, DaemonClient.node)
        there = {worker.spec.worker_id for worker in node.workers if worker.state is not WorkerState.STOPPED}
        return any(worker.worker_id in there for worker in workers)

    def _mend(self, row: DeploymentRow, workers: tuple[WorkerSpec, ...]) -> None:
        """Start the replicas again that were lost, each by itself, while the others serve on; wait for none, for
        the next may be lost meanwhile, and who serves is seen at the daemon. It stays ready whatever comes of it;
        what cannot be started is told, and tried again by the reconciler."""
        with self._profiler.paused(lambda: self._check_not_removed(row)):
            now = self._store.deployment_by_id(row.id)
            if now is None or now.desired == "removed" or now.phase != "ready":  # it fell asleep, say
                return
            reasons = [reason for spec in workers if (reason := self._why_not_running(spec))]
            error = reasons[0] if reasons else None
            if error is None or now.error is None:
                self._store.add_event(row.id, "ready", error or f"{row.name}: what was lost is started again")
            if error != now.error:  # else tried again, and told already
                self._store.update_deployment(row.id, phase="ready", error=error)

    def _why_not_running(self, spec: WorkerSpec) -> str | None:
        """Have the daemon run it, if it does not; None: it does, or is about to."""
        try:
            self._ask_to_run(spec)
        except StateUnavailableError:
            raise
        except IserveError as error:
            return str(error)
        except Exception as error:  # its neighbours serve
            log.exception("starting %s again", spec.worker_id)
            return f"internal error: {type(error).__name__}: {error}"
        return None

    def _launch(self, row: DeploymentRow, choose: Callable[[], tuple[WorkerSpec, ...]]) -> None:
        """Have the daemon run what ``choose`` says, and see it serve. Of two deploys at once the second chooses
        when the first has its memory. A worker that does not come to serve is ended by the reconciler."""
        with self._profiler.paused(lambda: self._check_not_removed(row)):
            specs = choose()
            self._move(row, "launching")
            for spec in specs:
                self._ask_to_run(spec)
        deadline_s = time.monotonic() + self._settings.start_timeout_s  # they start at the same time
        serving = tuple(self._once_ready(row, spec, deadline_s) for spec in specs)
        self._store.update_deployment(row.id, workers=to_json(serving))
        self._move(row, "ready")

    def _ask_to_run(self, spec: WorkerSpec) -> None:
        ask_daemon(self._daemon, lambda daemon: launched(daemon, spec))

    def _once_ready(self, row: DeploymentRow, spec: WorkerSpec, deadline_s: float) -> WorkerSpec:
        """As it serves, its port included."""

        def wait() -> WorkerStatus:
            left_s = max(_LOOK_S, deadline_s - time.monotonic())
            return wait_until_ready(
                self._daemon, spec.worker_id, left_s, go_on=lambda: self._check_not_removed(row)
            )

        try:
            return wait().spec
        except NotFoundError:  # the daemon was killed when it had just begun; the next one knows nothing of it
            self._ask_to_run(spec)
            return wait().spec

    def _move(self, row: DeploymentRow, phase: str) -> None:
        """The next step, if it is still to be taken. One that wakes is waking until it serves, so that whoever
        takes it up after a crash knows what becomes of it should it fail."""
        self._check_wanted(row)
        if row.phase != "waking" or phase == "ready":
            self._record(row, phase, error=None)

    def _check_wanted(self, row: DeploymentRow) -> None:
        now = self._store.deployment_by_id(row.id)
        if now is None or now.desired == "removed":
            raise _NoLongerWantedError

    def _check_not_removed(self, row: DeploymentRow) -> None:
        """In the middle of a step. With the database away nobody can have asked for the removal."""
        with contextlib.suppress(StateUnavailableError):
            self._check_wanted(row)

    def _record(self, row: DeploymentRow, phase: str, *, error: str | None) -> None:
        self._store.update_deployment(row.id, phase=phase, error=error)
        self._store.add_event(row.id, phase, error or f"{row.name}: {phase}")


def _given_up(row: DeploymentRow, phase: str) -> str:
    """Of one that could not be started: one that slept goes on sleeping, and is tried again when it is called."""
    return "asleep" if row.phase == "waking" else phase


class _NoLongerWantedError(Exception):
    """The deployment is to be removed: what is under way for it ends here."""
