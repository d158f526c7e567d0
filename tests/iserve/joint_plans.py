"""Joint plans of public models on datasheet GPUs, for the tests of several modules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from daemon.devices import Device
from daemon.engines.registry import get_engine
from daemon.engines.vllm.launch import Model, arguments
from daemon.worker_spec import WorkerSpec
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import parse_gpus
from fingerprint.model_spec import ModelSpec
from iserve.model_source import ModelSource
from iserve.planning.deployability import DeployableDocument
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.joint_choice import JointChoice
from iserve.planning.joint_plan import chosen_plan
from iserve.planning.pipeline import (
    Hardware,
    PlanOptions,
    datasheet_estimator,
    hypothetical_hardware,
)
from iserve.planning.worker_launch import PlannedDeployment
from placement.types import ClusterSnapshot, DeploymentState, ReplicaState
from planner.intent import Intent, IntentKind
from planner.plan import Plan

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


@cache
def busy_pair() -> Hardware:
    """Return four GPUs with a busy deployment of two replicas."""
    rate, hardware = 60.0, hardware_on("h200:4")
    options = wish(rate=rate, replicas=2, more_replicas=False)
    found = planned(hardware, options)
    state = state_of(found, options, rate=rate, steady_s=600.0, name="busy")
    return after(hardware, workers_of(found, options), state)


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
