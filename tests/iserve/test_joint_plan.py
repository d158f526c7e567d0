"""Joint plans by datasheet: what they promise, what they refuse, and what the next plan knows of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from daemon.devices import Device
from daemon.engines.registry import get_engine
from daemon.engines.vllm.launch import Model, arguments
from daemon.status import DeviceStatus, NodeStatus, WorkerState, WorkerStatus
from daemon.worker_spec import WorkerSpec
from fingerprint.capability import EngineCapabilities
from fingerprint.codec import from_json, to_json
from fingerprint.config import KvFormat, Workload
from fingerprint.estimates import Estimator
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import parse_gpus
from fingerprint.model_spec import ModelSpec
from iserve.controller.snapshot import hardware_of, serving_on
from iserve.model_source import ModelSource
from iserve.planning.deployability import DeployableDocument
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.document import PlanDocument
from iserve.planning.joint_choice import JointChoice
from iserve.planning.joint_plan import chosen_plan
from iserve.planning.joint_text import joint_lines
from iserve.planning.pipeline import (
    Hardware,
    PlanOptions,
    datasheet_estimator,
    hypothetical_hardware,
    make_plan,
    with_more,
)
from iserve.planning.verdict_text import plan_lines
from iserve.planning.worker_launch import PlannedDeployment
from iserve.route_table import Demand, DeploymentDemand
from iserve.state.store import DeploymentRow
from placement.types import ClusterSnapshot, DeploymentState, ReplicaState
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo
from planner.plan import LimitKind, Plan, Relaxation
from tests.fingerprint.synthetic_machine import CPU

RECORDED = Path(__file__).parents[1] / "fingerprint" / "recorded" / "public_models.json"
PUBLIC = json.loads(RECORDED.read_text(encoding="utf-8"))["models"]
VLLM = replace(get_engine("vllm").capabilities(), unavailable=None)
LLAMA = "meta-llama/Llama-3.1-8B"
MODELS = {
    "dense": LLAMA,
    "states": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "latents": "deepseek-ai/DeepSeek-V2-Lite",
    "window": "mistralai/Mistral-7B-v0.1",
    "windows": "google/gemma-2-9b",
}
KINDS = (IntentKind.MIN_COST, IntentKind.MIN_LATENCY)
GROWING = PlanOptions(more_requests=True, longer_requests=True, more_replicas=True)


@cache
def spec_of(name: str) -> ModelSpec:
    return read_spec(PUBLIC[name]["config"])


def hardware_on(gpus: str, *, taken: float = 0.0) -> Hardware:
    """Return ``gpus``, such as ``h200:4``, with the part ``taken`` of the memory of each in use."""
    hardware = hypothetical_hardware(*parse_gpus(gpus))
    states = (replace(gpu, free_bytes=int((1 - taken) * gpu.total_bytes)) for gpu in hardware.snapshot.gpus)
    return replace(hardware, snapshot=ClusterSnapshot(tuple(states)))


def wish(kind: IntentKind = IntentKind.MIN_COST, rate: float | None = None, **options: object) -> PlanOptions:
    return replace(GROWING, intent=Intent(kind=kind, rate_per_s=rate), **options)  # type: ignore[arg-type]


@cache
def estimator_on(name: str, gpu: GpuSpec) -> RooflineEstimator:
    return datasheet_estimator(spec_of(name), gpu, [VLLM])


def chosen(hardware: Hardware, options: PlanOptions, name: str = LLAMA) -> tuple[Plan, JointChoice | None]:
    spec = spec_of(name)
    return chosen_plan(spec, hardware, estimator_on(name, hardware.gpu), [VLLM.unprepared()], options)


def choice_of(hardware: Hardware, options: PlanOptions, name: str = LLAMA) -> JointChoice:
    plan, choice = chosen(hardware, options, name)
    assert choice is not None
    assert plan.best is not None
    assert plan.best.config == choice.config
    return choice


def devices_of(hardware: Hardware) -> dict[str, Device]:
    return {
        gpu.device_id: Device(
            device_id=gpu.device_id,
            index=gpu.gpu_index,
            kind="cuda",
            name=hardware.gpu.name,
            total_bytes=gpu.total_bytes,
        )
        for gpu in hardware.snapshot.gpus
    }


def source_of(name: str = LLAMA) -> ModelSource:
    return ModelSource(name="chat", directory=Path("/chat"), has_weights=False, spec=spec_of(name))


def planned(hardware: Hardware, options: PlanOptions, name: str = LLAMA) -> PlannedDeployment:
    return planned_deployment(
        source_of(name),
        hardware,
        estimator_on(name, hardware.gpu),
        VLLM,
        options,
        devices=tuple(devices_of(hardware).values()),
        deployable_of=lambda config, replicas: DeployableDocument(here=True),
    )


def workers_of(found: PlannedDeployment, options: PlanOptions, name: str = LLAMA) -> tuple[WorkerSpec, ...]:
    return found.workers("chat", source_of(name), "chat-1", options.workload, None)


def flags_of(worker: WorkerSpec, hardware: Hardware, spec: ModelSpec) -> dict[str, str]:
    model = Model(spec=spec, quantized_by="", has_tokenizer=True)
    given = arguments(worker, model, devices_of(hardware))
    return dict(word[2:].split("=", 1) for word in given if word.startswith("--") and "=" in word)


def held_by(choice: JointChoice) -> Counter[str]:
    """Return how many replicas of ``choice`` are on each device."""
    return Counter(device for placement in choice.placements for device in placement.device_ids)


# --- memory


def fits_what_is_promised(name: str, hardware: Hardware, options: PlanOptions) -> int:
    """Hold each worker's launch against its promise, and all promises against what is free; return the number."""
    found, spec = planned(hardware, options, name), spec_of(name)
    if found.best is None:
        return 0
    assert found.capacity is not None
    free = {gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus}
    promised: Counter[str] = Counter()
    workers = workers_of(found, options, name)
    for worker in workers:
        flags = flags_of(worker, hardware, spec)
        memory = estimator_on(name, hardware.gpu).estimate(worker.config, found.capacity.workload).memory
        layers = tuple(stage.num_layers for stage in worker.stages)
        rest = max(stage.total_bytes - stage.kv_bytes for stage in memory.stages(layers))
        kv_bytes = int(flags["kv-cache-memory-bytes"])
        limit = worker.limits.memory_bytes_per_device
        what = f"{worker.config}: {rest:,} and {kv_bytes:,} bytes of KV cache, promised {limit:,}"
        assert rest + kv_bytes <= limit, f"{what}, {rest + kv_bytes - limit:,} too many"
        for device, size in worker.promised_bytes().items():
            promised[device] += size
        assert int(flags["max-num-seqs"]) == found.capacity.workload.batch >= options.workload.batch
        assert int(flags["max-model-len"]) >= options.workload.context_tokens
    assert all(size <= free[device] for device, size in promised.items()), "promised twice"
    return len(workers)


