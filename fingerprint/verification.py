"""Measurements of a check of one running configuration.

Values only: ``iserve`` measures, and ``fingerprint.estimators.corrected`` derives what follows for the model's
other estimates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError

__all__ = ["Alone", "Reading", "Verification"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A measured mean with its 90% interval, ``0 < low <= value <= high``.

    Raises:
        ConfigError: numbers of which no ratio can be made.
    """

    value: float
    low: float
    high: float
    repeats: int

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.value <= self.high and math.isfinite(self.high)):
            raise ConfigError(
                f"a reading needs 0 < low <= value <= high, got {self.low}, {self.value}, {self.high}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """Times of one request on the same worker without any other request."""

    workload: Workload
    ttft_s: Reading
    tpot_s: Reading | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Result of a check: one configuration, launched with its whole model and run under one workload.

    Times are served ones: from the request's first byte to the answer's last, over HTTP. The measurement is kept,
    not its ratio to the prediction of that day: the error of an old profile must not correct a better one.
    """

    config: DeploymentConfig
    workload: Workload  # that was run; its answers may be shorter than what there is room for
    room: Workload  # what the worker was launched for
    layers_per_stage: tuple[int, ...]
    measured_at: str  # ISO 8601, UTC
    ttft_s: Reading  # of the whole batch
    tpot_s: Reading | None  # None: the workload has one output token
    memory_bytes_per_gpu: int | None  # of the fullest GPU, with the cache for ``room``; None: not counted
    kv_tokens: int | None  # room of the KV cache as the engine reports it; None: it does not
    alone: Alone | None = None  # None: ``workload`` is one request, or there was no time for it
