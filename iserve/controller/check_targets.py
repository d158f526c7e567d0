"""Targets of a check: a deployment that runs, or a worker that is launched for it.

A worker of a check belongs to the check alone and is recorded nowhere: it is stopped at the end; when this
controller is killed the next one finds that it has no owner and ends it, and without a next one the daemon does.
No check runs while a profile is taken or a deployment is launched: they would measure each other.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from daemon.client import DaemonClient
from daemon.engine_options import EngineOptions
from daemon.engines.base import Engine
from daemon.engines.registry import capabilities_for, get_engine
from daemon.status import NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from fingerprint.checkpoint import Checkpoint
from fingerprint.config import Workload
from fingerprint.errors import (
    ConfigError,
    ConflictError,
    InfeasibleError,
    IserveError,
    NotFoundError,
    NotMeasuredError,
)
from fingerprint.measurements import Profile
from fingerprint.model_use import ModelUse
from iserve.api_types import DeployBody, VerifyBody
from iserve.controller.daemon_workers import ask_daemon, launched, wait_until_ready
from iserve.controller.deployer import Deployer
from iserve.controller.deployment_status import workers_seen
from iserve.controller.engine_selection import deployable_engine
from iserve.controller.profiling import Profiler
from iserve.controller.profiling_validity import described
from iserve.controller.stored_values import recorded_request, recorded_workers
from iserve.model_source import ModelSource
from iserve.planning.model_use import check_code, check_code_of_each, used, with_images
from iserve.planning.pipeline import PlanOptions
from iserve.settings import Settings
from iserve.state.store import DeploymentRow, Store

__all__ = ["CheckTarget", "Find", "Targets", "Tell", "check_same_engine", "used_bytes"]

log = logging.getLogger(__name__)

_SLACK_S = 900.0  # of the time after which a worker of a check cannot be wanted any more

Tell = Callable[[str, int, int, float], None]  # step, done, total, seconds since the step's start


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckTarget:
    """A worker to check, ready."""

    source: ModelSource
    engine: Engine
    profile: Profile
    spec: WorkerSpec
    url: str
    token: str | None = field(repr=False)  # the worker's
    planned: Workload  # what it was planned for
    deployment: str | None
    used_before: dict[str, int] | None  # bytes by device before it was launched; None: it ran already
    versions: tuple[tuple[str, str], ...]  # of the engine that its process runs; (): not recorded
    num_replicas: int = 1  # of the deployment; the one that is checked is among them

    @property
    def served(self) -> Workload:
        """The most that its worker was launched for."""
        limits, planned = self.spec.limits, self.planned
        longest = limits.max_context_tokens if limits.max_context_tokens > planned.context_tokens else None
        return replace(
            planned,
            batch=limits.max_batch,
            longest_tokens=planned.longest_tokens if longest is None else longest,
        )


Find = Callable[[Tell], contextlib.AbstractContextManager[CheckTarget]]


class Targets:
    """Finds or launches what is asked for. Each answer is its name, after everything that can be refused at once,
    and a context manager inside which it serves and nothing else is launched or measured."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        profiler: Profiler,
        deployer: Deployer,
        daemon: Callable[[], DaemonClient],
        resolve: Callable[..., ModelSource],
    ) -> None:
        self._settings, self._store, self._profiler, self._deployer = settings, store, profiler, deployer
        self._daemon, self._resolve = daemon, resolve

    def deployment(self, body: VerifyBody) -> tuple[str, Find]:
        """Return a target that is a running deployment.

        Raises:
            NotFoundError, ConfigError, ConflictError: there is none, more was asked for, or it does not serve now.
        """
        assert body.deployment is not None
        name = body.deployment
        row = self._store.deployment(name)
        request = recorded_request(row)
        own = {field.name for field in fields(body)} - {"deployment", "max_seconds", "model"}
        default = VerifyBody()
        given = sorted(
            name for name in own if getattr(body, name) not in (getattr(request, name), getattr(default, name))
        )
        if body.model is not None or given:
            what = ", ".join(given) or "model"
            raise ConfigError(
                f"the deployment {name!r} is checked under what it was planned for, and another {what} was given; "
                "leave that out, or verify the model under another name"
            )
        if row.desired != "running" or row.phase != "ready":
            state = row.phase if row.desired == "running" else "being removed"
            raise ConflictError(f"the deployment {name!r} is {state}; verify it when it is ready (`iserve ps`)")

        @contextlib.contextmanager
        def find(tell: Tell) -> Iterator[CheckTarget]:
            tell("waiting", 0, 0, 0.0)
            with self._profiler.paused(lambda: None):
                row = self._store.deployment(name)
                if row.phase != "ready":  # it was scaled to zero meanwhile, say
                    raise ConflictError(f"the deployment {name!r} is {row.phase}; verify it when it is ready")
                status = self._first_ready(row)
                with self._profiler.owning(status.spec.worker_id):  # which is not ended from here on
                    yield self._running(row, status)

        return name, find

    def _running(self, row: DeploymentRow, status: WorkerStatus) -> CheckTarget:
        """Return the worker of ``status``, which ``row`` records.

        Raises:
            ConflictError: the deployment was updated meanwhile, or another release of the engine is installed.
            NotMeasuredError: no profile holds here.
        """
        name = row.name
        if self._store.deployment(name).workers != row.workers:
            raise ConflictError(f"the deployment {name!r} was updated meanwhile; verify it again")
        source = self._served(recorded_request(row), status.spec)
        room = with_images(self._deployer.options(recorded_request(row)).workload, source)
        engine = get_engine(status.spec.config.engine)
        with contextlib.suppress(InfeasibleError):  # else it is another now, which the next line tells
            engine = engine.pinned(status.spec.engine_version)
        check_same_engine(engine, status.versions, name)
        return CheckTarget(
            source=source,
            engine=engine,
            profile=self._stored_profile(source, engine, room),
            spec=status.spec,
            url=status.url,
            token=status.token,
            planned=room,
            deployment=name,
            used_before=None,
            versions=status.versions,
            num_replicas=len(recorded_workers(row)),
        )

    def _first_ready(self, row: DeploymentRow) -> WorkerStatus:
        """Return the first ready one of the replicas, which are all of one configuration."""
        workers = recorded_workers(row)
        if not workers:
            raise ConflictError(f"the deployment {row.name!r} has no worker; `iserve ps` tells")
        seen = workers_seen(workers, self._node().workers)
        ready = next((worker for worker in seen if worker.state is WorkerState.READY), None)
        if ready is None:
            state = str(seen[0].state) if seen else "lost"
            raise ConflictError(f"the worker of {row.name!r} is {state}; verify it when it is ready")
        return ready

    def _served(self, request: DeployBody, spec: WorkerSpec) -> ModelSource:
        """Return what the worker loaded, under the name it was deployed by unless that means another folder by
        now.
        """
        with contextlib.suppress(IserveError):
            source = self._resolve(request.model, need_weights=False)
            if str(source.directory) == spec.checkpoint:
                return used(source, spec.options.use)
        return used(self._resolve(spec.checkpoint, need_weights=False), spec.options.use)

    def _stored_profile(self, source: ModelSource, engine: Engine, room: Workload) -> Profile:
        found = self._profiler.stored(source, engine, self._node(), batch=room.batch)
        if found is None:
            raise NotMeasuredError(
                f"{source.name} has no profile that holds here, on {engine.name}, for batch {room.batch}: nothing "
                f"is predicted of it; run `iserve profile {source.argument} --engine {engine.name} "
                f"--batch {room.batch}` first"
            )
        return found

    def model(self, body: VerifyBody) -> tuple[str, Find]:
        """Return a worker of the best configuration, launched for the check and ended with it.

        Raises:
            BadInputError, InfeasibleError: the request, the model or the engine cannot be.
        """
        options = body.options(default_policy=self._settings.policy, load_threshold=self._settings.load_threshold)
        deployable_engine(body.engine)
        use = ModelUse(trust_remote_code=body.trust_remote_code)
        source = used(self._resolve(body.model, need_weights=False), use)
        check_code_of_each(source, capabilities_for(body.engine))
        if source.has_weights or (body.model is not None and Path(body.model).exists()):
            Checkpoint.open(source.directory)  # as for a deploy: refused before anything is started

        @contextlib.contextmanager
        def find(tell: Tell) -> Iterator[CheckTarget]:
            tell("resolving", 0, 0, 0.0)
            source = used(self._resolve(body.model, need_code=use.trust_remote_code), use)
            Checkpoint.open(source.directory)
            engine, profile, _ = self._deployer.select(
                source,
                body.engine,
                None,
                options,
                lambda engine, _: self._profile(source, engine, options, tell),
            )
            tell("planning", 0, 0, 0.0)
            worker_id = f"verify-{uuid.uuid4().hex[:12]}"
            with self._profiler.paused(lambda: None), self._profiler.owning(worker_id):
                planned = self._deployer.plan(source, engine, profile, options)
                engine_options = EngineOptions(use=use)
                (spec,) = planned.workers("verify", source, worker_id, options.workload, profile, engine_options)
                # In case no controller ever returns to end it.
                spec = replace(
                    spec, ends_at=time.time() + self._settings.ready_timeout_s + 2 * body.max_seconds + _SLACK_S
                )
                used_before = used_bytes(self._node())
                tell("launching", 0, 0, 0.0)
                with self._launched(spec) as status:
                    yield CheckTarget(
                        source=source,
                        engine=engine,
                        profile=profile,
                        spec=status.spec,
                        url=status.url,
                        token=status.token,
                        planned=options.workload,
                        deployment=None,
                        used_before=used_before,
                        versions=status.versions,
                    )

        return source.name, find

    def _profile(self, source: ModelSource, engine: Engine, options: PlanOptions, tell: Tell) -> Profile:
        engine.check_options(EngineOptions(use=source.use))
        check_code(source, engine.capabilities())

        def find() -> Profile | None:
            return self._profiler.enough(source, engine, self._node(), options, self._settings.profile_seconds)

        return find() or self._profiler.take(
            source,
            engine,
            self._daemon,
            workload=options.workload,
            plan_options=options,
            max_seconds=self._settings.profile_seconds,
            progress=lambda p: tell(f"profiling: {p.running}", p.done, p.total, p.elapsed_s),
            unless=find,
        )

    @contextlib.contextmanager
    def _launched(self, spec: WorkerSpec) -> Iterator[WorkerStatus]:
        """Yield the worker of ``spec``, ended whatever happens inside.

        A worker that a daemon which is away cannot end has no owner then, and is ended by the reconciler.
        """
        try:
            ask_daemon(self._daemon, lambda daemon: launched(daemon, spec))
            yield wait_until_ready(
                self._daemon, spec.worker_id, self._settings.ready_timeout_s, go_on=lambda: None
            )
        finally:
            try:
                ask_daemon(self._daemon, lambda daemon: daemon.stop(spec.worker_id))
            except NotFoundError:
                pass
            except IserveError as error:
                log.warning("ending worker %s: %s", spec.worker_id, error)

    def _node(self) -> NodeStatus:
        return ask_daemon(self._daemon, DaemonClient.node)


def check_same_engine(engine: Engine, running: tuple[tuple[str, str], ...], name: str) -> None:
    """Check that a worker runs the engine that is installed: one release must not correct predictions of another.

    Args:
        running: versions that the worker of ``name`` was started with; (): not recorded.

    Raises:
        ConflictError: other versions are installed now.
    """
    now = engine.versions()
    if running and running != now:
        raise ConflictError(
            f"the worker of {name!r} runs {described(running)}, and installed now is {described(now)}, which is "
            "what plans are made for; deploy it anew (`iserve rm`, `iserve deploy`), then verify it"
        )


def used_bytes(node: NodeStatus) -> dict[str, int]:
    """Return bytes in use by device, where a driver counts them."""
    return {device.device_id: device.used_bytes for device in node.devices if device.used_bytes is not None}
