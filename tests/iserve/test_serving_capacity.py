"""Serving capacity of a default deployment: what it takes beyond the plan, and where it stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.devices import Device
from daemon.engines.registry import capabilities_for
from daemon.engines.vllm.launch import Model, arguments
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from iserve.api_types import DeployBody, VerifyBody
from iserve.model_source import ModelSource
from iserve.planning.document import CapacityBound
from iserve.planning.pipeline import Hardware, PlanOptions, hypothetical_hardware, make_plan
from iserve.planning.serving_capacity import ServingCapacity, promised_bytes, serving_capacity
from iserve.planning.worker_launch import worker_spec
from placement.types import ClusterSnapshot
from planner.intent import Intent, IntentKind, Slo

GIB = 2**30
DEFAULTS = PlanOptions(more_requests=True, longer_requests=True)
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
SPEC = read_spec(LLAMA_8B)
H100 = gpu_spec("h100")
CPU = replace(H100, name="cpu", memory_bytes=32 * GIB, compute_capability=None)


def idle(count: int = 1, *, taken_bytes: int = 0) -> Hardware:
    hardware = hypothetical_hardware(H100, count)
    gpus = (replace(gpu, free_bytes=gpu.total_bytes - taken_bytes) for gpu in hardware.snapshot.gpus)
    return replace(hardware, snapshot=ClusterSnapshot(tuple(gpus)))


def capacity(
    options: PlanOptions = DEFAULTS, hardware: Hardware | None = None, engine: str = "vllm", spec: ModelSpec = SPEC
) -> ServingCapacity:
    hardware = hardware or idle()
    estimator = RooflineEstimator(spec, hardware.gpu)
    tables = [replace(table, unavailable=None) for table in capabilities_for(engine)]
    plan = make_plan(spec, hardware, estimator, tables, options)
    found = serving_capacity(plan, spec, hardware, estimator, options)
    assert found is not None
    return found


def taken_bytes(found: ServingCapacity, hardware: Hardware) -> int:
    free = {gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus}
    return max(promised_bytes(stage, free) for placement in found.placements for stage in placement.stages)


def test_vllm_serves_as_many_and_as_long_requests_as_one_hears_of() -> None:
    work = capacity().workload
    assert (work.batch, work.context_tokens) == (256, 131_072)
    assert (work.input_tokens, work.output_tokens) == (512, 128)  # what the figures are of
    assert work.kv_tokens("vllm") >= 32 * (4000 + 128)  # so many of those run at once


@pytest.mark.parametrize("given", [{"batch": 4}, {"context_tokens": 2048}, {"batch": 3, "context_tokens": 900}])
def test_what_is_given_is_kept(given: dict[str, int]) -> None:
    options = DeployBody(engine="vllm", **given).options(default_policy="hybrid", load_threshold=0.2)  # type: ignore[arg-type]
    work = capacity(options).workload
    assert work.batch == given.get("batch", 256)
    assert work.context_tokens == given.get("context_tokens", 131_072)


def test_the_plan_is_what_it_was() -> None:
    """Ranking and placement compare the planned workload, whatever is served beyond it."""
    tables = [replace(table, unavailable=None) for table in capabilities_for("vllm")]
    plans = [make_plan(SPEC, idle(4), RooflineEstimator(SPEC, H100), tables, o) for o in (DEFAULTS, PlanOptions())]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("body", "batch"),
    [
        (DeployBody(intent=IntentKind.MIN_MEMORY), 1),
        (DeployBody(rate_per_s=0.5), 1),
        (DeployBody(slo=Slo(e2e_s=60), reject_late=True), 1),
        (DeployBody(), 256),
    ],
)
def test_figures_that_are_enforced_keep_the_planned_number_of_requests(body: DeployBody, batch: int) -> None:
    found = capacity(body.options(default_policy="hybrid", load_threshold=0.2)).workload
    assert found.batch == batch
    assert found.context_tokens == (640 if body.intent is IntentKind.MIN_MEMORY else 131_072)


def test_a_check_launches_what_it_predicts() -> None:
    options = VerifyBody().options(default_policy="hybrid", load_threshold=0.2)
    assert capacity(options).workload == Workload()


@pytest.mark.parametrize("taken_gib", [30, 45, 60])
def test_what_is_promised_to_others_is_left_to_them_and_a_part_free(taken_gib: int) -> None:
    """Fewer requests, down to what was planned, fit on a GPU with other workers."""
    hardware = idle(taken_bytes=taken_gib * GIB)
    found, (gpu,) = capacity(hardware=hardware), hardware.snapshot.gpus
    assert found.workload.batch <= capacity().workload.batch
    assert taken_bytes(found, hardware) <= gpu.free_bytes - 0.05 * gpu.total_bytes
    assert found.workload.batch >= 32


def test_where_only_the_plan_has_room_it_is_what_is_served() -> None:
    options = replace(DEFAULTS, intent=Intent(kind=IntentKind.MIN_LATENCY))
    planned = capacity(PlanOptions(intent=options.intent))
    needed = taken_bytes(planned, idle())
    hardware = idle(taken_bytes=H100.memory_bytes - needed - GIB)
    assert capacity(options, hardware).workload == Workload()


def test_a_second_default_deployment_has_room_beside_the_first() -> None:
    first = taken_bytes(capacity(), idle())
    assert capacity(hardware=idle(taken_bytes=first)).workload.batch >= 32


def test_deployments_that_are_expected_have_their_part_left() -> None:
    options = replace(DEFAULTS, intent=Intent(kind=IntentKind.MIN_LATENCY))
    in_all = replace(options, expect=5)
    assert (
        taken_bytes(capacity(in_all), idle())
        <= 0.95 * H100.memory_bytes / 5
        < taken_bytes(capacity(options), idle())
    )


def test_replicas_serve_alike() -> None:
    found = capacity(replace(DEFAULTS, replicas=2), idle(2))
    assert len(found.placements) == 2
    assert found.workload.batch == 256


def test_the_embedded_engine_serves_several_long_requests_with_half_of_the_free_memory() -> None:
    hardware = replace(hypothetical_hardware(CPU, 1), gpu=CPU)
    small = read_spec(LLAMA_8B | {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1024,
                                  "head_dim": 64, "max_position_embeddings": 8192})  # fmt: skip
    found = capacity(hardware=hardware, engine="torch", spec=small)
    assert (found.workload.batch, found.workload.context_tokens) == (8, 8192)
    assert taken_bytes(found, hardware) <= CPU.memory_bytes / 2


def test_what_vllm_is_started_with_fits_what_is_promised(tmp_path: Path) -> None:
    """Weights, the largest step, and the KV cache to the byte."""
    hardware = idle(taken_bytes=40 * GIB)
    estimator = RooflineEstimator(SPEC, H100)
    tables = [replace(table, unavailable=None) for table in capabilities_for("vllm")]
    plan = make_plan(SPEC, hardware, estimator, tables, DEFAULTS)
    found = serving_capacity(plan, SPEC, hardware, estimator, DEFAULTS)
    assert found is not None
    assert plan.best is not None
    free = {gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus}
    source: Any = ModelSource(name="m", directory=tmp_path, spec=SPEC, has_weights=False)
    config = plan.best.config
    worker = worker_spec("m", source, "m-1", config, found.placements[0], Workload(), free, served=found.workload)
    gpu = hardware.snapshot.gpus[0]
    device = Device(device_id=gpu.device_id, index=0, kind="cuda", name=H100.name, total_bytes=gpu.total_bytes)
    model = Model(spec=SPEC, quantized_by="", has_tokenizer=True)
    flags = dict(a[2:].split("=", 1) for a in arguments(worker, model, {gpu.device_id: device}) if "=" in a)
    assert int(flags["max-num-seqs"]) == found.workload.batch >= 32
    assert int(flags["max-model-len"]) == found.workload.context_tokens >= 4128
    memory = estimator.estimate(config, found.workload).memory
    kv_bytes = int(flags["kv-cache-memory-bytes"])
    rest = memory.per_gpu_bytes((SPEC.num_layers,)) - SPEC.num_layers * memory.layer_kv_bytes
    assert rest + kv_bytes <= worker.limits.memory_bytes_per_device <= gpu.free_bytes
    assert int(flags["max-num-batched-tokens"]) == 8192


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (PlanOptions(), CapacityBound.GIVEN),
        (replace(DEFAULTS, intent=Intent(kind=IntentKind.MIN_MEMORY)), CapacityBound.INTENT),
        (PlanOptions(intent=Intent(rate_per_s=0.5), more_requests=True), CapacityBound.RATE),
        (replace(DEFAULTS, intent=Intent(rate_per_s=0.5)), CapacityBound.RATE),
        (DEFAULTS, CapacityBound.LARGEST),
    ],
)
def test_the_capacity_names_what_bounds_it(options: PlanOptions, bound: CapacityBound) -> None:
    assert capacity(options).bound is bound


def test_a_capacity_that_memory_bounds_says_so() -> None:
    assert capacity(hardware=idle(taken_bytes=60 * GIB)).bound is CapacityBound.MEMORY
    options = replace(DEFAULTS, intent=Intent(kind=IntentKind.MIN_LATENCY))
    needed = taken_bytes(capacity(PlanOptions(intent=options.intent)), idle())
    found = capacity(options, idle(taken_bytes=H100.memory_bytes - needed - GIB))
    assert (found.workload, found.bound) == (Workload(), CapacityBound.MEMORY)


class OnlyThePlan(RooflineEstimator):
    """Predictions of the planned workload only."""

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        if workload != Workload():
            raise NotMeasuredError("nothing was measured there")
        return super().estimate(config, workload)


def test_a_capacity_beyond_which_nothing_was_measured_says_so() -> None:
    estimator, hardware = OnlyThePlan(SPEC, H100), idle()
    tables = [replace(table, unavailable=None) for table in capabilities_for("vllm")]
    plan = make_plan(SPEC, hardware, estimator, tables, DEFAULTS)
    found = serving_capacity(plan, SPEC, hardware, estimator, DEFAULTS)
    assert found is not None
    assert (found.workload, found.bound) == (Workload(), CapacityBound.NOT_MEASURED)
