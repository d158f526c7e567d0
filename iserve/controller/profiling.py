"""Takes profiles: cuts the fingerprints, launches profiling workers through the daemon, keeps what was measured.

One profile at a time per controller: two would measure each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from daemon.client import DaemonClient
from daemon.engines.base import Engine, WorkerLimits, WorkerSpec
from daemon.profile_client import WorkerHandle, WorkerProfileTarget
from daemon.status import DeviceStatus, NodeStatus, WorkerState, WorkerStatus
from fingerprint.capability import EngineCapabilities
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.depth_tied_profile import depth_tied_plan, depth_tied_profile
from fingerprint.errors import (
    EngineError,
    InfeasibleError,
    NotFoundError,
    NotMeasuredError,
    UnavailableError,
    UnsupportedModelError,
)
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS, RooflineEstimator
from fingerprint.generate import generate, generate_dummy, generate_shape
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress, profile
from fingerprint.profile_plan import default_plan
from iserve.model_source import ModelSource
from iserve.state.store import Store
from planner.space import shape_refusal

__all__ = ["Profiler", "ask_daemon", "estimator_for", "launched", "machine_key", "wait_until_ready"]

T = TypeVar("T")

_SHARE_OF_FREE = 0.9  # of a device's memory, for a profiling worker
_ENDED = {WorkerState.FAILED, WorkerState.STOPPED, WorkerState.STOPPING}


def machine_key(node: NodeStatus, engine: Engine) -> str:
    """Equal while a profile stays valid: the same devices and engine versions.

    Memory is counted in whole GiB, because a CPU share's changes a little from boot to boot.
    """
    devices = sorted((d.kind, d.name, d.total_bytes >> 30, len(d.cores)) for d in node.devices)
    return hashlib.sha256(to_json((devices, engine.versions()))).hexdigest()[:16]


def ask_daemon(
    daemon: Callable[[], DaemonClient], question: Callable[[DaemonClient], T], *, patience_s: float = 30.0
) -> T:
    """What the daemon answers. One that is killed meanwhile is back within a few seconds, and is asked again.

    Args:
        question: may be asked twice, the answer to the first being lost.

    Raises:
        UnavailableError: it is not back, or cannot do what is asked now (its disk is full, say).
        IserveError: what the daemon answered with.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return question(daemon())
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def launched(daemon: DaemonClient, spec: WorkerSpec) -> WorkerStatus:
    """The worker of ``spec``: the one that is there, a stopped one not counted, or one that is launched now.

    Raises:
        IserveError: as ``DaemonClient.launch``.
    """
    with contextlib.suppress(NotFoundError):
        status = daemon.worker(spec.worker_id)
        if status.state is not WorkerState.STOPPED:
            return status
    return daemon.launch(replace(spec, port=0))  # any free port: the one it had may be another's by now