@pytest.mark.parametrize("taken", [0.0, 0.5])
@pytest.mark.parametrize("gpus", ["h200:4", "a6000:8", "h100:1"])
@pytest.mark.parametrize("name", MODELS.values(), ids=MODELS)
def test_what_vllm_is_started_with_fits_what_is_promised(name: str, gpus: str, taken: float) -> None:
    """Weights, the largest step, and the KV cache to the byte."""
    hardware = hardware_on(gpus, taken=taken)
    for options in (wish(), wish(IntentKind.MIN_LATENCY, 3.0)):
        assert fits_what_is_promised(name, hardware, options)


@pytest.mark.parametrize("taken", [0.0, 0.5])
@pytest.mark.parametrize("gpus", ["a6000:8", "h100:1"])
@pytest.mark.parametrize("name", MODELS.values(), ids=MODELS)
def test_what_vllm_is_started_with_for_long_requests_fits_what_is_promised(
    name: str, gpus: str, taken: float
) -> None:
    """Prompts are longer than the windows of a model that has some."""
    fits_what_is_promised(name, hardware_on(gpus, taken=taken), wish(workload=Workload(1, 6000, 1000)))


@pytest.mark.parametrize(
    "options",
    [
        wish(more_requests=False),
        wish(longer_requests=False),
        wish(more_requests=False, longer_requests=False, workload=Workload(16, 2000, 300)),
        wish(IntentKind.MIN_LATENCY, expect=3),
        wish(IntentKind.MIN_LATENCY, rate=20.0),
        wish(replicas=2, more_replicas=False),
    ],
    ids=["batch", "context", "both", "expect", "fast", "two"],
)
@pytest.mark.parametrize("name", [LLAMA, MODELS["states"], MODELS["windows"]], ids=["dense", "states", "windows"])
def test_what_vllm_is_started_with_under_other_options_fits_what_is_promised(
    name: str, options: PlanOptions
) -> None:
    assert fits_what_is_promised(name, hardware_on("h200:4", taken=0.5), options)


