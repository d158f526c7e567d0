"""Joint plans next to what runs, in words and documents, and as the next plan knows them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product

import pytest

from daemon.status import DeviceStatus, NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import from_json, to_json
from fingerprint.config import KvFormat
from iserve.controller.snapshot import hardware_of, serving_on
from iserve.planning.document import PlanDocument
from iserve.planning.joint_text import joint_lines
from iserve.planning.pipeline import (
    Hardware,
    PlanOptions,
)
from iserve.route_table import Demand, DeploymentDemand
from iserve.state.store import DeploymentRow
from placement.types import ClusterSnapshot, DeploymentState, Placement, ReplicaState, StagePlacement
from planner.intent import IntentKind
from tests.golden_words import Golden
from tests.iserve.joint_plans import (
    KINDS,
    LLAMA,
    MODELS,
    after,
    busy_pair,
    choice_of,
    hardware_on,
    held_by,
    planned,
    state_of,
    wish,
    workers_of,
)

# --- neighbours and what is expected


@pytest.mark.parametrize(
    ("kind", "steady_s"),
    [(IntentKind.MIN_COST, 0.0), (IntentKind.MIN_LATENCY, 600.0), (IntentKind.MIN_GPU_HOURS, 0.0)],
)
@pytest.mark.parametrize(
    ("gpus", "name", "number"),
    [
        ("h200:4", LLAMA, 6),
        ("h200:2", MODELS["states"], 3),
        ("h200:4", "meta-llama/Llama-3.1-70B", 4),
        ("h100:1", LLAMA, 3),
    ],
)
def test_as_many_as_are_expected_all_find_a_place(
    gpus: str, name: str, number: int, kind: IntentKind, steady_s: float
) -> None:
    hardware, options = hardware_on(gpus), wish(kind, expect=number)
    for row in range(number):
        found = planned(hardware, options, name)
        assert found.best is not None, f"number {row} is refused"
        assert found.document.joint is not None, f"number {row} has no joint choice"
        state = state_of(found, options, rate=0.2, steady_s=steady_s, name=f"m{row}", model=name)
        hardware = after(hardware, workers_of(found, options, name), state)


@pytest.mark.parametrize("rate", [None, 12.0])
@pytest.mark.parametrize("kind", [*KINDS, IntentKind.MIN_GPU_HOURS])
def test_next_to_a_busy_neighbour_a_new_one_goes_to_idle_gpus(kind: IntentKind, rate: float | None) -> None:
    hardware = busy_pair()
    (busy,) = hardware.snapshot.deployments
    there = {device for replica in busy.replicas for device in replica.placement.device_ids}
    assert len(there) == 2
    choice = choice_of(hardware, wish(kind, rate))
    assert there.isdisjoint(held_by(choice))
    assert (choice.neighbours, choice.neighbour_rates) == (1, 1)
    assert choice.forecast.slowdown == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_that_was_counted_for_less_than_two_minutes_is_not_known(kind: IntentKind) -> None:
    hardware = busy_pair()
    (busy,) = hardware.snapshot.deployments
    fresh = replace(hardware.snapshot, deployments=(replace(busy, steady_s=60.0),))
    choice = choice_of(replace(hardware, snapshot=fresh), wish(kind))
    assert (choice.neighbours, choice.neighbour_rates) == (1, 0)


def test_the_memory_of_neighbours_is_never_promised_again() -> None:
    """Deployments are added until one more is refused, or has no joint choice."""
    hardware, options, number = hardware_on("h200:2"), wish(rate=2.0), 0
    while (found := planned(hardware, options)).best is not None and number < 12:
        if found.document.joint is None:
            break
        free = {gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus}
        workers = workers_of(found, options)
        for worker in workers:
            assert all(size <= free[device] for device, size in worker.promised_bytes().items())
        state = state_of(found, options, rate=2.0, steady_s=600.0, name=f"m{number}")
        hardware, number = after(hardware, workers, state), number + 1
    assert number >= 4


def shared_by(tps: list[int], gpus: str = "h200:2") -> Hardware:
    """Return GPUs of which the first hold a worker of each TP degree, with half of the memory free."""
    hardware = hardware_on(gpus)
    devices = tuple(replace(gpu, free_bytes=gpu.total_bytes // 2) for gpu in hardware.snapshot.gpus)

    def state(number: int, tp: int) -> DeploymentState:
        stage = StagePlacement(
            node_id=devices[0].node_id,
            device_ids=tuple(gpu.device_id for gpu in devices[:tp]),
            first_layer=0,
            num_layers=32,
            bytes_per_gpu=2**30,
        )
        replica = ReplicaState(
            replica_id=f"m{number}-0", placement=Placement((stage,)), ready=True, outstanding=0, max_batch=1
        )
        return DeploymentState(
            name=f"m{number}", model="m", wanted=1, replicas=(replica,), moving=False, waiting=0,
            requests_per_s=0.0, service_s=0.0, idle_s=0.0, steady_s=0.0,
        )  # fmt: skip

    states = tuple(state(number, tp) for number, tp in enumerate(tps))
    return replace(hardware, snapshot=ClusterSnapshot(devices, states))


@pytest.mark.parametrize(
    ("there", "crowded"), [([], False), ([2], False), ([1, 1], True), ([2, 2], True), ([1, 2], True)]
)
def test_a_plan_by_another_policy_says_where_it_crowds_a_tp_group(there: list[int], crowded: bool) -> None:
    options = wish(IntentKind.MIN_LATENCY, policy="least-loaded")
    found = planned(shared_by(there), options, "meta-llama/Llama-3.1-70B")
    assert found.best is not None
    assert found.best.config.tp == 2
    notes = [note for note in found.document.notes if "tensor-parallel" in note]
    assert len(notes) == crowded
    if crowded:
        assert "GPU 0 of plan" in notes[0]
        assert ("GPU 1 of plan" in notes[0]) == (there == [2, 2])


def test_crowds_elsewhere_are_no_matter_of_a_plan_and_a_joint_one_is_not_sent_to_itself() -> None:
    four, options = shared_by([2, 2, 2], "h200:4"), wish(IntentKind.MIN_LATENCY, policy="least-loaded")
    elsewhere = replace(
        four.snapshot,
        gpus=tuple(replace(gpu, free_bytes=gpu.free_bytes * (n > 1)) for n, gpu in enumerate(four.snapshot.gpus)),
    )
    found = planned(replace(four, snapshot=elsewhere), options, "meta-llama/Llama-3.1-70B")
    assert found.capacity is not None
    assert set(found.capacity.placements[0].device_ids) == {gpu.device_id for gpu in four.snapshot.gpus[2:]}
    assert not [note for note in found.document.notes if "tensor-parallel" in note]
    jointly = planned(shared_by([2, 2]), wish(IntentKind.MIN_LATENCY), "meta-llama/Llama-3.1-70B")
    assert jointly.document.joint is not None
    (note,) = (note for note in jointly.document.notes if "tensor-parallel" in note)
    assert "--policy" not in note


def test_a_joint_plan_counts_with_the_loss_of_crowds_that_it_is_given() -> None:
    large, options = "meta-llama/Llama-3.1-70B", wish(IntentKind.MIN_LATENCY, 0.05)
    crowd = shared_by([2, 2])
    first = planned(shared_by([]), options, large).document.joint
    assert first is not None
    busy = tuple(
        replace(one, service=first.service, requests_per_s=0.2, steady_s=600.0)
        for one in crowd.snapshot.deployments
    )
    hardware = replace(crowd, snapshot=replace(crowd.snapshot, deployments=busy))
    lossy, lossless = (choice_of(hardware, replace(options, group_loss=loss), large) for loss in (5.6, 1.0))
    assert lossy.config.tp == lossless.config.tp == 2
    assert lossy.forecast.slowdown > 1.2 * lossless.forecast.slowdown > 1.2


def test_a_rate_next_to_a_neighbour_of_unknown_rate_is_judged_as_it_is() -> None:
    """Refusals next to one whose rate is not known yet are those next to a known one."""
    options = wish(IntentKind.MIN_LATENCY, 12.0)
    alone = choice_of(hardware_on("h200:4"), options)
    beside = choice_of(busy_pair(), options)
    assert beside.forecast.utilisation <= 3 * alone.forecast.utilisation < 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_holds_something_unknown_is_left_for_an_empty_one(kind: IntentKind) -> None:
    """A deployment that was started a moment ago is in no report yet, its memory is."""
    hardware = hardware_on("h200:4")
    first, *rest = hardware.snapshot.gpus
    held = replace(first, free_bytes=first.free_bytes - 60 * 2**30)
    choice = choice_of(replace(hardware, snapshot=ClusterSnapshot((held, *rest))), wish(kind))
    assert first.device_id not in {device for one in choice.placements for device in one.device_ids}


# --- documents and words


@pytest.mark.parametrize(("kind", "rate"), [*product(KINDS, (None, 12.0))])
def test_the_document_of_a_joint_plan_is_read_as_it_was_written(kind: IntentKind, rate: float | None) -> None:
    hardware = busy_pair()
    document = planned(hardware, wish(kind, rate)).document
    choice = choice_of(hardware, wish(kind, rate))
    joint = document.joint
    assert joint is not None
    assert from_json(to_json(document), PlanDocument, what="plan") == document
    assert (joint.goal, joint.rate_per_s, joint.neighbours) == (choice.goal, rate, 1)
    assert joint.kv_tokens == tuple(replica.kv_tokens for replica in choice.replicas)
    assert (joint.forecast, joint.rule, joint.service) == (choice.forecast, choice.rule, choice.service)
    assert document.replicas == len(choice.replicas) == joint.forecast.replicas
    assert bool(joint.utilisations) == (rate is None)


def said(hardware: Hardware, options: PlanOptions) -> dict[str, str]:
    joint = planned(hardware, options).document.joint
    assert joint is not None
    return dict(joint_lines(joint))


def test_the_words_of_a_joint_plan_name_the_rate_or_that_none_is_known_and_the_rule(golden: Golden) -> None:
    hardware = hardware_on("h200:4")
    known, unknown = said(hardware, wish(rate=12.0)), said(hardware, wish())
    assert "12 requests/s" in known["Under load"]
    assert "no rate is known" not in known["Under load"]
    golden("controller", unknown["Under load"])
    for lines in known, unknown:
        golden("controller", lines["The rule"])
        golden("controller", lines["Under load"])
        assert "" not in lines


def test_the_words_of_a_joint_plan_name_the_neighbours() -> None:
    assert "1 deployment that runs" in said(busy_pair(), wish(rate=1.0))[""]


def test_the_rule_is_another_plan_where_the_fastest_takes_more_gpus() -> None:
    hardware, options = hardware_on("h200:4"), wish(IntentKind.MIN_LATENCY, 20.0)
    choice, words = choice_of(hardware, options), said(hardware, options)["The rule"]
    assert not choice.is_rule
    assert choice.rule.e2e_s is not None
    assert choice.forecast.e2e_s is not None
    assert choice.forecast.e2e_s < choice.rule.e2e_s
    assert choice.rule.replicas == 1
    assert f"tp={choice.rule.config.tp}, 1 replica" in words


# --- the controller

NOW = 1_800_000_000.0


def node_of(hardware: Hardware, workers: tuple[WorkerSpec, ...], *, for_s: float) -> NodeStatus:
    taken: Counter[str] = Counter()
    for worker in workers:
        taken.update(worker.promised_bytes())
    return NodeStatus(
        node_id="plan",
        observed_at=NOW,
        driver="570.86",
        devices=tuple(
            DeviceStatus(
                device_id=gpu.device_id,
                index=gpu.gpu_index,
                kind="cuda",
                name=hardware.gpu.name,
                total_bytes=gpu.total_bytes,
                free_bytes=gpu.total_bytes - taken[gpu.device_id],
                load_fraction=0.9 if taken[gpu.device_id] else 0.0,
            )
            for gpu in hardware.snapshot.gpus
        ),
        workers=tuple(
            WorkerStatus(
                spec=worker,
                state=WorkerState.READY,
                url="",
                pid=1,
                restarts=0,
                started_at=datetime.fromtimestamp(NOW - for_s, UTC).isoformat(),
            )
            for worker in workers
        ),
    )


@pytest.mark.parametrize(
    ("for_s", "rate", "rates"), [(600.0, 60.0, 1), (600.0, None, 1), (60.0, 60.0, 1), (60.0, None, 0)]
)
def test_the_next_plan_has_the_service_model_and_rate_of_a_recorded_one(
    for_s: float, rate: float | None, rates: int
) -> None:
    """The rate that it was planned for counts until its own was counted for 120 s."""
    hardware, options = hardware_on("h200:4"), wish(rate=rate, replicas=2, more_replicas=False)
    found = planned(hardware, options)
    workers = workers_of(found, options)
    row = DeploymentRow(
        id=1, name="chat", created_at=0.0, request="{}", desired="running", phase="ready", error=None,
        plan=to_json(found.document).decode(), workers=to_json(workers).decode(),
    )  # fmt: skip
    asked = DeploymentDemand(name="chat", waiting=0, outstanding=3, idle_s=0.0, requests_per_s=60.0)
    status = node_of(hardware, workers, for_s=for_s)
    (state,) = serving_on(status, [row], Demand(routes_version=1, deployments=(asked,)))
    assert found.document.joint is not None
    assert state.service == found.document.joint.service
    assert [replica.kv_tokens for replica in state.replicas] == [worker.limits.kv_tokens for worker in workers]
    assert (state.requests_per_s, state.steady_s, state.planned_rate_per_s) == (60.0, for_s, rate)
    choice = choice_of(hardware_of(status, hardware.gpu, (state,)), wish(IntentKind.MIN_LATENCY))
    assert (choice.neighbours, choice.neighbour_rates) == (1, rates)
    there = {device for worker in workers for stage in worker.stages for device in stage.device_ids}
    assert there.isdisjoint(held_by(choice))


def test_a_plan_of_another_configuration_gives_no_service_model() -> None:
    hardware, options = hardware_on("h200:4"), wish(rate=2.0)
    found = planned(hardware, options)
    (worker,) = workers_of(found, options)
    assert worker.config.kv is not KvFormat.BITS16
    other = replace(worker, config=replace(worker.config, kv=KvFormat.BITS16))
    row = DeploymentRow(
        id=1, name="chat", created_at=0.0, request="{}", desired="running", phase="ready", error=None,
        plan=to_json(found.document).decode(), workers=to_json((other,)).decode(),
    )  # fmt: skip
    asked = DeploymentDemand(name="chat", waiting=0, outstanding=0, idle_s=0.0, requests_per_s=2.0)
    status = node_of(hardware, (other,), for_s=600.0)
    (state,) = serving_on(status, [row], Demand(routes_version=1, deployments=(asked,)))
    assert state.service is None


@pytest.mark.parametrize("held", [0.0, 0.5])
@pytest.mark.parametrize("rate", [None, 1.0])
@pytest.mark.parametrize("kind", [*KINDS, IntentKind.MIN_GPU_HOURS])
def test_a_gpu_that_something_unknown_keeps_busy_is_left_for_an_idle_one(
    kind: IntentKind, rate: float | None, held: float
) -> None:
    """The rule takes the idlest GPUs, and three are idle; ``held``: part of its memory."""
    hardware = hardware_on("h200:4")
    first, *rest = hardware.snapshot.gpus
    busy = replace(first, load_fraction=0.9, free_bytes=int((1 - held) * first.total_bytes))
    choice = choice_of(replace(hardware, snapshot=ClusterSnapshot((busy, *rest))), wish(kind, rate))
    assert choice.neighbours == 0
    assert first.device_id not in held_by(choice)