def wait_until_ready(
    daemon: Callable[[], DaemonClient], worker_id: str, timeout_s: float, *, go_on: Callable[[], None]
) -> WorkerStatus:
    """The worker's status once it serves; a daemon that is away for a while is waited for.

    Args:
        go_on: called between looks; what it raises ends the waiting.

    Raises:
        NotFoundError: the daemon does not know it.
        EngineError: the worker gave up, was stopped, or is not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    last = "unknown"
    while time.monotonic() < deadline:
        go_on()
        try:
            status = daemon().worker(worker_id)
        except UnavailableError:
            time.sleep(0.2)
            continue
        if status.state is WorkerState.READY:
            return status
        if status.state in _ENDED:
            raise EngineError(status.error or f"the worker {worker_id} is {status.state}")
        last = status.state
        time.sleep(0.1)
    raise EngineError(f"the worker {worker_id} is {last}, not ready, after {timeout_s:.0f} s")


class _DaemonWorker:
    """A worker that the daemon runs, as the profiling client wants it."""

    def __init__(self, daemon: Callable[[], DaemonClient], status: WorkerStatus) -> None:
        self._daemon, self._worker_id = daemon, status.spec.worker_id
        self.url = status.url

    def failure(self) -> str | None:
        status = ask_daemon(self._daemon, lambda there: there.worker(self._worker_id))
        if status.state in _ENDED or status.restarts:
            return status.error or f"the profiling worker is {status.state}"
        return None

    def stop(self) -> None:
        try:
            ask_daemon(self._daemon, lambda there: there.stop(self._worker_id))
        except NotFoundError:
            return


class Profiler:
    """Profiles by model shape, engine and machine; taken once, then read from the store."""

    def __init__(self, store: Store, fingerprint_folder: Path, *, start_timeout_s: float) -> None:
        self._store = store
        self._folder = fingerprint_folder
        self._start_timeout_s = start_timeout_s
        self._one_at_a_time = threading.Lock()
        self._workers: frozenset[str] = frozenset()

    @property
    def workers(self) -> frozenset[str]:
        """Ids of the workers of the profile or check under way; every other worker of one is an orphan."""
        return self._workers

    @contextlib.contextmanager
    def paused(self, go_on: Callable[[], None]) -> Iterator[None]:
        """Inside, no profile is taken by anybody else, and nobody else is inside: what a device has free is not
        on loan to a profiling worker, nor about to be promised to another deployment.

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
    def owning(self, worker_id: str) -> Iterator[None]:
        """Inside (and inside ``paused``), this worker is nobody's orphan."""
        self._workers = frozenset({worker_id})
        try:
            yield
        finally:
            self._workers = frozenset()

    def estimator(self, profile: Profile, engine: Engine, node: NodeStatus) -> CorrectedEstimator:
        """What was measured of the model's fingerprints, corrected by the checks of its deployments."""
        rows = self._store.verifications(
            shape_hash=profile.spec.shape_hash, engine=engine.name, machine_key=machine_key(node, engine)
        )
        return CorrectedEstimator(estimator_for(profile), [row.verification for row in rows])

    def stored(self, source: ModelSource, engine: Engine, node: NodeStatus) -> Profile | None:
        return self._store.profile(source.spec.shape_hash, engine.name, machine_key(node, engine))

    def take(
        self,
        source: ModelSource,
        engine: Engine,
        daemon: Callable[[], DaemonClient],
        *,
        workload: Workload,
        max_seconds: float,
        progress: Callable[[ProfileProgress], None],
        unless: Callable[[], Profile | None] = lambda: None,
        go_on: Callable[[], None] = lambda: None,
    ) -> Profile:
        """Measure the model's fingerprints on devices that are free now, and keep the result.

        Args:
            progress: what it raises ends the profile.
            unless: asked when this profile's turn has come; one that another took meanwhile is returned instead.
            go_on: called while that turn is waited for; what it raises ends the waiting.

        Raises:
            InfeasibleError: there is no device.
            EngineError: the profiling worker failed.
            NotMeasuredError: the budget was too short to estimate anything from; nothing is kept.
        """
        with self.paused(go_on):
            meanwhile = unless()
            if meanwhile is not None:
                return meanwhile
            node = ask_daemon(daemon, self._without_leftovers)
            folder = self._folder / uuid.uuid4().hex
            step_timed = engine.capabilities().step_timed
            fingerprints = _Fingerprints(source, folder, weights=not step_timed)
            take = _take_depth_tied if step_timed else _take_plain
            try:
                fingerprints(1)  # a checkpoint that cannot be cut costs no launch
                with self._target(source, engine, daemon, node) as target:
                    reach = _Reach(source.spec, engine.capabilities().unprepared(), len(node.devices))
                    measured = take(source, target, fingerprints, reach, workload, max_seconds, progress)
                _check_usable(measured, workload)
            finally:
                self._workers = frozenset()
                shutil.rmtree(folder, ignore_errors=True)
            self._store.put_profile(measured, machine_key(node, engine))
            return measured

    def _without_leftovers(self, daemon: DaemonClient) -> NodeStatus:
        """The node, after ending the profiling workers of a controller that was killed, and its fingerprints.

        They would take memory and time from what is measured now.
        """
        for worker in daemon.workers():
            if worker.spec.profiling:
                with contextlib.suppress(NotFoundError):
                    daemon.stop(worker.spec.worker_id)
        shutil.rmtree(self._folder, ignore_errors=True)
        return daemon.node()

    def _target(
        self, source: ModelSource, engine: Engine, daemon: Callable[[], DaemonClient], node: NodeStatus
    ) -> WorkerProfileTarget:
        devices = _quietest(node)

        def launch(spec: WorkerSpec) -> WorkerHandle:
            self._workers |= {spec.worker_id}
            status = ask_daemon(daemon, lambda there: launched(there, _within_what_is_free(spec, there.node())))
            return _DaemonWorker(daemon, status)

        return WorkerProfileTarget(
            launch,
            checkpoint=source.directory,
            device_ids=[device.device_id for device in devices],
            limits=WorkerLimits(
                max_batch=1,
                max_batched_tokens=DEFAULT_MAX_BATCHED_TOKENS,
                max_context_tokens=source.spec.max_context_tokens,
                kv_tokens=source.spec.max_context_tokens,
                memory_bytes_per_device=0,  # set at each launch
            ),
            engine=engine.name,
            start_timeout_s=self._start_timeout_s,
        )


def _check_usable(measured: Profile, workload: Workload) -> None:
    """Raises NotMeasuredError: too little was measured; kept, it would stand in the way of a better one."""
    try:
        estimator_for(measured).estimate(DeploymentConfig(engine=measured.engine), workload)
    except NotMeasuredError as error:
        raise NotMeasuredError(
            f"the profile of {measured.model} took {measured.spent_s:.1f} s of the {measured.budget_s:g} s it may "
            f"take, which was too short to estimate from ({sum(len(p.runs) for p in measured.timing)} runs); give "
            "it more: `iserve profile --max-seconds`, or ISERVE_PROFILE_SECONDS for a deploy"
        ) from error


