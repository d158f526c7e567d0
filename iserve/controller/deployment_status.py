"""A deployment as people are shown it: its row joined with what the daemon sees of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from daemon.status import NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from iserve.api_documents import ReplicaDocument
from iserve.state.store import DeploymentRow

__all__ = ["replicas_seen", "seen_of", "status_of", "workers_seen"]

_LOST = "lost"


def seen_of(spec: WorkerSpec, there: Mapping[str, WorkerStatus]) -> WorkerStatus | None:
    """Return the worker of ``spec`` among those ``there``, by id; None also where that id is another worker's."""
    found = there.get(spec.worker_id)
    return found if found is not None and found.is_of(spec) else None


def workers_seen(specs: Iterable[WorkerSpec], workers: Iterable[WorkerStatus]) -> tuple[WorkerStatus, ...]:
    """Return the workers of ``specs`` among ``workers``, in the order of ``specs``, as :func:`seen_of`."""
    there = {worker.spec.worker_id: worker for worker in workers}
    return tuple(seen for spec in specs if (seen := seen_of(spec, there)) is not None)


def replicas_seen(workers: Sequence[WorkerSpec], node: NodeStatus | None) -> tuple[ReplicaDocument, ...]:
    """Return the chosen replicas as they are on ``node`` now; None: the daemon is away."""
    there = {} if node is None else {w.spec.worker_id: w for w in node.workers}
    documents = []
    for spec in workers:
        seen = seen_of(spec, there)
        unseen = "unreachable" if node is None else _LOST
        documents.append(
            ReplicaDocument(
                worker_id=spec.worker_id,
                status=unseen if seen is None else str(seen.state),
                device_ids=tuple(device for stage in spec.stages for device in stage.device_ids),
                layers_per_stage=tuple(stage.num_layers for stage in spec.stages),
                url=None if seen is None else seen.url,
                restarts=0 if seen is None else seen.restarts,
                error=None if seen is None else seen.error,
            )
        )
    return tuple(documents)


def status_of(row: DeploymentRow, node: NodeStatus | None, replicas: Sequence[ReplicaDocument]) -> str:
    """Return the observed status; the recorded phase only where nothing can be observed yet.

    Ready while one serves.
    """
    if row.desired == "removed":
        return "removing"
    if row.phase != "ready":
        return row.phase
    if node is None:
        return "unreachable"
    states = [replica.status for replica in replicas]
    if WorkerState.READY in states:
        return str(WorkerState.READY)
    return next((state for state in states if state != _LOST), str(WorkerState.RESTARTING))
