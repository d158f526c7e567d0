"""Predictions and what the full model then took. Values only; ``tests/bench`` measures them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Quantity
from fingerprint.measurements import MachineInfo

__all__ = ["AccuracyRecord", "AccuracyRow", "machine_key"]


def machine_key(machine: MachineInfo) -> str:
    """Return a key that is equal for machines whose full-model measurements agree: devices and versions.

    A CPU's measured peaks and its free memory differ from launch to launch and are left out.
    """
    found = (
        machine.device.name,
        machine.num_devices,
        machine.cores_per_device,
        machine.cpu_model,
        machine.driver,
        machine.versions,
    )
    return hashlib.sha256(to_json(found)).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyRow:
    """Quantity of one full model: predicted from fingerprints, and measured.

    ``quantity`` is named with its unit last: ``ttft_s``, ``tpot_s``; ``memory_bytes_per_gpu``, all of the fullest
    GPU; ``engine_bytes_per_gpu``, of it what the engine counts (weights, KV, activations and pipeline buffers), to
    which the estimate's relative error is applied as if it were the whole. Of engines that count their own memory:
    ``weights_bytes_per_gpu``; ``non_kv_bytes_per_gpu``, all but the KV cache; ``kv_blocks`` in what it may take.
    """

    model: str
    shape_hash: str  # of the ModelSpec, so that a report finds the rows of its own model
    num_layers: int
    config: DeploymentConfig
    workload: Workload | None  # None: it does not depend on any
    quantity: str
    predicted: Quantity
    measured: float
    measured_low: float  # 90% interval of the measurement itself
    measured_high: float
    repeats: int
    below_resolution: bool = False  # the fingerprints could not tell one layer's time from zero

    @property
    def is_time(self) -> bool:
        return self.quantity.endswith("_s")

    @property
    def relative_error(self) -> float:
        """Relative error of the prediction; positive when it is too high."""
        return self.predicted.value / self.measured - 1 if self.measured else float("inf")

    @property
    def inside(self) -> bool:
        """True when the measured value lies in the predicted 90% interval."""
        return self.predicted.low <= self.measured <= self.predicted.high


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyRecord:
    """A whole comparison, with what is needed to judge it."""

    created_at: str  # ISO 8601, UTC
    command: str
    machine: MachineInfo
    load_average_before: float | None  # over one minute; above 0 other programs ran too; None: not recorded
    load_average_after: float | None
    rows: tuple[AccuracyRow, ...]
    notes: tuple[str, ...] = ()
