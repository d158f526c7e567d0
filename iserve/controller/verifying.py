"""Checks in the background: measurements of a worker, compared with its prediction and kept to correct it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from daemon.client import DaemonClient
from daemon.engines.registry import get_engine
from daemon.status import NodeStatus
from fingerprint.errors import NotFoundError
from fingerprint.profile_checks import deployed_graph_tokens
from fingerprint.verification import SingleRequest, Verification
from iserve.api_documents import ProgressDocument
from iserve.api_types import VerifyBody
from iserve.controller.check_targets import CheckTarget, Targets, Tell, check_same_engine, used_bytes
from iserve.controller.daemon_workers import ask_daemon
from iserve.controller.deployment_status import workers_seen
from iserve.controller.jobs import Jobs
from iserve.controller.profiling import Profiler
from iserve.controller.profiling_validity import machine_key
from iserve.controller.snapshot import hardware_of
from iserve.model_source import ModelSource
from iserve.planning.serving_capacity import served_memory
from iserve.state.rows import VerificationRow
from iserve.state.store import Store
from iserve.verify.documents import (
    StoredVerification,
    VerificationDocument,
    VerificationJobDocument,
    kv_room_tokens,
    verification_document,
)
from iserve.verify.timing import Times, time_batches
from iserve.verify.worker_client import CheckedWorker

__all__ = ["Verifier"]


_NOT_COUNTED = "not reported: neither the engine nor a driver counts it"
_OWN_COUNTS = "the worker's own counts, itemised per rank"
_DRIVER_LISTS = "the driver's count of the worker's processes"
_DRIVER_COUNTS = "the driver's count, with the worker less before it was launched"


class Verifier:
    """Thread-safe; checks run one after the other."""

    def __init__(
        self,
        store: Store,
        profiler: Profiler,
        targets: Targets,
        daemon: Callable[[], DaemonClient],
        resolve: Callable[..., ModelSource],
    ) -> None:
        self._store, self._profiler, self._targets = store, profiler, targets
        self._daemon, self._resolve = daemon, resolve
        self._jobs: Jobs[VerificationJobDocument] = Jobs("verification")

    # jobs

    def start(self, body: VerifyBody) -> VerificationJobDocument:
        """Begin a check in the background; ask for it by its job id.

        Raises:
            BadInputError: what was asked for cannot be.
            ConflictError: the deployment does not serve now.
            UnavailableError: too many wait already.
        """
        targets = self._targets
        name, find = targets.deployment(body) if body.deployment is not None else targets.model(body)
        job = VerificationJobDocument(
            job_id=uuid.uuid4().hex, model=name, status="running", error=None, progress=None
        )

        def work(show: Callable[[VerificationJobDocument], None]) -> VerificationJobDocument:
            def tell(step: str, done: int, total: int, elapsed_s: float) -> None:
                progress = ProgressDocument(step=step, done=done, total=total, elapsed_s=elapsed_s)
                show(replace(job, progress=progress))

            with find(tell) as running:
                return replace(job, result=self._check(running, body.max_seconds, tell))

        return self._jobs.start(job, work)

    def job(self, job_id: str) -> VerificationJobDocument:
        return self._jobs.get(job_id)

    def stored(self) -> tuple[StoredVerification, ...]:
        """Return every check that is kept, the oldest first.

        Raises:
            UnavailableError: the daemon is away, so that it is unknown which are in force.
        """
        rows = self._store.verifications()
        if not rows:
            return ()
        node = ask_daemon(self._daemon, DaemonClient.node)
        keys = {name: machine_key(node, get_engine(name)) for name in {row.engine for row in rows}}
        return tuple(
            StoredVerification(
                model=row.model,
                shape_hash=row.shape_hash,
                engine=row.engine,
                in_force=row.machine_key == keys[row.engine] and self._has_graphs_of_today(row),
                verification=row.verification,
            )
            for row in rows
        )

    def _has_graphs_of_today(self, row: VerificationRow) -> bool:
        profile = self._store.profile(row.shape_hash, row.engine, row.machine_key)
        return profile is None or row.verification.graph_tokens == deployed_graph_tokens(profile)

    def forget(self, model: str) -> None:
        """Correct nothing by the checks of ``model`` any more, nor the models of its shape.

        Raises:
            NotFoundError: there is none.
        """
        source = self._resolve(model, need_weights=False)
        if not self._store.forget_verifications(source.spec.shape_hash):
            raise NotFoundError(
                f"{source.name} has no correction: no configuration of its shape was verified here"
            )
        self._store.add_event(None, "verified", f"{source.name}: corrections forgotten")

    def close(self) -> None:
        self._jobs.close()

    # the check

    def _check(self, running: CheckTarget, max_seconds: float, tell: Tell) -> VerificationDocument:
        """Measure, compare with what is predicted now, and keep what was measured.

        Raises:
            ConflictError: its engine was replaced meanwhile; nothing is kept.
            NotMeasuredError: nothing is predicted of it; nothing is measured.
        """
        node = ask_daemon(self._daemon, DaemonClient.node)
        estimator = self._profiler.estimator(running.profile, running.engine, node)
        estimator.estimate(running.spec.config, running.planned)
        worker = CheckedWorker(
            running.spec, running.engine, running.url, self._daemon, running.source.spec, running.token
        )
        with worker.watched():
            times, alone, unknown = time_batches(
                worker.burst,
                running.planned,
                max_seconds=max_seconds,
                clock=time.monotonic,
                progress=lambda done, total, elapsed_s: tell("checking", done, total, elapsed_s),
            )
            stats = worker.stats()
        check_same_engine(running.engine, running.versions, running.spec.served_model)
        node = ask_daemon(self._daemon, DaemonClient.node)
        held_bytes, memory_how = _held(running, node, None if stats is None else worker.held_bytes(stats))
        verification = Verification(
            config=running.spec.config,
            workload=times.workload,
            launch_workload=running.planned,
            layers_per_stage=tuple(stage.num_layers for stage in running.spec.stages),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            ttft_s=times.ttft_s,
            tpot_s=times.tpot_s,
            memory_bytes_per_gpu=held_bytes,
            kv_tokens=kv_room_tokens(stats, running.source.spec),
            graph_tokens=running.spec.limits.graph_tokens,
            single_request=None
            if alone is None
            else SingleRequest(workload=alone.workload, ttft_s=alone.ttft_s, tpot_s=alone.tpot_s),
        )
        estimator = self._profiler.estimator(running.profile, running.engine, node)
        predicted = estimator.estimate(running.spec.config, times.workload)
        memory = served_memory(
            running.source.spec, estimator, running.spec.config, running.planned, running.served
        )
        document = verification_document(
            verification,
            replace(predicted, memory=memory),
            base=estimator.base,
            model=running.source.name,
            deployment=running.deployment,
            hardware=hardware_of(node, running.profile.machine.device).label,
            spec=running.spec,
            stats=stats,
            memory_how=memory_how,
            notes=_notes(running, times, unknown),
        )
        if running.served != running.planned:  # what it holds corrects no estimate of the planned workload
            verification = replace(verification, memory_bytes_per_gpu=None)
        self._keep(running, node, verification)
        return document

    def _keep(self, running: CheckTarget, node: NodeStatus, verification: Verification) -> None:
        self._store.put_verification(
            verification,
            model=running.source.name,
            shape_hash=running.source.spec.shape_hash,
            engine=running.engine.name,
            machine_key=machine_key(node, running.engine),
        )
        self._store.add_event(None, "verified", f"{running.source.name}: {verification.config} was checked")


def _held(running: CheckTarget, node: NodeStatus, own_bytes: int | None) -> tuple[int | None, str]:
    """Return bytes on the fullest of the worker's devices, and the source of that count."""
    if own_bytes:
        return own_bytes, _OWN_COUNTS
    devices = {device_id for stage in running.spec.stages for device_id in stage.device_ids}
    held = [held for worker in workers_seen([running.spec], node.workers) for held in worker.held]
    if devices == {one.device_id for one in held}:
        return max(one.held_bytes for one in held), _DRIVER_LISTS
    before, now = running.used_before, used_bytes(node)
    if before is None or not devices <= before.keys() & now.keys():
        return None, _NOT_COUNTED
    most_bytes = max(now[device_id] - before[device_id] for device_id in devices)
    return (most_bytes, _DRIVER_COUNTS) if most_bytes > 0 else (None, _NOT_COUNTED)


def _notes(running: CheckTarget, times: Times, unknown: str | None) -> tuple[str, ...]:
    notes = []
    if unknown is not None:
        notes.append(
            f"one request alone was not timed ({unknown}); the correction of the full batch is used for all"
        )
    planned = running.planned
    if times.workload != planned:
        notes.append(
            f"answers of {times.workload.output_tokens} tokens were run, not of {planned.output_tokens}, to "
            "stay within --max-seconds; times are predicted for the same"
        )
    if running.num_replicas > 1:
        notes.append(
            f"one of {running.num_replicas} replicas was checked, {running.spec.worker_id}; the rest still served"
        )
    if times.disturbed:
        notes.append(f"{times.disturbed} pairs of bursts are left out: other requests ran meanwhile")
    return tuple(notes)
