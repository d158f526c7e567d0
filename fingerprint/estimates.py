"""Predictions for a configuration: numbers with an interval and a source, and the estimator protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.load_waits import LoadWaits, OneLoad

__all__ = [
    "Correction",
    "Estimate",
    "Estimator",
    "MemoryEstimate",
    "Quantity",
    "Source",
    "StageMemory",
    "SteadyState",
    "TellsSteadyState",
]


class Source(StrEnum):
    """Origin of a number."""

    MEASURED = "measured"  # this very configuration and workload was run
    EXTRAPOLATED = "extrapolated"  # from fingerprints of the same configuration
    SHARDED = "sharded"  # from one TP rank's shape run alone, and modelled all-reduces
    SCALED = "scaled"  # a neighbour's measurement times the roofline's ratio
    ROOFLINE = "roofline"  # from datasheets alone


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its 90% interval, ``low <= value <= high``."""

    value: float
    """Expected value itself."""
    low: float
    """Lower end of the 90% interval."""
    high: float
    """Upper end of the 90% interval."""
    source: Source
    """Method by which the value was obtained."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one GPU of a pipeline stage."""

    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    pp_buffer_bytes: int
    runtime_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes + self.kv_bytes + self.activation_bytes + self.pp_buffer_bytes + self.runtime_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """The parts from which the memory of any layer split follows. All bytes are per GPU of a TP group.

    ``relative_error`` is half the width of the 90% interval over the total: feasibility uses
    ``total * (1 + relative_error)``.
    """

    tp: int
    pp: int
    num_layers: int
    # One layer, where stages differ the mean one of the heaviest stage: divided over the TP group, and its KV for
    # the workload's tokens.
    layer_weight_bytes: int
    layer_kv_bytes: int
    first_stage_bytes: int  # embedding
    last_stage_bytes: int  # final norm and output head (a tied head on another GPU is a second copy)
    activation_bytes: int
    pp_buffer_bytes: int  # 0 when pp == 1
    runtime_bytes: int  # context and libraries
    relative_error: float
    source: Source

    def stage(self, index: int, num_layers: int) -> StageMemory:
        """Return the memory of stage ``index`` (of ``pp``) when it holds ``num_layers`` layers.

        A stage that is both first and last holds a tied embedding once: the estimator then gives the head 0.
        """
        ends = (self.first_stage_bytes if index == 0 else 0) + (
            self.last_stage_bytes if index == self.pp - 1 else 0
        )
        return StageMemory(
            weights_bytes=num_layers * self.layer_weight_bytes + ends,
            kv_bytes=num_layers * self.layer_kv_bytes,
            activation_bytes=self.activation_bytes,
            pp_buffer_bytes=self.pp_buffer_bytes,
            runtime_bytes=self.runtime_bytes,
        )

    def stages(self, layers_per_stage: tuple[int, ...]) -> tuple[StageMemory, ...]:
        return tuple(self.stage(i, n) for i, n in enumerate(layers_per_stage))

    def per_gpu_bytes(self, layers_per_stage: tuple[int, ...]) -> int:
        """Return the bytes of the fullest GPU."""
        return max(stage.total_bytes for stage in self.stages(layers_per_stage))

    def total_bytes(self, layers_per_stage: tuple[int, ...]) -> int:
        """Return the bytes over all tp * pp GPUs."""
        return self.tp * sum(stage.total_bytes for stage in self.stages(layers_per_stage))


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Change of an estimate by the check of a running configuration (``fingerprint.estimators.corrected``)."""

    measured_at: str
    """Time of the check, ISO 8601 in UTC."""
    config: DeploymentConfig
    """Configuration that was checked."""
    workload: Workload
    """Workload that was checked."""
    exact: bool
    """Whether the estimate is of just that configuration and workload; false: the correction is carried over, and
    the intervals hold the uncorrected values."""
    ttft_log_ratio: float
    """Natural logarithm of measured over predicted TTFT at what was checked; 0: as predicted."""
    tpot_log_ratio: float
    """Natural logarithm of measured over predicted TPOT at what was checked; 0: as predicted."""
    memory_bytes: int
    """Bytes added to the memory of a GPU other than weights and KV cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Prediction for one configuration under one workload."""

    config: DeploymentConfig
    workload: Workload
    memory: MemoryEstimate
    ttft_s: Quantity  # of the whole batch handed over at once
    tpot_s: Quantity  # one decode step of the batch, at the mean context of the workload
    power_w_per_gpu: Quantity | None = None  # None: unknown (CPU)
    correction: Correction | None = None  # None: as the estimator says
    measured_config: DeploymentConfig | None = None  # whose measured times these come from; None: datasheets alone
    links_measured: bool = False  # whether all-reduces of this TP degree rest on measured links
    most_at_once: float | None = None  # requests at once on average; None: no slots for variants bound them
    load_waits: LoadWaits | None = None  # in no time of these; None: no load runs next to the steps
    one_load: OneLoad | None = None  # of a variant; None: there are none, or its time is not known
    spared_loads_s: tuple[float, ...] = ()
    """Seconds of loads, of those in TTFT, that a request at 1, 2, ... replicas is spared if it always finds a slot
    at one that has its variant; at more replicas the last."""

    @property
    def is_measured(self) -> bool:
        """True when this very configuration was run.

        A profile ran its fingerprints, at whatever load, or a check the whole model under this workload.
        """
        was_run = self.measured_config is not None and self.measured_config == self.config
        return was_run or (self.correction is not None and self.correction.exact)

    @property
    def at_once(self) -> float:
        """Requests of the batch that run at once: all, or as many as find slots for their variants."""
        return min(self.workload.batch, self.most_at_once or math.inf)

    @property
    def e2e_s(self) -> Quantity:
        """``ttft + (output_tokens - 1) * tpot``, intervals added as if fully correlated (the wide side)."""
        steps = self.workload.output_tokens - 1
        return Quantity(
            self.ttft_s.value + steps * self.tpot_s.value,
            self.ttft_s.low + steps * self.tpot_s.low,
            self.ttft_s.high + steps * self.tpot_s.high,
            self.tpot_s.source if steps else self.ttft_s.source,
        )


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Times of a server's steps that batches handed over at once do not tell."""

    hidden_s: float = 0.0  # of a lone prompt's TTFT the device waits for the host; none of it behind another step
    longest_share: float = 0.0  # a decode step is that of contexts as long as the mean and so much of the longest


@runtime_checkable
class TellsSteadyState(Protocol):
    """An estimator that knows more of a server's steps."""

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        """Return what it knows.

        Raises:
            NotMeasuredError: the estimator has no measurement that reaches ``config``.
        """
        ...


class Estimator(Protocol):
    """Predicts one configuration. Pure: the same answer for the same arguments."""

    name: str

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict ``config`` under ``workload`` for the model and hardware the estimator was built for.

        Raises:
            NotMeasuredError: the estimator has no measurement that reaches this point.
        """
        ...
