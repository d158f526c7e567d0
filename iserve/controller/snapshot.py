"""The node as a plan sees it: the daemon's observations turned into a placement snapshot."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from daemon.devices import Device
from daemon.status import DeviceStatus, NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import from_json
from fingerprint.engines import traits_of
from fingerprint.errors import BadInputError, InfeasibleError
from fingerprint.gpu_spec import GpuSpec
from iserve.api_documents import NodeDocument
from iserve.controller.deployment_status import workers_seen
from iserve.controller.stored_values import recorded_workers
from iserve.planning.document import EstimateDocument, PlanDocument
from iserve.planning.pipeline import Hardware
from iserve.route_table import Demand, DeploymentDemand
from iserve.state.store import DeploymentRow
from placement.types import (
    ClusterSnapshot,
    DeploymentState,
    GpuState,
    Placement,
    ReplicaState,
    StagePlacement,
)

__all__ = ["check_one_kind", "devices_of", "hardware_of", "serving_on", "without"]

log = logging.getLogger(__name__)

_SATURATED = 0.95  # busy for so much of the time: how much more it is asked for does not show
_WINDOW_S = 120.0  # over which the daemon tells loads, and the gateway rates


def hardware_of(
    node: NodeStatus | NodeDocument, gpu: GpuSpec, serving: tuple[DeploymentState, ...] = ()
) -> Hardware:
    """Return the devices of ``node``, with what is free on them and their load now.

    Args:
        gpu: what one device can do, as the profile recorded it or the datasheet says.
        serving: what serves there and how often it is called, where that is known.

    Raises:
        InfeasibleError: the node offers no device, or GPUs of several kinds.
    """
    if not node.devices:
        raise InfeasibleError(f"node {node.node_id} offers no device")
    check_one_kind(node)
    num_workers = node.num_workers if isinstance(node, NodeDocument) else len(node.workers)
    untold, called = num_workers - sum(len(d.replicas) for d in serving), _called(serving)
    gpus = tuple(
        GpuState(
            device_id=device.device_id,
            node_id=node.node_id,
            gpu_index=device.index,
            total_bytes=device.total_bytes,
            free_bytes=min(device.free_bytes, device.total_bytes),
            load_fraction=_load_of_those_there(device, may_be_busy=untold > 0 or device.device_id in called),
            kind=gpu.kind,
        )
        for device in node.devices
    )
    label = f"{len(gpus)} x {gpu.name} ({node.node_id})"
    return Hardware(label=label, gpu=gpu, snapshot=ClusterSnapshot(gpus, serving))


def without(node: NodeStatus, gone: Sequence[WorkerSpec] = (), full: Collection[str] = ()) -> NodeStatus:
    """Return ``node`` as if the workers of ``gone`` had ended and the devices in ``full`` had nothing free."""
    ended = {worker.spec.worker_id for worker in workers_seen(gone, node.workers)}
    freed = Counter[str]()
    for worker in node.workers:
        if worker.spec.worker_id in ended and worker.state not in (WorkerState.STOPPED, WorkerState.FAILED):
            freed.update(worker.spec.promised_bytes())
    devices = tuple(
        replace(
            device,
            free_bytes=0
            if device.device_id in full
            else min(device.total_bytes, device.free_bytes + freed[device.device_id]),
        )
        for device in node.devices
    )
    workers = tuple(worker for worker in node.workers if worker.spec.worker_id not in ended)
    return replace(node, devices=devices, workers=workers)


def check_one_kind(node: NodeStatus | NodeDocument) -> None:
    """Refuse GPUs of several kinds: measurements of one would be taken for what another does.

    Raises:
        InfeasibleError: the node offers GPUs of several kinds.
    """
    kinds: dict[str, list[str]] = {}
    for device in node.devices:
        if device.kind == "cuda":
            kinds.setdefault(device.name, []).append(str(device.index))
    if len(kinds) > 1:
        told = ", ".join(f"{name}: {','.join(indexes)}" for name, indexes in kinds.items())
        raise InfeasibleError(
            f"node {node.node_id} offers GPUs of several kinds ({told}), and profiles and plans are of one kind; "
            "offer those of one: `iserve down`, then "
            f"`CUDA_VISIBLE_DEVICES={','.join(next(iter(kinds.values())))} iserve up`, say"
        )


_HELD = 0.02  # of a device's memory: less is the driver's own


def _called(serving: tuple[DeploymentState, ...]) -> set[str]:
    """Return the devices of the deployments with requests."""
    return {
        device
        for d in serving
        if d.requests_per_s or d.waiting or any(replica.outstanding for replica in d.replicas)
        for replica in d.replicas
        for device in replica.placement.device_ids
    }


def _load_of_those_there(device: DeviceStatus, *, may_be_busy: bool) -> float:
    """Return the load of the workers that are on a device.

    It is 0 where no process holds memory: what was seen of the last 120 s is then of a worker that has left, such
    as the engine of a profile that was taken a moment ago. A CPU's memory is always held: there it is 0 without a
    worker of ours that ``may_be_busy`` (one with requests, or of unknown demand), for any other program ran during
    the profile too and is in its times.
    """
    if device.kind == "cpu" and not may_be_busy:
        return 0.0
    if device.total_bytes - device.free_bytes < _HELD * device.total_bytes:
        return 0.0
    return min(1.0, max(0.0, device.load_fraction))


_HERE = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.RESTARTING})


def serving_on(
    node: NodeStatus, rows: Iterable[DeploymentRow], demand: Demand | None
) -> tuple[DeploymentState, ...]:
    """Return the deployments with a worker on ``node`` whose request rates the gateway reported.

    The service time of a request is the prediction of the chosen configuration, for a request as long as was
    planned for; or less, by the observed load of the devices of its workers, where they have been there all the
    time and keep up. Deployments that were not observed for long, or have only begun to queue, are taken to be
    busy for all of their time at most. The service model of the plan is given as well.

    Args:
        demand: None: the gateway is away, and rates are unknown.
    """
    asked = {} if demand is None else {one.name: one for one in demand.deployments}
    workers = [worker for worker in node.workers if worker.state in _HERE]
    found = []
    for row in rows:
        specs, told = recorded_workers(row), asked.get(row.name)
        here = workers_seen(specs, workers)
        if here and told is not None and told.requests_per_s is not None:
            found.append(_state(row, here, told, told.requests_per_s, node))
    return tuple(found)


def _state(
    row: DeploymentRow,
    workers: tuple[WorkerStatus, ...],
    told: DeploymentDemand,
    requests_per_s: float,
    node: NodeStatus,
) -> DeploymentState:
    """Return the state of a deployment whose replicas share its requests evenly."""
    plan = _recorded_plan(row)
    specs, number = [_as_planned(worker.spec, plan) for worker in workers], len(workers)
    most = sum(_most_batches(spec) for spec in specs)
    last_start_s = max(datetime.fromisoformat(worker.started_at).timestamp() for worker in workers)
    here_s = node.observed_at - last_start_s
    service_s = _planned_service_s(plan, specs[0])
    if requests_per_s > 0:
        seen = sum(_most_busy(spec, node) for spec in specs) if here_s >= _WINDOW_S else 0.0
        queues = told.waiting + told.outstanding > sum(worker.spec.limits.max_batch for worker in workers)
        if not 0 < seen < _SATURATED * most:  # busy ones that queue may be asked for any more than they can do
            seen = math.inf if seen and queues else most
        elif queues:  # a queue that began just now is not in what was seen
            seen = most
        service_s = min(service_s, seen / requests_per_s)
    return DeploymentState(
        name=row.name,
        model=row.name,
        wanted=len(recorded_workers(row)),
        replicas=tuple(
            ReplicaState(
                replica_id=spec.worker_id,
                placement=_placement(spec, node.node_id),
                ready=worker.state is WorkerState.READY,
                outstanding=told.outstanding // number + (place < told.outstanding % number),
                max_batch=spec.limits.max_batch,
                batches=_batches(spec),
                kv_tokens=spec.limits.kv_tokens,
            )
            for place, (spec, worker) in enumerate(zip(specs, workers, strict=True))
        ),
        moving=False,
        waiting=told.waiting,
        requests_per_s=requests_per_s,
        service_s=service_s,
        idle_s=told.idle_s,
        steady_s=max(0.0, here_s),
        service=None if plan is None else plan.service_of(specs[0].config),
        planned_rate_per_s=None if plan is None or plan.joint is None else plan.joint.rate_per_s,
    )


def _as_planned(spec: WorkerSpec, plan: PlanDocument | None) -> WorkerSpec:
    """Return ``spec`` with as many requests at once as the plan's times are of, where it serves more."""
    planned = spec.limits.max_batch if plan is None else plan.workload.batch
    return replace(spec, limits=replace(spec.limits, max_batch=min(spec.limits.max_batch, planned)))


