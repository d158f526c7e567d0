"""Deployer: takes one deployment from its intent to a running worker, each step recorded before it is taken.

A controller that is killed anywhere in between finds the record and goes on: a worker that was launched is found
at the daemon by its id, so none is ever launched twice.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from daemon.client import DaemonClient
from daemon.engine_options import EngineOptions
from daemon.engines.base import Engine
from daemon.engines.registry import get_engine
from daemon.status import NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.errors import (
    InfeasibleError,
    IserveError,
    NotFoundError,
    SilentEngineError,
    StateUnavailableError,
    UnavailableError,
)
from fingerprint.measurements import Profile
from fingerprint.profile import ProfileProgress
from iserve.api_types import DeployBody
from iserve.controller.daemon_workers import ask_daemon, end_workers, launched, wait_until_ready
from iserve.controller.engine_selection import SelectedEngine, select_engine
from iserve.controller.profiling import Profiler
from iserve.controller.profiling_validity import release_to_start
from iserve.controller.snapshot import devices_of, hardware_of, without
from iserve.controller.stored_values import SCALED_TO_ZERO, SCALING_UP, recorded_request, recorded_workers
from iserve.model_source import ModelSource
from iserve.planning.deployability import deployable_now
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.model_use import (
    check_code,
    check_same_code,
    check_use,
    use_notes,
    used,
    with_expected_specs,
    with_images,
)
from iserve.planning.pipeline import PlanOptions, check_context
from iserve.planning.worker_launch import PlannedDeployment, worker_slug
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, Store
from placement.types import DeploymentState

__all__ = [
    "Deployer",
    "Measured",
    "NoLongerWantedError",
]

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # at a worker whose time is up when the rest of its deployment has been waited for


class Measured(NamedTuple):
    """Input of a plan."""

    source: ModelSource
    engine: Engine
    profile: Profile
    options: PlanOptions
    notes: tuple[str, ...]
    engine_options: EngineOptions


class Deployer:
    """Takes accepted deployments to where they run, or says why not."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        profiler: Profiler,
        daemon: Callable[[], DaemonClient],
        resolve: Callable[..., ModelSource],
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
        job = _Job(self._store, row)
        try:
            self._run(job)
        except NoLongerWantedError:
            log.info("%s: given up, it is to be removed or was changed meanwhile", row.name)
        except StateUnavailableError as error:
            log.warning("%s: the reconciler takes it up again when the state is back: %s", row.name, error)
        except IserveError as error:
            phase = "refused" if isinstance(error, InfeasibleError) else "failed"
            self._give_up(job, phase, str(error))
        except Exception as error:
            log.exception("deploying %s", row.name)
            self._give_up(job, "failed", f"internal error: {type(error).__name__}: {error}")
        finally:
            self._report_progress(row.name, None)

    def _give_up(self, job: _Job, phase: str, error: str) -> None:
        """Record why it could not be started. One that was scaled to zero stays so, and is
        tried again at the next request."""
        with contextlib.suppress(NoLongerWantedError):
            self._record(job, SCALED_TO_ZERO if job.row.phase == SCALING_UP else phase, error=error)

    def _run(self, job: _Job) -> None:
        row = job.row
        body = recorded_request(row)
        recorded = recorded_workers(row)
        if row.phase == "ready":
            try:
                serves = self._any_is_there(recorded)
            except StateUnavailableError:
                raise
            except UnavailableError as error:  # a worker that may well serve is not given up for that
                log.warning("%s: looked at again when the daemon is back: %s", row.name, error)
                return
            if serves:
                self._mend(job, recorded)
                return
        if recorded:
            try:
                if self._engines_answer(job, recorded):
                    self._launch(job, lambda: recorded)
                return
            except InfeasibleError as error:
                log.info("%s: it cannot be started as it was, so it is planned anew: %s", row.name, error)
                check_same_code(used(self._resolve(body.model), body.use), (spec.checkpoint for spec in recorded))
                self.end(recorded)  # replicas that had room
        measured = self.measured(row, body, lambda phase: self._move(job, phase))
        self._move(job, "planning")
        self._launch(job, lambda: self._choose(job, measured))

    def _engines_answer(self, job: _Job, workers: tuple[WorkerSpec, ...]) -> bool:
        """Return whether the engines of ``workers`` are there. One that does not answer is not gone: the phase
        stays, with the reason, and the reconciler has it tried again.

        Raises:
            InfeasibleError: one is not installed any more in the version that was planned for.
        """
        try:
            for spec in workers:
                get_engine(spec.config.engine).pinned(spec.engine_version)
        except SilentEngineError as error:
            now = self._store.deployment_by_id(job.row.id)
            if now is not None and now.error != str(error):
                self._record(job, job.row.phase, error=str(error))
            return False
        return True

    def measured(self, row: DeploymentRow, body: DeployBody, move: Callable[[str], None]) -> Measured:
        """Return the model and engine of ``body`` with a profile that holds, which is taken first where there is
        none.

        Args:
            row: whose removal ends it.
            move: is called with each step before it is taken.
        """
        move("resolving")
        use = body.use
        source = used(self._resolve(body.model, need_code=use.trust_remote_code), use)
        if source.merged_into is not None:  # several variants of one content are in one folder
            source = replace(source, name=row.name)
        Checkpoint.open(source.directory)  # before minutes are spent on measuring what cannot be served
        options = self.options(body)
        options = replace(options, workload=with_images(options.workload, source))
        options = with_expected_specs(options, lambda name: self._resolve(name, need_weights=False).spec)

        def profile_of(engine: Engine, _: tuple[str, ...]) -> Profile:
            engine.check_options(body.engine_options)
            check_use(source, engine.capabilities())
            check_code(source, engine.capabilities())
            node = ask_daemon(self._daemon, DaemonClient.node)
            self._profiler.ensure_links(engine, node, self._daemon, lambda: self.check_not_removed(row))
            if (found := self._enough(source, engine, node, options)) is not None:
                return found
            unused.extend(self._profiler.unused(source, engine, node, batch=options.workload.batch))
            check_context(source.spec, options.workload)  # before minutes are spent on measuring
            move("profiling")
            return self._profile(row, source, engine, options)

        unused: list[str] = []
        engine, profile, notes = self.select(source, body.engine, body.engine_version, options, profile_of)
        if body.engine_options.arguments:
            notes += ("what --engine-arg changes is in no figure of this plan",)
        return Measured(source, engine, profile, options, (*notes, *unused), body.engine_options)

    def select(
        self,
        source: ModelSource,
        name: str,
        version: str | None,
        options: PlanOptions,
        profile_of: Callable[[Engine, tuple[str, ...]], Profile],
    ) -> SelectedEngine:
        """Select the engine for ``source`` on the node as it is now, with its profile: as ``select_engine``."""
        node = ask_daemon(self._daemon, DaemonClient.node)
        estimator_of = self._profiler.estimator
        return select_engine(
            name, version, source.spec, node, options, profile_of=profile_of, estimator_of=estimator_of
        )

    def _enough(
        self, source: ModelSource, engine: Engine, node: NodeStatus, options: PlanOptions
    ) -> Profile | None:
        return self._profiler.enough(source, engine, node, options, self._settings.profile_seconds)

    def _profile(self, row: DeploymentRow, source: ModelSource, engine: Engine, options: PlanOptions) -> Profile:
        def find() -> Profile | None:
            node = ask_daemon(self._daemon, DaemonClient.node)
            return self._enough(source, engine, node, options)

        def report(progress: ProfileProgress) -> None:
            self.check_not_removed(row)
            self._report_progress(row.name, progress)

        try:
            return self._profiler.take(
                source,
                engine,
                self._daemon,
                workload=options.workload,
                plan_options=options,
                max_seconds=self._settings.profile_seconds,
                progress=report,
                unless=find,
                go_on=lambda: self.check_not_removed(row),
            )
        finally:
            self._report_progress(row.name, None)  # else the later steps would show its last run as theirs

    def plan(
        self,
        source: ModelSource,
        engine: Engine,
        profile: Profile,
        options: PlanOptions,
        notes: tuple[str, ...] = (),
        *,
        gone: Sequence[WorkerSpec] = (),
        full: Collection[str] = (),
        of: str | None = None,
    ) -> PlannedDeployment:
        """Rank everything on the devices that are free now; ``notes`` are reported with it.

        Args:
            gone: workers whose memory counts as free, for they end before the planned ones start.
            full: devices that are not to be used.
            of: deployment that is planned anew, whose present load ends with the update.
        """
        node = without(ask_daemon(self._daemon, DaemonClient.node), gone, full)
        return planned_deployment(
            source,
            hardware_of(node, profile.machine.device, tuple(one for one in self._serving(node) if one.name != of)),
            self._profiler.estimator(profile, engine, node),
            engine.capabilities(),
            options,
            devices=devices_of(node),
            deployable_of=lambda *_: deployable_now(has_weights=source.has_weights),
            notes=(*notes, *use_notes(source, options.workload, engine.capabilities())),
            profile=profile,
        )

    def _choose(self, job: _Job, measured: Measured) -> tuple[WorkerSpec, ...]:
        """Return the best workers for what is free now, recorded with their plan.

        Raises:
            InfeasibleError: nothing runs here; the message says what is nearest.
        """
        planned = self.plan(*measured[:5])
        try:
            specs = self.workers_of(job.row, planned, measured, self._free_id(job.row))
        except InfeasibleError:
            job.write(plan=to_json(planned.document))
            raise
        # At once: a controller killed in between would have the former workers start under the new plan.
        job.write(plan=to_json(planned.document), workers=to_json(specs))
        return specs

    def _free_id(self, row: DeploymentRow) -> str:
        """Return the id of new workers. Living workers keep theirs: those of before an update may still drain."""
        worker_id = f"{worker_slug(row.name)}-{row.id}"
        node = ask_daemon(self._daemon, DaemonClient.node)
        living = {w.spec.worker_id for w in node.workers if w.state is not WorkerState.STOPPED}
        if any(one == worker_id or one.startswith(f"{worker_id}-r") for one in living):  # -r1, -r2: replicas
            return f"{worker_id}-n{uuid.uuid4().hex[:8]}"
        return worker_id

    def workers_of(
        self, row: DeploymentRow, planned: PlannedDeployment, measured: Measured, worker_id: str
    ) -> tuple[WorkerSpec, ...]:
        """Return the launch of ``planned``, on the version of the engine that it was planned for.

        Raises:
            InfeasibleError: nothing runs here.
        """
        source, options = measured.source, measured.engine_options
        work = measured.options.workload
        workers = planned.workers(row.name, source, worker_id, work, measured.profile, options)
        version = release_to_start(measured.engine)
        found = [replace(spec, engine_version=version) for spec in workers]
        engine = get_engine(found[0].config.engine)
        return tuple(replace(spec, shares_places=engine.shares_places(spec)) for spec in found)

    def _any_is_there(self, workers: tuple[WorkerSpec, ...]) -> bool:
        node = ask_daemon(self._daemon, DaemonClient.node)
        there = [worker for worker in node.workers if worker.state is not WorkerState.STOPPED]
        return any(seen.is_of(worker) for seen in there for worker in workers)

    def _mend(self, job: _Job, workers: tuple[WorkerSpec, ...]) -> None:
        """Start lost replicas again, each by itself, while the remaining ones serve on.

        No start is waited for: the next replica may be lost meanwhile, and the daemon reports which serve. The
        deployment stays ready whatever the result; what cannot be started is reported, and tried again by the
        reconciler.
        """
        row = job.row
        with self._profiler.paused(lambda: self.check_not_removed(row)):
            now = self._store.deployment_by_id(row.id)
            if now is None or now.desired == "removed" or now.phase != "ready":  # it was scaled to zero, say
                return
            if now.workers != row.workers:  # it was updated
                return
            reasons = [reason for spec in workers if (reason := self._why_not_running(spec))]
            error = reasons[0] if reasons else None
            if error is None or now.error is None:
                self._store.add_event(row.id, "ready", error or f"{row.name}: what was lost is started again")
            if error != now.error:  # else tried again, and reported already
                job.write(phase="ready", error=error)

    def _why_not_running(self, spec: WorkerSpec) -> str | None:
        """Have the daemon run it, if it does not; None: it does, or is about to."""
        try:
            self.ask_to_run(spec)
        except StateUnavailableError:
            raise
        except IserveError as error:
            return str(error)
        except Exception as error:  # its neighbours serve
            log.exception("starting %s again", spec.worker_id)
            return f"internal error: {type(error).__name__}: {error}"
        return None

    def _launch(self, job: _Job, choose: Callable[[], tuple[WorkerSpec, ...]]) -> None:
        """Have the daemon run what ``choose`` says, and wait until it serves.

        Of two deploys at once the second chooses when the first has its memory. A worker that does not become
        ready is ended by the reconciler.
        """
        row = job.row
        with self._profiler.paused(lambda: self.check_not_removed(row)):
            specs = choose()
            self._move(job, "launching")
            for spec in specs:
                self.ask_to_run(spec)
        deadline_s = time.monotonic() + self._settings.ready_timeout_s  # they start at the same time
        serving = tuple(self.once_ready(row, spec, deadline_s) for spec in specs)
        self._move(job, "ready", workers=to_json(serving))

    def end(self, workers: Sequence[WorkerSpec]) -> None:
        """End ``workers``, and see their memory free. Raises UnavailableError: some may be left."""
        ask_daemon(self._daemon, lambda daemon: end_workers(daemon, workers))

    def ask_to_run(self, spec: WorkerSpec) -> None:
        ask_daemon(self._daemon, lambda daemon: launched(daemon, spec))

    def once_ready(self, row: DeploymentRow, spec: WorkerSpec, deadline_s: float) -> WorkerSpec:
        """Return the worker's spec once it serves, its port included."""

        def wait() -> WorkerStatus:
            left_s = max(_LOOK_S, deadline_s - time.monotonic())
            return wait_until_ready(
                self._daemon, spec.worker_id, left_s, go_on=lambda: self.check_not_removed(row)
            )

        try:
            return wait().spec
        except NotFoundError:  # the daemon was killed when it had just begun; the next one knows nothing of it
            self.ask_to_run(spec)
            return wait().spec

    def all_ready(self, specs: Sequence[WorkerSpec]) -> bool:
        """Return whether all of ``specs`` serve now."""
        node = ask_daemon(self._daemon, DaemonClient.node)
        ready = {worker.spec.worker_id for worker in node.workers if worker.state is WorkerState.READY}
        return all(spec.worker_id in ready for spec in specs)

    def _move(self, job: _Job, phase: str, *, workers: bytes | None = None) -> None:
        """Record the next step, if it is still to be taken.

        A deployment that scales up does so until it serves, so that a controller that takes over after a crash
        knows its phase should the start fail.
        """
        self._check_wanted(job.row)
        if job.row.phase != SCALING_UP or phase == "ready":
            self._record(job, phase, error=None, workers=workers)

    def _check_wanted(self, row: DeploymentRow) -> None:
        now = self._store.deployment_by_id(row.id)
        if now is None or now.desired == "removed":
            raise NoLongerWantedError

    def check_not_removed(self, row: DeploymentRow) -> None:
        """Raise if the deployment was removed in the middle of a step.

        With the database away, no client can have asked for the removal.
        """
        with contextlib.suppress(StateUnavailableError):
            self._check_wanted(row)

    def _record(self, job: _Job, phase: str, *, error: str | None, workers: bytes | None = None) -> None:
        job.write(phase=phase, error=error, workers=workers)
        self._store.add_event(job.row.id, phase, error or f"{job.row.name}: {phase}")


class _Job:
    """A deployment that is carried out, with its row as the deployer last read or wrote it."""

    def __init__(self, store: Store, row: DeploymentRow) -> None:
        self._store, self.row = store, row

    def write(
        self,
        *,
        phase: str | None = None,
        error: str | None = None,
        plan: bytes | None = None,
        workers: bytes | None = None,
    ) -> None:
        """Change what is given, as ``Store.update_deployment``.

        Raises:
            NoLongerWantedError: the phase or the workers were changed meanwhile, by an update say; the former
                workers that were started again drain or are ended as orphans.
        """
        row = self.row
        if not self._store.update_deployment(
            row.id, phase=phase, error=error, plan=plan, workers=workers, as_read=row
        ):
            raise NoLongerWantedError
        self.row = replace(
            row,
            phase=phase or row.phase,
            workers=row.workers if workers is None else workers.decode(),
        )


class NoLongerWantedError(Exception):
    """The deployment is to be removed, or was updated: what is under way for it ends here."""
