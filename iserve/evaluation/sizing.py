"""Memory and launch limits of replicas that share GPUs: for a given batch, or a fair share of what is free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import MemoryEstimate
from fingerprint.weight_bytes import kv_token_bytes_per_gpu
from iserve.evaluation.situation import Asked, Replica, Situation
from iserve.planning.serving_capacity import served_memory
from iserve.simulation.running import launch_limits
from placement.fit import demand
from placement.types import GpuState, Placement, StagePlacement
from traces.simulator.step_model import Limits

__all__ = ["FULL_BATCH", "USABLE_FRACTION", "Spot", "least_bytes", "planned_bytes", "size_together"]

FULL_BATCH = 256  # requests at once of a replica that takes all free memory: vLLM's default on small GPUs
USABLE_FRACTION = 0.95  # of a GPU's memory
_PARTLY_EMPTY_TOKENS = 32  # of each request: two pages of vLLM


@dataclass(frozen=True, slots=True)
class Spot:
    """Replica before its memory is decided: a deployment's configuration on GPUs of one node. One stage.

    ``batch``: requests at once that it is launched for; None: ``FULL_BATCH``, and a fair share of the free memory.
    """

    asked: Asked
    config: DeploymentConfig
    gpus: tuple[GpuState, ...]
    batch: int | None = None

    @property
    def least_bytes(self) -> int:
        """Bytes of each of its GPUs, of the least KV room that goes with its batch."""
        if self.batch is None:
            return least_bytes(self.asked, self.config)
        return planned_bytes(self.asked, self.config, self.batch)

    @property
    def devices(self) -> tuple[tuple[str, str], ...]:
        """Keys of its GPUs."""
        return tuple((gpu.node_id, gpu.device_id) for gpu in self.gpus)


def planned_bytes(asked: Asked, config: DeploymentConfig, batch: int) -> int:
    """Return the bytes of each GPU of a replica for ``batch`` mean requests, and for one of the longest."""
    return _bytes(_memory(asked, config, batch))


def least_bytes(asked: Asked, config: DeploymentConfig) -> int:
    """Return the bytes of each GPU of a replica with a full batch's activations and the longest request's KV."""
    return _bytes(replace(_full_memory(asked, config), layer_kv_bytes=_memory(asked, config, 1).layer_kv_bytes))


def size_together(situation: Situation, spots: Sequence[Spot]) -> tuple[Replica, ...] | None:
    """Return the replicas of ``spots`` with their memory; None where they do not fit next to one another.

    Those without a batch of their own have equal parts of what is free on a GPU. Where the cluster is to hold more
    deployments, each takes no more than its part of a GPU once all are there.
    """
    least = [spot.least_bytes for spot in spots]
    left = {
        (gpu.node_id, gpu.device_id): gpu.free_bytes - math.ceil((1 - USABLE_FRACTION) * gpu.total_bytes)
        for gpu in situation.cluster.gpus
    }
    growing: Counter[tuple[str, str]] = Counter()
    for spot, size_bytes in zip(spots, least, strict=True):
        for device in spot.devices:
            left[device] -= size_bytes
            growing[device] += spot.batch is None
    if any(left[device] < 0 for spot in spots for device in spot.devices):
        return None
    there = len({replica.deployment for replica in situation.running}) + len(situation.asked)
    shares = math.ceil(situation.expected / len(situation.cluster.gpus)) if situation.expected > there else 1
    replicas = []
    for spot, size_bytes in zip(spots, least, strict=True):
        if spot.batch is not None:
            replicas.append(_planned(spot, size_bytes, spot.batch))
            continue
        room = size_bytes + min(left[device] // growing[device] for device in spot.devices)
        part = int(USABLE_FRACTION * min(gpu.total_bytes for gpu in spot.gpus) / shares)
        replicas.append(_full(spot, max(size_bytes, min(room, part))))
    return tuple(replicas)


def _planned(spot: Spot, size_bytes: int, batch: int) -> Replica:
    served = replace(spot.asked.model.options.workload, batch=batch)
    limits = launch_limits(served, spot.config.engine, spec=spot.asked.model.spec)
    return _replica(spot, size_bytes, limits)


def _full(spot: Spot, room_bytes: int) -> Replica:
    asked, config = spot.asked, spot.config
    memory, spec = _full_memory(asked, config), asked.model.spec
    served = replace(asked.model.options.workload, batch=FULL_BATCH)
    limits = launch_limits(served, config.engine, spec=spec)
    longest = limits.max_context_tokens
    if limits.kv_tokens is not None:
        layer_bytes = (room_bytes - _bytes(replace(memory, layer_kv_bytes=0))) / (
            memory.num_layers * (1 + memory.relative_error)
        )
        tokens = int(layer_bytes / kv_token_bytes_per_gpu(spec, config))
        limits = replace(limits, kv_tokens=max(longest, tokens - FULL_BATCH * _PARTLY_EMPTY_TOKENS))
    return _replica(spot, room_bytes, limits)


def _replica(spot: Spot, size_bytes: int, limits: Limits) -> Replica:
    stage = StagePlacement(
        node_id=spot.gpus[0].node_id,
        device_ids=tuple(gpu.device_id for gpu in spot.gpus),
        first_layer=0,
        num_layers=spot.asked.model.spec.num_layers,
        bytes_per_gpu=size_bytes,
    )
    return Replica(deployment=spot.asked.name, config=spot.config, placement=Placement((stage,)), limits=limits)


def _memory(asked: Asked, config: DeploymentConfig, batch: int) -> MemoryEstimate:
    model, planned = asked.model, asked.model.options.workload
    served = replace(planned, batch=batch)
    return served_memory(model.spec, model.estimator, config, Workload(1, 1, 1), served)


def _full_memory(asked: Asked, config: DeploymentConfig) -> MemoryEstimate:
    return _memory(asked, config, FULL_BATCH)


def _bytes(memory: MemoryEstimate) -> int:
    return demand(memory).stage_bytes(0, memory.num_layers)
