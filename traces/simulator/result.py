"""Result of a simulation: every request's outcome, what happened to the deployments, how busy the GPUs were."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from traces.outcomes import Outcomes
from traces.simulator.held import HeldGpu
from traces.simulator.kv_use import KvUse
from traces.simulator.step_model import Limits
from traces.summary import Percentiles

__all__ = ["Change", "ChangeKind", "DeploymentFigures", "GpuFigures", "SimulationResult", "VariantFigures"]


class ChangeKind(StrEnum):
    DEPLOYED = "deployed"  # one replica
    REFUSED = "refused"
    LOST = "lost"
    REMOVED = "removed"
    PROFILING = "profiling"
    PROFILED = "profiled"
    SCALED = "scaled"  # another number of replicas is asked for
    DRAINING = "draining"  # one replica takes no more requests
    ENDED = "ended"  # it has ended its last, and its memory is free
    MOVING = "moving"  # a replica is loaded elsewhere
    MOVED = "moved"  # and takes over


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Event of a deployment or a profile."""

    at_s: float
    kind: ChangeKind
    name: str
    text: str
    device_ids: tuple[str, ...] = ()
    memory_bytes: int = 0  # over all its GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFigures:
    node_id: str
    device_id: str
    busy_fraction: float  # of the whole simulation
    held_fraction: float  # of it, in which any worker had a place here
    peak_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantFigures:
    """LoRA variants of one deployment, over all its replicas and the whole simulation.

    A request is warm if its adapter was loaded at its worker when it arrived, cold if a load of it ended there
    later. Times are None without such a request.
    """

    slots: int  # of a replica: adapters in flight at once
    max_loaded: int  # adapters of a replica
    asked_for: int  # distinct ones
    requests: int  # for variants, that a worker began
    hits: int  # of those, whose adapter was loaded, or being loaded, when they were given to a worker
    loads: int
    evictions: int
    load_s: float  # of one load; 0: not known
    waiting: Percentiles | None  # from the arrival until a worker had the request and its adapter
    ttft_warm: Percentiles | None
    ttft_cold: Percentiles | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentFigures:
    """Figures of a deployment at the last request's arrival.

    ``waiting`` counts the gateway's queue; where it is large, more requests arrived than were served.
    """

    name: str
    arrived: int
    replicas: int
    waiting: int
    peak_replicas: int  # at once, that took requests
    cold_starts: int  # from zero replicas, by a request
    scaled_to_zero_s: float  # at zero replicas
    kv: KvUse | None = None  # None: no replica had a bounded KV cache, or none was followed
    limits: Limits | None = None  # of the latest replica; None: it was never deployed
    variants: VariantFigures | None = None  # None: it has no adapter slots


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    outcomes: Outcomes
    changes: tuple[Change, ...]
    gpus: tuple[GpuFigures, ...]
    deployments: tuple[DeploymentFigures, ...]
    held: tuple[HeldGpu, ...]  # by GPU, of every deployment that had memory there
    end_s: float  # the last thing that happened
    stopped: str | None  # why it was ended early, None: all requests were followed to their end
