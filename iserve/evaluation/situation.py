"""Question that a contestant is asked, and its answer: replicas with their places and launch limits.

A contestant is a function of a situation: deployments that are asked for now, those that run, and what is known
of the load. It is asked once for all deployments that are asked for at one time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimator
from fingerprint.gpu_spec import GpuSpec
from iserve.simulation.running import SimulatedModel
from placement.types import ClusterSnapshot, Placement
from planner.intent import IntentKind, Quality, Slo
from traces.simulator.step_model import Limits

__all__ = ["Asked", "Contestant", "Decision", "Replica", "Situation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Deployment that is asked for, as far as a contestant may know it."""

    name: str
    model: SimulatedModel  # shape, estimator, engines, and the mean and longest request
    estimator: Estimator  # the product's, by links that may have been measured; the model's knows the datasheet
    slo: Slo  # of its mean request
    rate_per_s: float | None = None  # None: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Replica of a deployment: its configuration, its place with the memory it reserves, its launch limits."""

    deployment: str
    config: DeploymentConfig
    placement: Placement
    limits: Limits
    miss_probability: float | None = None  # of the deployment's SLO by its plan; None: nothing is promised


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Situation in which deployments are asked for."""

    gpu: GpuSpec
    cluster: ClusterSnapshot  # as it is now; loads are those of the last 120 s
    asked: tuple[Asked, ...]
    running: tuple[Replica, ...]
    expected: int  # deployments that the cluster is to hold in all, these included
    intent: IntentKind
    quality: Quality
    planned_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision of a contestant: replicas of the deployments asked for, and the reasons for those without any."""

    replicas: tuple[Replica, ...] = ()
    reasons: tuple[str, ...] = ()


class Contestant(Protocol):
    """Planner that is judged."""

    @property
    def name(self) -> str: ...

    def __call__(self, situation: Situation) -> Decision: ...
