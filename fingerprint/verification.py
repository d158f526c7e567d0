"""Measurements of a check of one running configuration.

Values only: ``iserve`` measures, and ``fingerprint.estimators.corrected`` derives what follows for the model's
other estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import GRAPH_TOKENS
from fingerprint.errors import ConfigError

__all__ = ["Reading", "SingleRequest", "Verification"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A measured mean with its 90% interval, ``0 < low <= value <= high``.

    Raises:
        ConfigError: numbers of which no ratio can be made.
    """

    value: float
    """Mean of the repeats."""
    low: float
    """Lower end of the 90% interval of the mean."""
    high: float
    """Upper end of the 90% interval of the mean."""
    repeats: int
    """Number of repeats."""

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.value <= self.high and math.isfinite(self.high)):
            raise ConfigError(
                f"a reading needs 0 < low <= value <= high, got {self.low}, {self.value}, {self.high}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleRequest:
    """Times of one request at once on the same worker."""

    workload: Workload
    """Workload of the single request."""
    ttft_s: Reading
    """TTFT of the single request in seconds."""
    tpot_s: Reading | None
    """TPOT of the single request in seconds; None: it has one output token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Result of a check: one configuration, launched with its whole model and run under one workload.

    Times are served ones: from the request's first byte to the answer's last, over HTTP. The measurement is kept,
    not its ratio to the prediction of that day: the error of an old profile must not correct a better one.
    """

    config: DeploymentConfig
    """Configuration that was checked."""
    workload: Workload
    """Workload that was run; its answers may be shorter than the worker has room for."""
    launch_workload: Workload
    """Workload that the worker was launched for."""
    layers_per_stage: tuple[int, ...]
    """Hidden layers of each pipeline stage."""
    measured_at: str
    """Time of the check, ISO 8601 in UTC."""
    ttft_s: Reading
    """TTFT of the whole batch in seconds."""
    tpot_s: Reading | None
    """TPOT of the whole batch in seconds; None: the workload has one output token."""
    memory_bytes_per_gpu: int | None
    """Memory of the fullest GPU, with the KV cache for `launch_workload`; None: nothing counts it."""
    kv_tokens: int | None
    """Size of the KV cache in tokens as the engine reports it; None: not reported."""
    single_request: SingleRequest | None = None
    """Times of one request at once; None: `workload` is one request, or there was no time for it."""
    graph_tokens: int = GRAPH_TOKENS
    """Tokens of the engine's largest CUDA graph; checks with another than a profile's correct nothing of it."""
