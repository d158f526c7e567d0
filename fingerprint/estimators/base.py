"""Interface of an estimation strategy: the memory or the latency of a whole model, from a profile.

Strategies are swapped by name (``registry``). What a strategy does not reach it refuses; the estimators scale that
from the nearest configuration and workload that it does reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.estimates import MemoryEstimate
from fingerprint.estimators.l2 import Latency, LayerEffect
from fingerprint.measurements import MeasuredKey, TimingPoint

__all__ = ["LatencyFit", "LatencyStrategy", "MemoryStrategy"]


class LatencyFit(Protocol):
    """Latency model fitted to one measured configuration."""

    points: tuple[TimingPoint, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """Layer counts that were run, ascending."""
        ...

    @property
    def is_determined(self) -> bool:
        """Return whether the fit reaches any workload."""
        ...

    def reaches(self, workload: Workload) -> bool: ...

    def nearest_workload(self, workload: Workload) -> Workload:
        """Return the workload nearest to ``workload`` that the fit reaches."""
        ...

    def latency(self, workload: Workload) -> Latency:
        """Raises NotMeasuredError: it does not reach ``workload``."""
        ...


class LatencyStrategy(Protocol):
    """Made from a profile alone."""

    name: str
    fits: Mapping[MeasuredKey, LatencyFit]

    @property
    def layer_effects(self) -> tuple[LayerEffect, ...]: ...

    def latency(self, config: DeploymentConfig, workload: Workload) -> Latency:
        """Raises NotMeasuredError: nothing that was run tells it."""
        ...


class MemoryStrategy(Protocol):
    """Made from a profile and the largest prefill step, ``max_batched_tokens``."""

    name: str

    @property
    def warnings(self) -> tuple[str, ...]: ...

    @property
    def measured(self) -> tuple[tuple[WeightFormat, int, int], ...]:
        """(weights, tp, pp) that were loaded."""
        ...

    def memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        """Raises NotMeasuredError: nothing that was loaded tells it."""
        ...

    def layer_kv_bytes(self, config: DeploymentConfig, workload: Workload) -> float:
        """Return one layer's KV bytes on one GPU at the workload's end, even for a configuration never loaded."""
        ...