def test_sizes_that_are_given_are_those_of_the_launch() -> None:
    hardware, options = hardware_on("h200:4"), replace(wish(workload=Workload(16, 2000, 300)), more_requests=False)
    options = replace(options, longer_requests=False)
    (worker, *_) = workers_of(planned(hardware, options), options)
    flags = flags_of(worker, hardware, spec_of(LLAMA))
    assert (flags["max-num-seqs"], flags["max-model-len"]) == ("16", "2300")


@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_that_is_full_takes_no_room_from_the_rest(kind: IntentKind) -> None:
    hardware = hardware_on("h200:4")
    first, *rest = hardware.snapshot.gpus
    full = replace(hardware, snapshot=ClusterSnapshot((replace(first, free_bytes=0), *rest)))
    choice = choice_of(full, wish(kind))
    assert first.device_id not in held_by(choice)


# --- rates


def test_a_rate_that_the_gpus_serve_is_feasible() -> None:
    for kind in KINDS:
        plan, choice = chosen(hardware_on("h200:4"), wish(kind, 12.0))
        assert choice is not None
        assert plan.best is not None
        assert choice.forecast.utilisation < 1
        assert choice.rate_per_s == 12.0
        assert plan.served is not None


def relaxation(plan: Plan, limit: LimitKind) -> Relaxation:
    return next(one for one in plan.why_not.relaxations if one.limit is limit)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_that_is_too_high_is_refused_with_one_that_is_served(kind: IntentKind) -> None:
    hardware = hardware_on("h200:4")
    plan, choice = chosen(hardware, wish(kind, 10_000.0))
    assert (plan.best, choice) == (None, None)
    advice = relaxation(plan, LimitKind.RATE)
    assert 12.0 < advice.needed < 10_000.0
    assert choice_of(hardware, wish(kind, advice.needed)).rate_per_s == advice.needed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", ["h200:1", "a6000:2"])
def test_the_rate_as_it_is_advised_is_served(kind: IntentKind, gpus: str) -> None:
    """The option that the advice names has three digits."""
    plan, _ = chosen(hardware_on(gpus), wish(kind, 10_000.0))
    advised = float(relaxation(plan, LimitKind.RATE).text.split()[1])
    choice_of(hardware_on(gpus), wish(kind, advised))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", ["h200:4", "a6000:2"])
def test_the_highest_rate_is_that_of_the_best_plan(kind: IntentKind, gpus: str) -> None:
    """Rates that are higher than the advice by 5% are refused."""
    hardware = hardware_on(gpus)
    highest = relaxation(chosen(hardware, wish(kind, 10_000.0))[0], LimitKind.RATE).needed
    assert chosen(hardware, wish(kind, 1.05 * highest))[1] is None


