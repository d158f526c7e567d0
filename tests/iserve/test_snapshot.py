"""Load of a node as a plan sees it, and the deployments that it serves."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from daemon.engines.registry import capabilities_for
from daemon.status import NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConflictError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import load_spec
from fingerprint.gpus import gpu_spec
from iserve.api_documents import NodeDocument
from iserve.controller.check_targets import Targets
from iserve.controller.snapshot import hardware_of, serving_on, without
from iserve.demo import demo_model_path
from iserve.planning.pipeline import PlanOptions, alone_of, hypothetical_hardware, make_plan
from iserve.planning.plan_document import plan_document
from iserve.route_table import Demand, DeploymentDemand
from iserve.state.store import DeploymentRow
from placement.load_model import LoadedCluster
from planner.intent import Intent, Slo
from tests.golden_words import Golden
from tests.iserve.test_profiling_validity import node

GIB = 2**30


def test_only_who_is_there_loads_a_gpu() -> None:
    """A profile that was taken a moment ago has kept the GPU busy and is gone."""
    status = node()
    left, held = (
        replace(device, load_fraction=0.9, free_bytes=free)
        for device, free in zip(status.devices, (48 * GIB - GIB // 2, 40 * GIB), strict=True)
    )
    seen = hardware_of(replace(status, devices=(left, held)), gpu_spec("a6000")).snapshot
    assert [gpu.load_fraction for gpu in seen.gpus] == [0.0, 0.9]


def test_a_cpu_without_a_worker_is_as_loaded_as_when_it_was_profiled() -> None:
    status = node(count=1, driver=None)
    (device,) = status.devices
    cpu = replace(status, devices=(replace(device, kind="cpu", load_fraction=0.9),))
    for num_workers, load in ((0, 0.0), (1, 0.9)):
        document = NodeDocument(
            node_id="n", reachable=True, observed_at=0.0, devices=cpu.devices, num_workers=num_workers
        )
        assert hardware_of(document, gpu_spec("a6000")).snapshot.gpus[0].load_fraction == load
    assert hardware_of(cpu, gpu_spec("a6000")).snapshot.gpus[0].load_fraction == 0.0


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("free_bytes", [2**20, 40 * 2**20])
def test_a_refusal_for_want_of_a_cpus_memory_speaks_of_no_gpu(
    free_bytes: int, replicas: int, golden: Golden
) -> None:
    cpu = replace(gpu_spec("a6000"), name="cpu", compute_capability=None)
    status = node(count=2, driver=None)
    devices = (replace(d, kind="cpu", total_bytes=GIB, free_bytes=free_bytes) for d in status.devices)
    hardware = hardware_of(replace(status, devices=tuple(devices)), cpu)
    spec = load_spec(demo_model_path())
    options = PlanOptions(intent=Intent(slo=Slo(ttft_s=1e-9)), replicas=replicas)
    estimator = RooflineEstimator(spec, cpu)
    plan = make_plan(spec, hardware, estimator, capabilities_for("torch"), options)
    why = plan.why_not
    assert why.nearest is not None
    texts = [
        why.nearest.text,
        *(relaxation.text for relaxation in why.relaxations),
        *(ranked.no_room.reason for ranked in plan.candidates if ranked.no_room is not None),
        *([] if why.combined_relaxation is None else [why.combined_relaxation.text]),
    ]
    golden("controller", texts)
    assert not [text for text in texts if "GPU" in text]


A6000 = gpu_spec("a6000")
CONFIG = DeploymentConfig(tp=1, pp=2, engine="torch")
WORKLOAD = Workload(batch=1, input_tokens=64, output_tokens=16)
NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def row() -> DeploymentRow:
    """Return a row chosen by a plan for requests of 64 tokens in and 16 out, which runs on two GPUs."""
    spec = load_spec(demo_model_path())
    options = PlanOptions(workload=WORKLOAD)
    hardware = hypothetical_hardware(A6000, 2)
    plan = make_plan(spec, hardware, RooflineEstimator(spec, A6000), list(capabilities_for("torch")), options)
    document = plan_document(plan, model="demo", hardware="", workload=WORKLOAD)
    return DeploymentRow(
        id=1, name="chat", created_at=0.0, request="{}", desired="running", phase="ready", error=None,
        plan=to_json(document).decode(), workers=to_json((WORKER,)).decode(),
    )  # fmt: skip


WORKER = WorkerSpec(
    worker_id="chat-1",
    served_model="chat",
    checkpoint="/m",
    config=CONFIG,
    stages=(
        StageAssignment(device_ids=("GPU-0",), num_layers=3),
        StageAssignment(device_ids=("GPU-1",), num_layers=1),
    ),
    limits=WorkerLimits(
        max_batch=1, max_batched_tokens=128, max_context_tokens=80, memory_bytes_per_device=GIB, kv_tokens=80
    ),
)


def running(*, for_s: float, busy: float) -> NodeStatus:
    status = node()
    worker = WorkerStatus(
        spec=WORKER,
        state=WorkerState.READY,
        url="",
        pid=1,
        restarts=0,
        started_at=datetime.fromtimestamp(NOW - for_s, UTC).isoformat(),
    )
    devices = tuple(replace(device, load_fraction=busy) for device in status.devices)
    return replace(status, observed_at=NOW, devices=devices, workers=(worker,))


def told(requests_per_s: float | None, name: str = "chat", *, waiting: int = 0, outstanding: int = 1) -> Demand:
    one = DeploymentDemand(
        name=name, waiting=waiting, outstanding=outstanding, idle_s=0.0, requests_per_s=requests_per_s
    )
    return Demand(routes_version=1, deployments=(one,))


def planned_s(row: DeploymentRow) -> float:
    """Return the planned time by the roofline."""
    estimate = RooflineEstimator(load_spec(demo_model_path()), A6000).estimate(CONFIG, WORKLOAD)
    return estimate.e2e_s.value


def test_a_plan_is_told_who_serves_where_and_how_often_it_is_called(row: DeploymentRow) -> None:
    status = running(for_s=1.0, busy=0.0)
    (state,) = serving_on(status, [row], told(0.25, waiting=3))
    assert (state.name, state.requests_per_s, state.waiting) == ("chat", 0.25, 3)
    assert state.service_s == pytest.approx(planned_s(row))
    (replica,) = state.replicas
    stages = [(s.device_ids, s.first_layer, s.num_layers) for s in replica.placement.stages]
    assert stages == [(("GPU-0",), 0, 3), (("GPU-1",), 3, 1)]
    snapshot = hardware_of(status, A6000, (state,)).snapshot
    asked = 0.25 * state.service_s
    loads = LoadedCluster.of(snapshot).loads
    assert loads == {("n", "GPU-0"): pytest.approx(0.75 * asked), ("n", "GPU-1"): pytest.approx(0.25 * asked)}


def test_requests_that_are_shorter_than_planned_take_what_was_seen(row: DeploymentRow) -> None:
    """After 120 s: stages of three layers and one, whose GPUs were busy for 3% of the time at most."""
    rate = 0.5 / planned_s(row)
    (fresh,) = serving_on(running(for_s=119.0, busy=0.03), [row], told(rate))
    assert fresh.busy_fraction == pytest.approx(0.5)
    (state,) = serving_on(running(for_s=121.0, busy=0.03), [row], told(rate))
    assert state.busy_fraction == pytest.approx(0.03 * 4 / 3)


@pytest.mark.parametrize(
    ("for_s", "busy", "waiting", "planned", "expected"),
    [
        (300.0, 0.3, 0, 3.0, 0.4),  # shorter than planned, and it keeps up
        (300.0, 0.3, 1, 3.0, 1.0),  # has only begun to queue
        (300.0, 0.3, 1, 0.7, 0.7),
        (300.0, 0.75, 9, 3.0, 3.0),  # always busy, and queues: how much is asked of it was not seen
        (300.0, 0.75, 0, 3.0, 1.0),
        (10.0, 0.3, 9, 3.0, 1.0),  # a worker that was just started, or a daemon that has just begun to look
        (300.0, 0.0, 0, 3.0, 1.0),
    ],
)
def test_what_is_asked_is_bounded_by_what_was_seen_of_a_worker_that_keeps_up(
    row: DeploymentRow, for_s: float, busy: float, waiting: int, planned: float, expected: float
) -> None:
    """``planned``: busy for so much of its time, were all requests as long as planned for."""
    rate = planned / planned_s(row)
    (state,) = serving_on(running(for_s=for_s, busy=busy), [row], told(rate, waiting=waiting))
    assert state.busy_fraction == pytest.approx(expected)


def test_where_the_rate_is_not_told_only_the_load_is_seen(row: DeploymentRow) -> None:
    status = running(for_s=300.0, busy=0.4)
    stopped = replace(status, workers=(replace(status.workers[0], state=WorkerState.STOPPING),))
    for seen, rows, demand in (
        (status, [row], None),
        (status, [row], told(None)),
        (status, [row], told(1.0, name="another")),
        (stopped, [row], told(1.0)),
        (status, [replace(row, workers=None)], told(1.0)),
    ):
        assert serving_on(seen, rows, demand) == ()
    (unknown,) = serving_on(status, [replace(row, plan='{"of": "another version"}')], told(1.0))
    assert not unknown.is_work_known
    assert {gpu.load_fraction for gpu in hardware_of(status, A6000, (unknown,)).snapshot.gpus} == {0.4}


BATCH = Workload(batch=8, input_tokens=64, output_tokens=16)
BATCHES = replace(WORKER, limits=replace(WORKER.limits, max_batch=8))


@pytest.fixture(scope="module")
def batching() -> DeploymentRow:
    return planned_for_eight(BATCHES)


def planned_for_eight(worker: WorkerSpec) -> DeploymentRow:
    """Return a row that was planned for eight requests at once, whose plan gives one as well."""
    spec, config = load_spec(demo_model_path()), worker.config
    estimator, options = RooflineEstimator(spec, A6000), PlanOptions(workload=BATCH)
    runs = [replace(table, unavailable=None) for table in capabilities_for(config.engine)]
    plan = make_plan(spec, hypothetical_hardware(A6000, 2), estimator, runs, options)
    alone = alone_of(estimator, config, BATCH)
    document = plan_document(plan, model="demo", hardware="", workload=BATCH, alone=alone)
    return DeploymentRow(
        id=1, name="chat", created_at=0.0, request="{}", desired="running", phase="ready", error=None,
        plan=to_json(document).decode(), workers=to_json((worker,)).decode(),
    )  # fmt: skip


def as_batching(status: NodeStatus, spec: WorkerSpec = BATCHES) -> NodeStatus:
    """The worker takes eight, and has what it was promised."""
    (worker,) = status.workers
    devices = tuple(replace(device, free_bytes=device.total_bytes - GIB) for device in status.devices)
    return replace(status, devices=devices, workers=(replace(worker, spec=spec),))


def test_the_service_of_a_worker_is_by_the_times_of_one_request_and_of_a_batch(batching: DeploymentRow) -> None:
    (state,) = serving_on(as_batching(running(for_s=1.0, busy=0.0)), [batching], told(0.25))
    estimator = RooflineEstimator(load_spec(demo_model_path()), A6000)
    one, full = estimator.estimate(CONFIG, replace(BATCH, batch=1)), estimator.estimate(CONFIG, BATCH)
    assert state.service is not None
    assert state.service.alone_s == pytest.approx(one.e2e_s.value)
    assert state.service.step_of(8) == pytest.approx(full.tpot_s.value)
    assert state.service.prompts_s(8 * BATCH.input_tokens) == pytest.approx(full.ttft_s.value)
    assert state.service.largest_batch == 8
    assert [replica.batches for replica in state.replicas] == [1]  # the embedded engine waits for a batch


def test_a_gpu_is_as_loaded_as_it_was_seen_to_be_while_anything_holds_memory(batching: DeploymentRow) -> None:
    status = as_batching(running(for_s=60.0, busy=0.5))
    empty = tuple(replace(device, free_bytes=device.total_bytes) for device in status.devices)
    for seen, load in ((status, 0.5), (replace(status, devices=empty), 0.0)):
        serving = serving_on(seen, [batching], told(0.0, outstanding=0))
        assert {gpu.load_fraction for gpu in hardware_of(seen, A6000, serving).snapshot.gpus} == {load}


@pytest.mark.parametrize(
    ("requests_per_s", "outstanding", "waiting", "seen"),
    [(0.0, 0, 0, 0.0), (0.0, 1, 0, 0.5), (0.0, 0, 1, 0.5), (1e-6, 0, 0, 0.5)],
)
def test_on_a_cpu_a_worker_that_nobody_calls_is_not_busy(
    batching: DeploymentRow, requests_per_s: float, outstanding: int, waiting: int, seen: float
) -> None:
    """The worker is idle whatever else holds memory, unless there is a worker of unknown demand."""
    status = as_batching(running(for_s=60.0, busy=0.5))
    cpus = tuple(replace(device, kind="cpu", free_bytes=GIB) for device in status.devices)
    status = replace(status, devices=cpus)
    demand = told(requests_per_s, outstanding=outstanding, waiting=waiting)
    serving = serving_on(status, [batching], demand)
    loads = {gpu.load_fraction for gpu in hardware_of(status, A6000, serving).snapshot.gpus}
    assert loads == {seen}
    stranger = replace(status.workers[0], spec=replace(BATCHES, worker_id="profile-1"))
    both = replace(status, workers=(*status.workers, stranger))
    assert {gpu.load_fraction for gpu in hardware_of(both, A6000, serving).snapshot.gpus} == {0.5}


@pytest.mark.parametrize("layers", [(2, 2), (3, 1)])
@pytest.mark.parametrize("busy", [0.3, 0.48, 0.6, 0.9, 0.97])
def test_a_pipeline_that_keeps_its_stages_full_is_as_busy_as_its_longest_stage(
    layers: tuple[int, int], busy: float
) -> None:
    """The pipeline can take more requests although one of two stages is busy for half of the time.

    As many batches are under way as there are stages. Beyond 95% of the longest stage's time the load is unknown.
    """
    first, second = layers
    stages = tuple(replace(stage, num_layers=number) for stage, number in zip(BATCHES.stages, layers, strict=True))
    pipeline = replace(BATCHES, config=replace(CONFIG, engine="vllm"), stages=stages)
    row, number = planned_for_eight(pipeline), first + second
    status = as_batching(running(for_s=300.0, busy=busy), pipeline)
    loads = (busy, busy * second / first)
    devices = tuple(replace(d, load_fraction=load) for d, load in zip(status.devices, loads, strict=True))
    (state,) = serving_on(replace(status, devices=devices), [row], told(1e5))
    assert [replica.batches for replica in state.replicas] == [2]
    known = busy < 0.95
    assert state.busy_fraction * first / number == pytest.approx(busy if known else 1.0)


def test_a_pipeline_that_takes_one_request_has_one_batch_under_way() -> None:
    pipeline = replace(WORKER, config=replace(CONFIG, engine="vllm"))
    row = planned_for_eight(pipeline)
    status = running(for_s=10.0, busy=0.3)
    status = replace(status, workers=(replace(status.workers[0], spec=pipeline),))
    (state,) = serving_on(status, [row], told(1e5))
    assert [replica.batches for replica in state.replicas] == [1]
    assert state.busy_fraction == pytest.approx(1.0)


def test_a_worker_that_has_the_id_of_a_recorded_one_is_not_taken_for_it(row: DeploymentRow) -> None:
    """Ids repeat after a state was restored; the port is chosen at each start."""
    status = running(for_s=3600, busy=0.5)
    (worker,) = status.workers
    moved = replace(status, workers=(replace(worker, spec=replace(WORKER, port=4711)),))
    other = replace(status, workers=(replace(worker, spec=replace(WORKER, checkpoint="/another")),))
    assert [len(serving_on(seen, [row], told(0.1))) for seen in (status, moved, other)] == [1, 1, 0]
    free_bytes = [
        sum(device.free_bytes for device in without(seen, [WORKER]).devices) for seen in (status, moved, other)
    ]
    assert free_bytes[0] == free_bytes[1] > free_bytes[2] == sum(device.free_bytes for device in status.devices)
    assert [len(without(seen, [WORKER]).workers) for seen in (status, moved, other)] == [0, 0, 1]


def test_a_check_of_a_deployment_takes_its_own_worker(
    row: DeploymentRow, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    nothing: Any = None
    targets = Targets(nothing, nothing, nothing, nothing, nothing, nothing)
    status = running(for_s=3600, busy=0.5)
    monkeypatch.setattr(targets, "_node", lambda: status)
    assert targets._first_ready(row).spec == WORKER
    (worker,) = status.workers
    status = replace(status, workers=(replace(worker, spec=replace(WORKER, checkpoint="/another")),))
    with golden.raises("controller", ConflictError):
        targets._first_ready(row)
