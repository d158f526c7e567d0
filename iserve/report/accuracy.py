"""Predictions compared with measured full models, and the records of them that a home keeps.

``make accuracy`` stores, ``iserve report`` finds: one file per model shape and machine, each the whole
record of one comparison. The newest replaces the one before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from daemon.atomic_file import write_file_atomically
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import NotFoundError
from fingerprint.estimates import Quantity
from fingerprint.measurements import MachineInfo

__all__ = ["AccuracyRecord", "AccuracyRow", "find_accuracy", "machine_key", "read_accuracy", "store_accuracy"]

_FOLDER = "accuracy"  # in the home
_MAX_BYTES = 16 << 20


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


def read_accuracy(path: Path) -> AccuracyRecord:
    """Return the record that ``tests/bench/full_model_accuracy.py`` wrote.

    Raises:
        NotFoundError: it cannot be read, or is larger than any such record.
        BadInputError: it is something else.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise NotFoundError(f"{path} is larger than {_MAX_BYTES >> 20} MiB, no record is")
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"cannot read {path}: {error.strerror}") from error
    return from_json(data, AccuracyRecord, what=str(path))


def store_accuracy(home: Path, record: AccuracyRecord) -> tuple[Path, ...]:
    """Keep ``record`` for every model shape in it; each file is there whole or not at all.

    Raises:
        NotFoundError: the home cannot be written to.
    """
    folder, key = home / _FOLDER, machine_key(record.machine)
    shapes = dict.fromkeys(row.shape_hash for row in record.rows)
    paths = tuple(folder / f"{shape}-{key}.json" for shape in shapes)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for path in paths:
            write_file_atomically(path, to_json(record, indent=2))
    except OSError as error:
        raise NotFoundError(f"cannot write to {folder}: {error.strerror}") from error
    return paths


def find_accuracy(home: Path, shape_hash: str, machine: MachineInfo) -> AccuracyRecord | None:
    """Return what was measured of that shape on such a machine; else the newest of other models there; else None.

    Raises:
        BadInputError: the file is not such a record.
    """
    folder, key = home / _FOLDER, machine_key(machine)
    own = folder / f"{shape_hash}-{key}.json"
    if own.exists():
        return read_accuracy(own)
    others = [read_accuracy(path) for path in sorted(folder.glob(f"[!.]*-{key}.json"))]
    return max(others, key=lambda record: record.created_at, default=None)
