"""One deployment from its intent to a running worker, step by step, each step recorded before it is taken.

A controller that is killed anywhere in between finds the record and goes on: a worker that was launched is found
at the daemon by its id, so none is ever launched twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from daemon.client import DaemonClient
from daemon.engines.base import Engine, StageAssignment, WorkerLimits, WorkerSpec
from daemon.engines.registry import capabilities_for, get_engine
from daemon.status import NodeStatus
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.config import Workload
from fingerprint.errors import InfeasibleError, IserveError, NotFoundError
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS
from fingerprint.gpus import match_device
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress
from iserve.api_types import DeployBody
from iserve.controller.node import hardware_of
from iserve.controller.profiling import Profiler, ask_daemon, launched, step_tokens_of, wait_until_ready
from iserve.controller.records import recorded_wish, recorded_worker
from iserve.engine_choice import choose_engine
from iserve.model_source import ModelSource
from iserve.plan_document import PlanDocument, plan_document
from iserve.planning import PlanOptions, make_plan
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, Store
from placement.types import Placement, StagePlacement
from planner.intent import Quality
from planner.plan import Ranked

__all__ = ["Deployer", "PlannedDeployment", "deployable_engine", "engine_for", "worker_spec"]

log = logging.getLogger(__name__)

_MEMORY_HEADROOM = 1.02  # a worker's limit over the placed upper bound, where there is room: allocator rounding


@dataclass(frozen=True, slots=True)
class PlannedDeployment:
    """A plan for this node, with where its best candidate goes."""

    document: PlanDocument
    best: Ranked | None
    free_bytes: Mapping[str, int]  # by device: what was free when it was made

    def worker(
        self, name: str, source: ModelSource, worker_id: str, workload: Workload, profile: Profile
    ) -> WorkerSpec:
        """The launch of the best. Raises InfeasibleError: there is none; the message says what comes nearest."""
        if self.best is None:
            raise InfeasibleError(_why_nothing(self.document))
        steps = step_tokens_of(profile)
        return worker_spec(name, source, worker_id, self.best, workload, self.free_bytes, steps)


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


def worker_spec(
    name: str,
    source: ModelSource,
    worker_id: str,
    best: Ranked,
    workload: Workload,
    free_bytes: Mapping[str, int],
    step_tokens: int | None = None,
) -> WorkerSpec:
    """The launch that enforces what ``best`` was estimated and placed with on devices with ``free_bytes``.

    Args:
        step_tokens: tokens of the largest step that the engine was measured with, whose activations and chunks of
            prompts the estimate therefore has; None: the estimate has those of this workload's own largest step.
    """
    placement = best.layout
    assert isinstance(placement, Placement), "a feasible candidate of make_plan carries its placement"
    context = min(workload.context_tokens, source.spec.max_context_tokens)

    def limit_bytes(stage: StagePlacement) -> int:
        room_bytes = min(free_bytes[device_id] for device_id in stage.device_ids)
        return max(stage.bytes_per_gpu, min(int(stage.bytes_per_gpu * _MEMORY_HEADROOM), room_bytes))

    return WorkerSpec(
        worker_id=worker_id,
        served_model=name,
        checkpoint=str(source.directory),
        config=best.config,
        stages=tuple(
            StageAssignment(
                device_ids=stage.device_ids,
                num_layers=stage.num_layers,
                memory_bytes_per_device=limit_bytes(stage),
            )
            for stage in placement.stages
        ),
        limits=WorkerLimits(
            max_batch=workload.batch,
            max_batched_tokens=step_tokens
            or min(DEFAULT_MAX_BATCHED_TOKENS, max(workload.batch * workload.input_tokens, context)),
            max_context_tokens=context,
            kv_tokens=workload.batch * context,
            memory_bytes_per_device=max(limit_bytes(stage) for stage in placement.stages),
        ),
    )


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
    ) -> None:
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
        except IserveError as error:
            phase = "refused" if isinstance(error, InfeasibleError) else "failed"
            self._record(row, phase, error=str(error))
        except Exception as error:
            log.exception("deploying %s", row.name)
            self._record(row, "failed", error=f"internal error: {type(error).__name__}: {error}")
        finally:
            self._report_progress(row.name, None)

    def _run(self, row: DeploymentRow) -> None:
        body = recorded_wish(row)
        recorded = recorded_worker(row)
        if recorded is not None:
            try:
                self._launch(row, lambda: recorded)
                return
            except InfeasibleError as error:
                log.info("%s: what it ran on is no longer free, so it is planned anew: %s", row.name, error)
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
            self._check_wanted(row)
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
            go_on=lambda: self._check_wanted(row),
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
        hardware = hardware_of(node, profile.machine.device)
        estimator = self._profiler.estimator(profile, engine, node)
        table = engine.capabilities().unprepared()  # only 16-bit checkpoints are taken in
        plan = make_plan(source.spec, hardware, estimator, [table], options)
        document = plan_document(
            plan, model=source.name, hardware=hardware.label, workload=options.workload, notes=notes
        )
        return PlannedDeployment(document, plan.best, {d.device_id: d.free_bytes for d in node.devices})

    def _choose(
        self,
        row: DeploymentRow,
        source: ModelSource,
        engine: Engine,
        profile: Profile,
        options: PlanOptions,
        notes: tuple[str, ...],
    ) -> WorkerSpec:
        """The best worker for what is free now, recorded with its plan.

        Raises:
            InfeasibleError: nothing runs here; the message says what comes nearest.
        """
        planned = self.plan(source, engine, profile, options, notes)
        self._store.update_deployment(row.id, plan=to_json(planned.document))
        worker_id = f"{_slug(row.name)}-{row.id}"
        spec = planned.worker(row.name, source, worker_id, options.workload, profile)
        self._store.update_deployment(row.id, worker=to_json(spec))
        return spec

    def _launch(self, row: DeploymentRow, choose: Callable[[], WorkerSpec]) -> None:
        """Have the daemon run what ``choose`` says, and see it serve. Of two deploys at once the second chooses
        when the first has its memory. A worker that does not come to serve is ended by the reconciler."""

        def go_on() -> None:
            self._check_wanted(row)

        with self._profiler.paused(go_on):
            spec = choose()
            self._move(row, "launching")
            ask_daemon(self._daemon, lambda daemon: launched(daemon, spec))
        try:
            status = wait_until_ready(self._daemon, spec.worker_id, self._settings.start_timeout_s, go_on=go_on)
        except NotFoundError:  # the daemon was killed when it had just begun; the next one knows nothing of it
            ask_daemon(self._daemon, lambda daemon: launched(daemon, spec))
            status = wait_until_ready(self._daemon, spec.worker_id, self._settings.start_timeout_s, go_on=go_on)
        self._store.update_deployment(row.id, worker=to_json(status.spec))
        self._move(row, "ready")

    def _move(self, row: DeploymentRow, phase: str) -> None:
        """The next step, if it is still to be taken."""
        self._check_wanted(row)
        self._record(row, phase, error=None)

    def _check_wanted(self, row: DeploymentRow) -> None:
        now = self._store.deployment_by_id(row.id)
        if now is None or now.desired == "removed":
            raise _NoLongerWantedError

    def _record(self, row: DeploymentRow, phase: str, *, error: str | None) -> None:
        self._store.update_deployment(row.id, phase=phase, error=error)
        self._store.add_event(row.id, phase, error or f"{row.name}: {phase}")


class _NoLongerWantedError(Exception):
    """The deployment is to be removed: what is under way for it ends here."""


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())[:40] or "worker"


def _why_nothing(document: PlanDocument) -> str:
    """Of a plan in which nothing is feasible: what comes nearest, and what would help."""
    why = document.why_not
    parts = ["no configuration is feasible"]
    if why.nearest is not None:
        parts.append(why.nearest.text)
    parts += why.advice[:3]
    return "; ".join(parts)
