"""Measured whole models, kept in the home: where ``make accuracy`` puts them and ``iserve report`` finds them.

One file per model shape and machine, each the whole record of one comparison. The newest replaces the one before.
"""

from __future__ import annotations

from pathlib import Path

from daemon.atomic_file import write_file_atomically
from fingerprint.codec import to_json
from fingerprint.errors import NotFoundError
from fingerprint.measurements import MachineInfo
from fingerprint.report import AccuracyRecord
from fingerprint.report.accuracy import machine_key
from iserve.reporting.gathering import read_accuracy

__all__ = ["find_accuracy", "store_accuracy"]

_FOLDER = "accuracy"


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