@pytest.mark.parametrize("rate", [19.0, 22.0, 23.5])
def test_a_rate_that_one_intent_serves_is_refused_by_none(rate: float) -> None:
    """Two A6000 carry 23.8 requests/s as two replicas."""
    kinds = (*KINDS, IntentKind.MIN_GPU_HOURS)
    served = {kind: chosen(hardware_on("a6000:2"), wish(kind, rate))[1] is not None for kind in kinds}
    assert len(set(served.values())) == 1, served


@pytest.mark.parametrize(("kind", "rate"), [*zip(KINDS, (600.0, 330.0), strict=True)])
def test_a_rate_that_more_gpus_serve_is_refused_with_their_number(kind: IntentKind, rate: float) -> None:
    """Four H200s carry 314 requests/s."""
    hardware = hardware_on("h200:4")
    plan, choice = chosen(hardware, wish(kind, rate))
    assert (plan.best, choice) == (None, None)
    advice = relaxation(plan, LimitKind.GPUS)
    assert 4 < advice.needed <= 8
    wider = with_more(hardware, int(advice.needed) - 4)
    assert choice_of(wider, wish(kind, rate)).config == advice.config


def test_a_rate_that_no_number_of_gpus_tried_serves_has_no_advice_to_add_some() -> None:
    plan, _ = chosen(hardware_on("h200:4"), wish(rate=10_000.0))
    assert LimitKind.GPUS not in {one.limit for one in plan.why_not.relaxations}


# --- replicas


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("rate", [None, 12.0])
@pytest.mark.parametrize("kind", [*KINDS, IntentKind.MIN_GPU_HOURS])
def test_a_number_of_replicas_that_is_given_is_kept_each_on_gpus_of_its_own(
    kind: IntentKind, rate: float | None, number: int
) -> None:
    choice = choice_of(hardware_on("h200:4"), wish(kind, rate, replicas=number, more_replicas=False))
    assert len(choice.replicas) == number
    assert set(held_by(choice).values()) == {1}
    assert len(held_by(choice)) == number * choice.config.num_gpus


@pytest.mark.parametrize("rate", [None, 0.5])
def test_more_replicas_than_gpus_are_refused(rate: float | None) -> None:
    plan, choice = chosen(hardware_on("h200:4"), wish(rate=rate, replicas=5, more_replicas=False))
    assert (plan.best, choice) == (None, None)


def test_as_many_replicas_as_the_rate_is_worth_where_none_are_given() -> None:
    few, many = (choice_of(hardware_on("h200:4"), wish(rate=rate)) for rate in (0.5, 100.0))
    assert len(few.replicas) == 1
    assert len(many.replicas) > 1


# --- neighbours and what is expected


def state_of(
    found: PlannedDeployment, options: PlanOptions, *, rate: float, steady_s: float, name: str, model: str = LLAMA
) -> DeploymentState:
    """Return what was planned as a later plan sees it."""
    assert found.document.joint is not None
    assert found.capacity is not None
    workers = workers_of(found, options, model)
    return DeploymentState(
        name=name,
        model=name,
        wanted=len(workers),
        replicas=tuple(
            ReplicaState(
                replica_id=f"{name}-{number}",
                placement=placement,
                ready=True,
                outstanding=0,
                max_batch=worker.limits.max_batch,
                kv_tokens=worker.limits.kv_tokens,
            )
            for number, (worker, placement) in enumerate(zip(workers, found.capacity.placements, strict=True))
        ),
        moving=False,
        waiting=0,
        requests_per_s=rate,
        service_s=0.1,
        idle_s=0.0,
        steady_s=steady_s,
        service=found.document.joint.service,
    )


