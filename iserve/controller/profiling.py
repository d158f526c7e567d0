"""Takes profiles: cuts the fingerprints, launches profiling workers through the daemon, keeps what was measured.

One profile at a time per controller: two would measure each other.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from daemon.client import DaemonClient
from daemon.engine_options import EngineOptions
from daemon.engines.base import Engine
from daemon.engines.external import ExternalEngine
from daemon.interconnect import can_measure_links, measure_links, with_links
from daemon.profile_client import LOAD_MARK, WorkerHandle, WorkerProfileTarget
from daemon.status import NodeStatus
from daemon.unlisted_gpus import measure_if_unlisted
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import largest_graph
from fingerprint.errors import (
    ConflictError,
    EngineError,
    InfeasibleError,
    IserveError,
    NotFoundError,
    NotMeasuredError,
    StateUnavailableError,
    TooLittleTimeError,
    UnmeasurableError,
)
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.measurements import Profile
from fingerprint.profile import ProfileProgress
from fingerprint.profile_plan import Shards
from fingerprint.variant_measurements import VariantKind
from iserve.controller.daemon_workers import ask_daemon, start_profiling_worker
from iserve.controller.profiling_cuts import Fingerprints
from iserve.controller.profiling_devices import STEP_TOKENS, quietest, share_of_free_bytes
from iserve.controller.profiling_run import Order, take
from iserve.controller.profiling_scope import kind_to_measure, lacking, variants_budget_s
from iserve.controller.profiling_validity import (
    covers,
    described,
    has_todays_graphs,
    key_without_driver,
    machine_key,
    release_to_start,
    why_unused,
)
from iserve.controller.snapshot import check_one_kind
from iserve.model_source import ModelSource
from iserve.planning.estimator_factory import estimator_for, profile_as
from iserve.planning.pipeline import PlanOptions
from iserve.state.store import Store
from placement.types import DeploymentState
from planner.intent import Quality

__all__ = ["Profiler", "last_words", "within_what_is_free"]

_BENCHMARK_BYTES = 4 << 30  # of a GPU, free
_STARTS_S = 7200.0  # for engine starts of one profiling worker, two of each format: more than they take
_LOG_LINES = 2000  # of a profiling worker's log, to look for its engine's last words in


class Profiler:
    """Profiles by model shape, engine and machine; taken once, then read from the store."""

    def __init__(
        self,
        store: Store,
        fingerprint_folder: Path,
        *,
        start_timeout_s: float,
        serving: Callable[[NodeStatus], tuple[DeploymentState, ...]] = lambda _: (),
    ) -> None:
        self._store, self._serving = store, serving
        self._folder = fingerprint_folder
        self._start_timeout_s = start_timeout_s
        self._one_at_a_time = threading.Lock()
        self._workers: frozenset[str] = frozenset()
        self._links_tried = set[str]()

    @property
    def workers(self) -> frozenset[str]:
        """Ids of the workers of the profile or check under way; every other worker of one is an orphan."""
        return self._workers

    @contextlib.contextmanager
    def paused(self, go_on: Callable[[], None]) -> Iterator[None]:
        """Hold off every other profile and deployment while the block runs.

        Inside, no other profile is taken: what a device has free is not on loan to a profiling worker, nor about
        to be promised to another deployment.

        Args:
            go_on: called every second while a profile under way is waited for; what it raises ends the waiting.
        """
        while not self._one_at_a_time.acquire(timeout=1.0):
            go_on()
        try:
            yield
        finally:
            self._one_at_a_time.release()

    @contextlib.contextmanager
    def paused_now(self) -> Iterator[bool]:
        """Do as :meth:`paused`; yield False, and hold nothing off, where another caller is inside."""
        got = self._one_at_a_time.acquire(blocking=False)
        try:
            yield got
        finally:
            if got:
                self._one_at_a_time.release()

    @contextlib.contextmanager
    def owning(self, worker_id: str) -> Iterator[None]:
        """Own a worker inside (and inside ``paused``): it is no orphan, and is not ended where it drains."""
        self._workers = frozenset({worker_id})
        try:
            yield
        finally:
            self._workers = frozenset()

    def estimator(self, profile: Profile, engine: Engine, node: NodeStatus) -> CorrectedEstimator:
        """Return the estimator by the model's fingerprints, corrected by the checks of its deployments."""
        rows = self._store.verifications(
            shape_hash=profile.spec.shape_hash, engine=engine.name, machine_key=machine_key(node, engine)
        )
        checks = [row.verification for row in rows]
        return CorrectedEstimator(estimator_for(profile), checks, graph_tokens=profile.graph_tokens)

    def stored(self, source: ModelSource, engine: Engine, node: NodeStatus, *, batch: int = 1) -> Profile | None:
        """Return the profile, as of ``source``, that holds on ``node`` now for up to ``batch`` requests at once.

        It has the links between the node's GPUs, where they were measured.

        Raises:
            InfeasibleError: the node has GPUs of several kinds, of which a profile measures one.
        """
        found = self._stored(source, engine, node, batch)
        return found and profile_as(source.spec, with_links(found, node))

    def _stored(self, source: ModelSource, engine: Engine, node: NodeStatus, batch: int) -> Profile | None:
        check_one_kind(node)
        shape, name = source.spec.text_alone.shape_hash, engine.name
        found = self._store.profile(shape, name, machine_key(node, engine))
        if found is None:  # profiles say themselves which driver they were taken with
            older = self._store.profile(shape, name, key_without_driver(node, engine))
            found = older if older is not None and older.machine.driver == node.driver else None
        return found if found is not None and covers(found, batch) and has_todays_graphs(found) else None

    def enough(
        self, source: ModelSource, engine: Engine, node: NodeStatus, plan_options: PlanOptions, max_seconds: float
    ) -> Profile | None:
        """Return the stored profile, where nothing was left out of it that ``plan_options`` may need and that
        ``max_seconds`` may measure.
        """
        found = self.stored(source, engine, node, batch=plan_options.workload.batch)
        if found is None or self.lacking(found, engine, node, plan_options):
            return None
        table = engine.capabilities()
        kind, budget_s = kind_to_measure(table, source.spec, plan_options), variants_budget_s(table, max_seconds)
        is_known = kind is None or kind in {one.kind for one in found.variants if one.is_final(budget_s)}
        return found if is_known else None

    def lacking(
        self, profile: Profile, engine: Engine, node: NodeStatus, plan_options: PlanOptions
    ) -> tuple[DeploymentConfig, ...]:
        """Return what was left out of ``profile`` as needless for another request, and may change what this one
        chooses.
        """
        return lacking(profile, node, engine.capabilities().unprepared(), plan_options, self._serving(node))

    def unused(self, source: ModelSource, engine: Engine, node: NodeStatus, *, batch: int = 1) -> tuple[str, ...]:
        """Return a sentence on every profile of this model and engine that is there and does not hold now."""
        used = self._stored(source, engine, node, batch)
        same = (source.spec.text_alone.shape_hash, engine.name)
        return tuple(
            why_unused(profile, node, engine.versions(), batch)
            for profile in self._store.profiles()
            if (profile.spec.shape_hash, profile.engine) == same and profile != used
        )

    def take(
        self,
        source: ModelSource,
        engine: Engine,
        daemon: Callable[[], DaemonClient],
        *,
        workload: Workload,
        plan_options: PlanOptions | None = None,
        quality: Quality = Quality.NEAR,
        shards: Shards = Shards.AUTO,
        variants: VariantKind | None = None,
        expert_parallel: bool = False,
        max_seconds: float,
        progress: Callable[[ProfileProgress], None],
        unless: Callable[[], Profile | None] = lambda: None,
        go_on: Callable[[], None] = lambda: None,
    ) -> Profile:
        """Measure the model's fingerprints on devices that are free now, and keep the result.

        A profile that holds and is not :meth:`enough` for ``plan_options`` is kept, with what it lacks.

        Args:
            plan_options: what it is taken for, if for anything in particular.
            quality: which formats are worth a start of the engine, where there is no request.
            shards: which degrees may be taken as one tensor-parallel rank alone.
            variants: kind to measure as well, where there is no request; None: none.
            expert_parallel: whether to measure it as well, at the TP degrees that are measured.
            progress: what it raises ends the profile.
            unless: asked when this profile's turn is reached; one that another took meanwhile is returned instead.
            go_on: called while that turn is waited for; what it raises ends the waiting.

        Raises:
            InfeasibleError: there is no device, or GPUs of several kinds.
            ConfigError: shards of an engine without step timer, more requests at once than fit a step of one, or
                expert parallelism that the engine or the model has not.
            EngineError: the profiling worker failed.
            TooLittleTimeError: the budget was too short to estimate anything from; nothing is kept.
            UnmeasurableError: all that was planned was measured, and does not tell; nothing is kept.
            ConflictError: the engine was replaced meanwhile; nothing is kept.
        """
        with self.paused(go_on):
            if (meanwhile := unless()) is not None:
                return meanwhile
            node = self._prepared_node(engine, daemon, go_on)
            former = self._stored(source, engine, node, workload.batch)
            if plan_options is not None:
                quality = plan_options.intent.quality
                variants = kind_to_measure(engine.capabilities(), source.spec, plan_options)
            order = Order(
                source=source,
                table=engine.capabilities().unprepared(),
                node=node,
                workload=workload,
                plan_options=plan_options,
                quality=quality,
                shards=shards,
                max_seconds=max_seconds,
                progress=progress,
                known=None if plan_options is None else former,
                serving=self._serving(node),
                variants=variants,
                expert_parallel=expert_parallel,
            )
            return self._taken(order, engine, daemon, former)

    def _prepared_node(
        self, engine: Engine, daemon: Callable[[], DaemonClient], go_on: Callable[[], None]
    ) -> NodeStatus:
        """Return the node without workers of earlier profiles, its GPUs and links known or measured."""
        node = ask_daemon(daemon, self._without_leftovers)
        check_one_kind(node)
        _measure_unlisted(engine, node, go_on)
        self._measure_links(engine, node, go_on)
        return node

    def _taken(
        self, order: Order, engine: Engine, daemon: Callable[[], DaemonClient], former: Profile | None
    ) -> Profile:
        """Measure as :meth:`take`, and keep the result.

        Args:
            former: the profile that it replaces, whose variants are kept where it has none.
        """
        key, versions = machine_key(order.node, engine), engine.versions()
        measured = with_links(self._measured(order, engine, daemon), order.node)
        measured = _with_former_variants(measured, former)
        _check_same_engine(engine, versions, measured)
        self._keep(measured, key)
        return order.as_served(measured)

    def ensure_links(
        self, engine: Engine, node: NodeStatus, daemon: Callable[[], DaemonClient], go_on: Callable[[], None]
    ) -> None:
        """Have the links between the node's GPUs measured, once, where they are idle.

        Args:
            go_on: called while a profile under way is waited for and while it measures; what it raises ends it.

        Raises:
            EngineError: the engine is not installed any more.
        """
        if can_measure_links(node):
            with self.paused(go_on):
                self._measure_links(engine, ask_daemon(daemon, DaemonClient.node), go_on)

    def _measure_links(self, engine: Engine, node: NodeStatus, go_on: Callable[[], None]) -> None:
        if not can_measure_links(node):
            return
        python = engine.installed().python if isinstance(engine, ExternalEngine) else sys.executable
        if python not in self._links_tried:
            measure_links(node, python, go_on=go_on)
            self._links_tried.add(python)  # one that fails would fail at each deploy of this process

    def _measured(self, order: Order, engine: Engine, daemon: Callable[[], DaemonClient]) -> Profile:
        """Measure as :meth:`take`; fingerprints and workers are gone afterwards."""
        folder = self._folder / uuid.uuid4().hex
        fingerprints = Fingerprints(order.source, folder, weights=not order.table.own_environment)
        try:
            fingerprints(1)  # a checkpoint that cannot be cut costs no launch
            with self._target(order.source, engine, daemon, order.node, order.max_seconds) as target:
                measured = take(order, target, fingerprints)
            _check_usable(measured, order.workload)
            return measured
        finally:
            self._workers = frozenset()
            shutil.rmtree(folder, ignore_errors=True)

    def _keep(self, measured: Profile, key: str, *, patience_s: float = 60.0) -> None:
        """Keep the profile: a minute of measuring is not lost to a database that is being restarted."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._store.put_profile(measured, key)
                return
            except StateUnavailableError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _without_leftovers(self, daemon: DaemonClient) -> NodeStatus:
        """Return the node, after ending the profiling workers of a controller that was killed, and its
        fingerprints.

        They would take memory and time from what is measured now.
        """
        for worker in daemon.workers():
            if worker.spec.profiling:
                with contextlib.suppress(NotFoundError):
                    daemon.stop(worker.spec.worker_id)
        shutil.rmtree(self._folder, ignore_errors=True)
        return daemon.node()

    def _target(
        self,
        source: ModelSource,
        engine: Engine,
        daemon: Callable[[], DaemonClient],
        node: NodeStatus,
        max_seconds: float,
    ) -> WorkerProfileTarget:
        """Return what launches workers on ``node``, each with an end if no controller ends it."""
        if not node.devices:
            raise InfeasibleError(f"node {node.node_id} offers no device to profile on")
        devices = quietest(node.devices)

        def launch(spec: WorkerSpec) -> WorkerHandle:
            self._workers |= {spec.worker_id}
            fitted = within_what_is_free(spec, ask_daemon(daemon, DaemonClient.node))
            lasting_s = self._start_timeout_s + 2 * max_seconds + _STARTS_S
            fitted = replace(fitted, ends_at=time.time() + lasting_s)
            return start_profiling_worker(daemon, fitted, self._start_timeout_s)

        def explain(spec: WorkerSpec, error: IserveError) -> IserveError:
            if not engine.capabilities().own_environment or not isinstance(error, EngineError):
                return error
            try:
                text = ask_daemon(daemon, lambda there: there.log(spec.worker_id, _LOG_LINES))
            except IserveError:
                return error
            return last_words(engine, spec, error, text)

        return WorkerProfileTarget(
            launch,
            explain=explain,
            checkpoint=source.directory,
            device_ids=[device.device_id for device in devices],
            limits=WorkerLimits(
                max_batch=1,
                max_batched_tokens=STEP_TOKENS,
                max_context_tokens=source.spec.max_context_tokens,
                kv_tokens=source.spec.max_context_tokens,
                memory_bytes_per_device=0,  # set at each launch
                graph_tokens=largest_graph(engine.name, is_mixture=source.spec.is_mixture),
            ),
            engine=engine.name,
            engine_version=release_to_start(engine),
            options=EngineOptions(use=replace(source.use, images=0, image_tokens=None)),
            start_timeout_s=self._start_timeout_s,
        )


def _with_former_variants(measured: Profile, former: Profile | None) -> Profile:
    """Return ``measured`` with what was measured of variants in the profile that it replaces, where it has not."""
    known = {one.kind for one in measured.variants if not one.failure}
    kept = () if former is None else tuple(v for v in former.variants if not v.failure and v.kind not in known)
    new = tuple(one for one in measured.variants if one.kind not in {former.kind for former in kept})
    return replace(measured, variants=(*kept, *new)) if kept else measured


def _measure_unlisted(engine: Engine, node: NodeStatus, go_on: Callable[[], None]) -> None:
    """Have a GPU measured for a few seconds, once, that no table has and that ``engine`` does not measure itself.

    Raises:
        EngineError: the engine is not installed any more.
    """
    if not isinstance(engine, ExternalEngine) or not node.devices:
        return
    device = quietest(node.devices)[0]
    if device.kind == "cuda" and device.free_bytes >= _BENCHMARK_BYTES:
        measure_if_unlisted(device.name, device.device_id, engine.installed().python, go_on=go_on)


def last_words(engine: Engine, spec: WorkerSpec, error: EngineError, log: str) -> IserveError:
    """Return the error that a profiling worker's engine ended with, which often only its log has.

    The engine runs in processes of its own. Of a log of several starts the last one's part counts.
    """
    return engine.explain_failure(spec, 1, f"{log.rpartition(LOAD_MARK)[2]}\n{error}")


def _check_usable(measured: Profile, workload: Workload) -> None:
    """Raise NotMeasuredError if too little was measured; kept, it would be in the way of a better one.

    TooLittleTimeError where more was planned; UnmeasurableError where all of it was measured, and does not tell.
    """
    try:
        estimator_for(measured).estimate(DeploymentConfig(engine=measured.engine), workload)
    except NotMeasuredError as error:
        if measured.complete:
            raise UnmeasurableError(
                f"the profile of {measured.model} on {measured.engine} has all that was planned, and does not "
                f"tell what batch {workload.batch} with {workload.input_tokens} in takes; more time would not "
                "change that: take another --engine, or plan for datasheet GPUs with --gpus NAME:COUNT"
            ) from error
        raise TooLittleTimeError(
            f"the profile of {measured.model} took {measured.spent_s:.1f} s of the {measured.budget_s:g} s it may "
            f"take, which was too short to estimate from ({sum(len(p.runs) for p in measured.timing)} runs); give "
            "it more: `iserve profile --max-seconds`, or ISERVE_PROFILE_SECONDS for a deploy"
        ) from error


def _check_same_engine(engine: Engine, before: Sequence[tuple[str, str]], measured: Profile) -> None:
    """Raise ConflictError if what was measured is not, or not all, of what is installed."""
    now = engine.versions()
    if now != before or not set(now) <= set(measured.machine.versions):
        then = described(measured.machine.versions)
        raise ConflictError(
            f"{engine.name} was replaced while {measured.model} was profiled ({then} then, {described(now)} now): "
            "nothing of it is kept; profile it again"
        )


def within_what_is_free(spec: WorkerSpec, node: NodeStatus) -> WorkerSpec:
    """Return ``spec`` with most of what its devices have free now; a CPU's memory changes every second."""
    used = {device_id for stage in spec.stages for device_id in stage.device_ids}
    free_bytes = share_of_free_bytes(device for device in node.devices if device.device_id in used)
    limits = replace(spec.limits, memory_bytes_per_device=free_bytes)
    return replace(spec, limits=limits)