def estimator_for(profile: Profile) -> FingerprintedEstimator | DepthTiedEstimator:
    """What was measured, and the roofline of the same device to scale it by."""
    roofline = RooflineEstimator(profile.spec, profile.machine.device)
    if any(point.repeat > 1 for point in profile.timing):
        return DepthTiedEstimator(profile, roofline)
    return FingerprintedEstimator(profile, roofline)


def _within_what_is_free(spec: WorkerSpec, node: NodeStatus) -> WorkerSpec:
    """``spec`` with most of what its devices have free now; a CPU's memory changes from second to second."""
    used = {device_id for stage in spec.stages for device_id in stage.device_ids}
    free_bytes = min(device.free_bytes for device in node.devices if device.device_id in used)
    limits = replace(spec.limits, memory_bytes_per_device=int(free_bytes * _SHARE_OF_FREE))
    return replace(spec, limits=limits)


def _quietest(node: NodeStatus) -> list[DeviceStatus]:
    """All devices, the least loaded and emptiest first, so that profiling harvests what others leave."""
    if not node.devices:
        raise InfeasibleError(f"node {node.node_id} offers no device to profile on")
    return sorted(node.devices, key=lambda d: (d.load_fraction, -d.free_bytes, d.index))


@dataclass(frozen=True, slots=True)
class _Reach:
    """What the engine runs of the model on the node's devices."""

    spec: ModelSpec
    engine: EngineCapabilities
    num_devices: int

    def formats_and_degrees(self, gpu: GpuSpec) -> tuple[tuple[WeightFormat, ...], tuple[tuple[int, int], ...]]:
        """Raises UnsupportedModelError: nothing at all."""

        def runs(config: DeploymentConfig) -> bool:
            shape = shape_refusal(self.spec, config, self.num_devices)
            return shape is None and self.engine.refusal(self.spec, config, gpu) is None

        name = self.engine.engine
        weights = tuple(w for w in WeightFormat if runs(DeploymentConfig(weights=w, engine=name)))
        degrees = tuple(
            (tp, pp) for tp, pp in ((1, 1), (2, 1), (1, 2)) if runs(DeploymentConfig(tp=tp, pp=pp, engine=name))
        )
        if not weights or not degrees:
            reason = self.engine.refusal(self.spec, DeploymentConfig(engine=name), gpu)
            raise UnsupportedModelError(f"{name} cannot run this model here: {reason}")
        return weights, degrees


def _take_plain(
    source: ModelSource,
    target: WorkerProfileTarget,
    fingerprints: _Fingerprints,
    reach: _Reach,
    workload: Workload,
    max_seconds: float,
    progress: Callable[[ProfileProgress], None],
) -> Profile:
    """Fingerprints as they are, on an engine that loads one after the other in a moment."""
    started = time.monotonic()
    device = target.machine().device  # launches the worker that the first degree then uses
    launch_s = time.monotonic() - started
    weights, degrees = reach.formats_and_degrees(device)
    left_s = max(1.0, max_seconds - launch_s)
    plan = default_plan(source.spec, workload, weights=weights, degrees=degrees, budget_s=left_s)
    measured = profile(source.name, source.spec, target, fingerprints, plan, progress=progress, launch_s=launch_s)
    return replace(measured, budget_s=max_seconds, spent_s=measured.spent_s + launch_s)


def _take_depth_tied(
    source: ModelSource,
    target: WorkerProfileTarget,
    fingerprints: _Fingerprints,
    reach: _Reach,
    workload: Workload,
    max_seconds: float,
    progress: Callable[[ProfileProgress], None],
) -> Profile:
    """Every forward repeated to the model's depth; ``max_seconds`` counts the GPU's time after engine starts."""
    weights, degrees = reach.formats_and_degrees(target.machine().device)
    plan = depth_tied_plan(
        source.spec, workload, max_batch=workload.batch, weights=weights, degrees=degrees, budget_s=max_seconds
    )
    return depth_tied_profile(source.name, source.spec, target, fingerprints, plan, progress=progress)


class _Fingerprints:
    """Cuts each fingerprint when it is first asked for."""

    def __init__(self, source: ModelSource, folder: Path, *, weights: bool) -> None:
        self._source, self._folder, self._weights = source, folder, weights

    def __call__(self, num_layers: int) -> Path:
        target = self._folder / f"{num_layers}-layers"
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._weights:  # the engine makes random ones
                generate_shape(self._source.directory, target, num_layers)
            elif self._source.has_weights:
                generate(self._source.directory, target, range(num_layers))
            else:
                generate_dummy(self._source.directory, target, num_layers, seed=0)
        return target