def after(hardware: Hardware, workers: Iterable[WorkerSpec], state: DeploymentState) -> Hardware:
    """Return ``hardware`` with ``workers`` on it, whose memory is no longer free."""
    taken: Counter[str] = Counter()
    for worker in workers:
        taken.update(worker.promised_bytes())
    snapshot = hardware.snapshot
    gpus = tuple(replace(gpu, free_bytes=gpu.free_bytes - taken[gpu.device_id]) for gpu in snapshot.gpus)
    assert all(gpu.free_bytes >= 0 for gpu in gpus)
    return replace(hardware, snapshot=ClusterSnapshot(gpus, (*snapshot.deployments, state)))


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


@cache
def busy_pair() -> Hardware:
    """Return four GPUs with a busy deployment of two replicas."""
    rate, hardware = 60.0, hardware_on("h200:4")
    options = wish(rate=rate, replicas=2, more_replicas=False)
    found = planned(hardware, options)
    state = state_of(found, options, rate=rate, steady_s=600.0, name="busy")
    return after(hardware, workers_of(found, options), state)


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


# --- latency-slo


def slo_wish(slo: Slo, rate: float | None) -> PlanOptions:
    return replace(GROWING, intent=Intent(kind=IntentKind.LATENCY_SLO, slo=slo, rate_per_s=rate))


@pytest.mark.parametrize(("rate", "times"), [(1.0, 3.0), (6.0, 2.0), (20.0, 3.0), (20.0, 6.0)])
def test_an_slo_at_a_rate_is_kept_with_no_more_gpus_than_the_fastest_plan_holds(rate: float, times: float) -> None:
    """``times``: the SLO over the time of a request alone on one GPU."""
    hardware = hardware_on("h200:4")
    fastest = choice_of(hardware, wish(IntentKind.MIN_LATENCY, rate))
    slo_s = times * choice_of(hardware, wish(rate=rate)).service.alone_s
    choice = choice_of(hardware, slo_wish(Slo(e2e_s=slo_s), rate))
    assert choice.forecast.e2e_s is not None
    assert choice.forecast.e2e_s <= slo_s
    assert choice.forecast.gpus_held <= fastest.forecast.gpus_held + 1e-9


def test_an_slo_that_no_plan_keeps_under_load_has_the_fastest_plan() -> None:
    """At 250 of the 314 requests/s that four H200s carry, a request takes three times as long as alone."""
    hardware, rate = hardware_on("h200:4"), 250.0
    fastest = choice_of(hardware, wish(IntentKind.MIN_LATENCY, rate))
    choice = choice_of(hardware, slo_wish(Slo(e2e_s=2.0 * fastest.service.alone_s), rate))
    assert choice.goal == "latency"
    assert (choice.config, choice.placements) == (fastest.config, fastest.placements)
    assert choice.forecast == fastest.forecast


@pytest.mark.parametrize(
    ("slo", "rate"), [(Slo(ttft_s=1.0), 6.0), (Slo(e2e_s=10.0), None), (Slo(tpot_s=0.1), 6.0)]
)
def test_an_slo_that_one_gpu_keeps_takes_one_gpu(slo: Slo, rate: float | None) -> None:
    choice = choice_of(hardware_on("h200:4"), slo_wish(slo, rate))
    assert choice.goal == "cost"
    assert [len(placement.device_ids) for placement in choice.placements] == [1]


def test_an_slo_that_more_requests_miss_than_may_is_planned_for_the_fastest_and_says_so() -> None:
    """E2E within 1 s of 95% at 20 requests/s, by the roofline's wide interval, is not kept by any plan."""
    hardware = hardware_on("h200:4")
    options = slo_wish(Slo(ttft_s=0.2, e2e_s=1.0), 20.0)
    plan, choice = chosen(hardware, options)
    assert choice is not None
    assert choice.goal == "latency"
    assert plan.served is not None
    assert plan.served.miss_probability is not None
    assert plan.served.miss_probability > 0.05
    said = " ".join(text for _, text in plan_lines(planned(hardware, options).document))
    assert "more than the 0.05 that may; no plan was found that keeps it" in said


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


