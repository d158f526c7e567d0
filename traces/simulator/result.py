"""Result of a simulation: every request's outcome, what happened to the deployments, how busy the GPUs were."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from traces.outcomes import Outcomes
from traces.simulator.held import HeldGpu
from traces.simulator.kv_use import KvUse
from traces.simulator.step_model import Limits

__all__ = ["Change", "ChangeKind", "DeploymentFigures", "GpuFigures", "SimulationResult"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    outcomes: Outcomes
    changes: tuple[Change, ...]
    gpus: tuple[GpuFigures, ...]
    deployments: tuple[DeploymentFigures, ...]
    held: tuple[HeldGpu, ...]  # by GPU, of every deployment that had memory there
    end_s: float  # the last thing that happened
    stopped: str | None  # why it was ended early, None: all requests were followed to their end