def _batches(spec: WorkerSpec) -> int:
    return min(len(spec.stages), spec.limits.max_batch) if traits_of(spec.config.engine).fills_stages else 1


def _most_batches(spec: WorkerSpec) -> float:
    """Return the batches under way on average while the worker's longest stage is always busy."""
    layers = [stage.num_layers for stage in spec.stages]
    return min(_batches(spec), sum(layers) / max(layers))


def _recorded_plan(row: DeploymentRow) -> PlanDocument | None:
    """Return the plan; None: there is none, or it is of an iServe of another version."""
    if row.plan is None:
        return None
    try:
        return from_json(row.plan, PlanDocument, what=f"the recorded plan of {row.name}")
    except BadInputError as error:
        log.debug("%s", error)
        return None


def _planned(plan: PlanDocument | None, spec: WorkerSpec) -> EstimateDocument | None:
    """Return the estimate of the whole batch."""
    candidates = () if plan is None else plan.candidates
    return next((one.estimate for one in candidates if one.config == spec.config), None)


def _planned_service_s(plan: PlanDocument | None, spec: WorkerSpec) -> float:
    """Return the seconds of the worker that a request takes while the batch is full; 0: not known."""
    full = _planned(plan, spec)
    return 0.0 if plan is None or full is None else full.e2e_s.value / plan.workload.batch


def _most_busy(spec: WorkerSpec, node: NodeStatus) -> float:
    """Return the batches that can have been under way, as busy as the worker's devices were: each stage runs for
    its layers' share of every one. Of one batch that is the share of the time that the worker was busy.
    """
    seen = {device.device_id: device.load_fraction for device in node.devices}
    layers = sum(stage.num_layers for stage in spec.stages)
    return min(
        min(seen.get(device, 1.0) for device in stage.device_ids) * layers / stage.num_layers
        for stage in spec.stages
    )


def _placement(spec: WorkerSpec, node_id: str) -> Placement:
    first, stages = 0, []
    for stage in spec.stages:
        stages.append(
            StagePlacement(
                node_id=node_id,
                device_ids=stage.device_ids,
                first_layer=first,
                num_layers=stage.num_layers,
                bytes_per_gpu=stage.room_bytes(spec.limits),
            )
        )
        first += stage.num_layers
    return Placement(tuple(stages))


def devices_of(node: NodeStatus) -> tuple[Device, ...]:
    """Return the facts of the devices of ``node`` that do not change."""
    return tuple(
        Device(
            device_id=device.device_id,
            index=device.index,
            kind=device.kind,
            name=device.name,
            total_bytes=device.total_bytes,
            cores=device.cores,
        )
        for device in node.devices
    )