def test_a_batch_that_is_given_has_room_and_a_larger_one_than_a_joint_plan_knows_is_ranked() -> None:
    hardware = hardware_on("h200:1")
    given = replace(wish(), workload=Workload(batch=64), more_requests=False, longer_requests=False)
    choice = choice_of(hardware, given)
    assert [(one.requests_at_once, one.kv_tokens >= 64 * 640) for one in choice.replicas] == [(64, True)]
    plan, none = chosen(hardware, replace(given, workload=Workload(batch=512)))
    assert none is None
    assert plan.best is not None


def test_gpus_that_are_no_aligned_neighbours_still_make_a_pair() -> None:
    hardware = hardware_on("h200:4")
    middle = tuple(gpu for gpu in hardware.snapshot.gpus if gpu.gpu_index in (1, 2))
    few = replace(hardware, snapshot=ClusterSnapshot(middle))
    exact = wish(IntentKind.MIN_COST)
    exact = replace(exact, intent=replace(exact.intent, quality=Quality.EXACT))
    choice = choice_of(few, exact, "meta-llama/Llama-3.1-70B")
    assert [len(placement.device_ids) for placement in choice.placements] == [2]


# --- what is no joint choice


def is_not_joint(
    hardware: Hardware, estimator: Estimator, tables: list[EngineCapabilities], options: PlanOptions
) -> None:
    spec = spec_of(LLAMA)
    plan, choice = chosen_plan(spec, hardware, estimator, tables, options)
    assert choice is None
    assert plan == make_plan(spec, hardware, estimator, tables, options)


@pytest.mark.parametrize(
    "options",
    [
        *(wish(policy=policy) for policy in ("hybrid", "packing", "least-loaded", "look-ahead")),
        wish(IntentKind.MIN_MEMORY),
        wish(IntentKind.MAX_THROUGHPUT),
        wish(IntentKind.MIN_ENERGY),
        wish(rate=2.0, policy="hybrid", replicas=2),
        replace(GROWING, intent=Intent(cost_model=CostModel.MEMORY)),
        replace(GROWING, intent=Intent(kind=IntentKind.COST_SLO, budget=1e9)),
    ],
)
def test_other_policies_and_intents_have_the_plan_of_one_batch(options: PlanOptions) -> None:
    hardware = hardware_on("h200:4")
    is_not_joint(hardware, estimator_on(LLAMA, hardware.gpu), [VLLM], options)


def test_the_embedded_engine_and_cpus_have_the_plan_of_one_batch() -> None:
    hardware, spec = hardware_on("h200:4"), spec_of(LLAMA)
    embedded = get_engine("torch").capabilities()
    is_not_joint(hardware, datasheet_estimator(spec, hardware.gpu, [embedded]), [embedded], GROWING)
    cpu = replace(CPU, name="cpu", memory_bytes=200 * 2**30)
    on_cpu = hypothetical_hardware(cpu, 1)
    for table in embedded, VLLM:
        is_not_joint(on_cpu, datasheet_estimator(spec, cpu, [table]), [table], GROWING)


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


def test_the_words_of_a_joint_plan_name_the_rate_or_that_none_is_known_and_the_rule() -> None:
    hardware = hardware_on("h200:4")
    known, unknown = said(hardware, wish(rate=12.0)), said(hardware, wish())
    assert "12 requests/s" in known["Under load"]
    assert "no rate is known" not in known["Under load"]
    assert "no rate is known" in unknown["Under load"]
    for lines in known, unknown:
        assert "fewest GPUs that hold it" in lines["The rule"]
        assert "tokens of KV cache" in lines["Under load"]
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


@pytest.mark.parametrize(("for_s", "rates"), [(600.0, 1), (60.0, 0)])
def test_the_next_plan_has_the_service_model_of_a_recorded_one(for_s: float, rates: int) -> None:
    hardware, options = hardware_on("h200:4"), wish(rate=60.0, replicas=2, more_replicas=False)
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
    assert (state.requests_per_s, state.steady_s) == (60.0, for_s)
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
