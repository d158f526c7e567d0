"""The cluster as placement sees it, what is to be placed, and where it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fingerprint.service_model import ServiceModel

__all__ = [
    "BlockDemand",
    "ClusterSnapshot",
    "DeploymentState",
    "GpuState",
    "Placement",
    "PlacementPolicy",
    "Refusal",
    "ReplicaState",
    "StagePlacement",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """State of one GPU, or of one share of a CPU.

    ``node_id`` and ``device_id`` together are unique in the cluster.
    """

    device_id: str  # as its node's daemon names it and takes it: a GPU's UUID, "cpu:0" for a CPU share
    node_id: str
    gpu_index: int  # position on its node; neighbours in a link group have adjacent indexes
    total_bytes: int
    free_bytes: int
    load_fraction: float = 0.0  # busy fraction over the last 120 s, 0 to 1
    kind: str = "GPU"  # in messages; "CPU device" for a CPU share


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """State of all GPUs at one moment. The order of ``gpus`` never matters.

    ``deployments``: what serves there, for policies that look at it; empty where unknown.
    """

    gpus: tuple[GpuState, ...]
    deployments: tuple[DeploymentState, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDemand:
    """Memory that a configuration needs, in blocks (design, section 5).

    All bytes are per GPU of a stage's TP group.

    Stage memory = layers * layer_bytes + fixed_bytes + (first_stage_bytes | last_stage_bytes at the ends).
    """

    tp: int
    pp: int
    num_layers: int
    layer_bytes: int  # weights of one layer / tp, plus its KV
    first_stage_bytes: int
    last_stage_bytes: int
    fixed_bytes: int  # activations, pipeline buffers, runtime: on every GPU

    @property
    def total_bytes(self) -> int:
        """Bytes of all stages together, on one GPU of each."""
        ends = self.first_stage_bytes + self.last_stage_bytes
        return self.num_layers * self.layer_bytes + self.pp * self.fixed_bytes + ends

    def stage_bytes(self, stage: int, num_layers: int) -> int:
        return (
            num_layers * self.layer_bytes
            + self.fixed_bytes
            + (self.first_stage_bytes if stage == 0 else 0)
            + (self.last_stage_bytes if stage == self.pp - 1 else 0)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlacement:
    """Pipeline stage: its GPUs (one TP group of one node) and its contiguous layers."""

    node_id: str
    """Node of the stage's devices."""
    device_ids: tuple[str, ...]
    """Devices of the stage's tensor-parallel group."""
    first_layer: int
    """Index of the stage's first hidden layer."""
    num_layers: int
    """Number of hidden layers of the stage."""
    bytes_per_gpu: int
    """Memory promised on each device of the stage."""


@dataclass(frozen=True, slots=True)
class Placement:
    """All stages in order; the layers of each follow on those of the one before."""

    stages: tuple[StagePlacement, ...]
    """Pipeline stages in order."""

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(stage.num_layers for stage in self.stages)

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(device for stage in self.stages for device in stage.device_ids)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason why nothing fits, with both numbers, and how much is missing, for the nearest-feasible search.

    ``shortfall_bytes`` more free memory on each GPU would do; when ``missing_gpus`` is not 0, that many further
    GPUs with this much room are needed as well.
    """

    reason: str
    shortfall_bytes: int
    missing_gpus: int = 0
    device: str = "GPU"  # kind of the devices, in messages


class PlacementPolicy(Protocol):
    """Orders GPUs by preference; feasibility is not its business."""

    @property
    def name(self) -> str: ...

    def tiers(self, gpus: tuple[GpuState, ...]) -> tuple[tuple[GpuState, ...], ...]:
        """Return groups of GPUs to try in order, each sorted best first; ties end in node and index."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaState:
    """State of a replica that takes requests, or will once it is ready."""

    replica_id: str
    """Identifier of the worker."""
    placement: Placement
    """Devices of the replica, stage by stage."""
    ready: bool
    """Whether the replica takes requests."""
    outstanding: int
    """Requests that the replica has, running and waiting."""
    max_batch: int
    """Most requests that the replica runs at once."""
    batches: int = 1
    """Batches under way at once: the stages of a pipeline that keeps them full."""
    kv_tokens: int | None = None
    """Tokens of its KV cache; None: not known, or it keeps states alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentState:
    """State of a deployment, its load over the last 120 s, and since when it has been as it is."""

    name: str
    """Name of the deployment."""
    model: str
    """Model that is served."""
    wanted: int
    """Replicas asked for, those without a place included."""
    replicas: tuple[ReplicaState, ...]
    """Replicas that serve or start; draining ones are left out."""
    moving: bool
    """Whether a replica is being moved; `replicas` has the one that still serves."""
    waiting: int
    """Requests that wait in the gateway."""
    requests_per_s: float
    """Requests per second that arrived."""
    service_s: float
    """Replica-seconds of one such request on idle GPUs at a full batch; 0: not known."""
    idle_s: float
    """Seconds since the deployment last had a request."""
    steady_s: float
    """Seconds since the number or the place of its replicas last changed."""
    service: ServiceModel | None = None
    """Times and memory of one replica at any concurrency; None: not known."""
    planned_rate_per_s: float | None = None
    """Requests per second that it was planned for, until its own are counted; None: not given."""

    @property
    def is_work_known(self) -> bool:
        """True when ``busy_fraction`` is known: without requests it is 0, whatever a request takes."""
        return self.requests_per_s == 0 or self.service_s > 0

    @property
    def busy_fraction(self) -> float:
        """Busy fraction of each replica's time, on GPUs of its own.

        Above 1 (of a pipeline above the batches that are under way), more requests arrive than are served. 0
        without replicas.
        """
        return self.requests_per_s * self.service_s / len(self.replicas) if self.replicas else 0.0
