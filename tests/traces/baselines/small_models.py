"""Models and GPUs small enough to follow by hand: bytes below a hundred, steps of whole seconds."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.estimates import Estimate, MemoryEstimate, Quantity, Source
from placement.types import ClusterSnapshot, GpuState, Placement
from tests.fingerprint.step_timed_machine import llama_7b
from traces.baselines.model_info import Knowledge
from traces.simulator.step_model import Limits

LAYERS = 8
GPU_BYTES = 100
DEGREES = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2))


class ByHand:
    """``weight_bytes`` divided over the GPUs, ``kv_bytes`` of a sequence too; a step takes ``step_s / tp``."""

    name = "by hand"

    def __init__(self, weight_bytes: int, step_s: float, kv_bytes: int) -> None:
        self.weight_bytes, self.step_s, self.kv_bytes = weight_bytes, step_s, kv_bytes

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        step_s = self.step_s / config.tp
        quantity = Quantity(step_s, step_s, step_s, Source.ROOFLINE)
        narrow = 2 if config.weights is WeightFormat.INT8 else 1
        memory = MemoryEstimate(
            tp=config.tp,
            pp=config.pp,
            num_layers=LAYERS,
            layer_weight_bytes=self.weight_bytes // (LAYERS * config.tp * narrow),
            layer_kv_bytes=workload.batch * self.kv_bytes // (LAYERS * config.tp),
            first_stage_bytes=0,
            last_stage_bytes=0,
            activation_bytes=0,
            pp_buffer_bytes=0,
            runtime_bytes=0,
            relative_error=0.0,
            source=Source.ROOFLINE,
        )
        return Estimate(config=config, workload=workload, memory=memory, ttft_s=quantity, tpot_s=quantity)


def limits_of(workload: Workload, _engine: str) -> Limits:
    return Limits(max_batch=workload.batch, max_context_tokens=64, max_batched_tokens=max(64, workload.batch))


def known(
    name: str,
    weight_bytes: int = 64,
    step_s: float = 1.0,
    *,
    kv_bytes: int = 0,
    degrees: tuple[tuple[int, int], ...] = DEGREES,
    weights: tuple[WeightFormat, ...] = (WeightFormat.BITS16,),
) -> Knowledge:
    return Knowledge(
        name=name,
        spec=llama_7b(LAYERS),
        estimator=ByHand(weight_bytes, step_s, kv_bytes),
        workload=Workload(batch=1, input_tokens=32, output_tokens=32),
        configs=tuple(DeploymentConfig(tp=tp, pp=pp, weights=w) for tp, pp in degrees for w in weights),
        limits=limits_of,
    )


def batched(model: Knowledge, batch: int) -> Knowledge:
    return replace(model, workload=replace(model.workload, batch=batch))


def cluster(num_gpus: int, *, per_node: int = 8, size_bytes: int = GPU_BYTES) -> ClusterSnapshot:
    return ClusterSnapshot(
        tuple(
            GpuState(
                device_id=f"gpu{i}",
                node_id=f"node{i // per_node}",
                gpu_index=i % per_node,
                total_bytes=size_bytes,
                free_bytes=size_bytes,
            )
            for i in range(num_gpus)
        )
    )


def bytes_on(*placements: Placement) -> dict[str, int]:
    """Promised on each device."""
    total: dict[str, int] = {}
    for placement in placements:
        for stage in placement.stages:
            for device in stage.device_ids:
                total[device] = total.get(device, 0) + stage.bytes_per_gpu
    return total
