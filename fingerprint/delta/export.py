"""Writing a delta out as an ordinary checkpoint: base + delta, for engines that serve no deltas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fingerprint.checkpoint import DTYPE_BITS, Checkpoint, TensorEntry
from fingerprint.delta.base import check_base
from fingerprint.delta.manifest import MatrixRecord
from fingerprint.delta.reader import Delta
from fingerprint.derived_checkpoint import Pieces, Progress, WrittenCheckpoint, encode_finite, write_derived
from fingerprint.float_bytes import decode_floats
from fingerprint.folder_file import file_within

__all__ = ["ExportResult", "export_delta"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """Checkpoint that an export wrote."""

    directory: Path
    num_changed: int  # tensors that differ from the base's
    written: WrittenCheckpoint


def export_delta(base: Path, delta: Delta, target: Path, *, progress: Progress | None = None) -> ExportResult:
    """Write to ``target`` the model of ``base`` with ``delta`` added to its weights.

    W + delta is computed in float32 and rounded once, to the type of W. Memory: one matrix.

    Args:
        base: the checkpoint directory that the delta was made of, which is not changed.
        target: a directory that is not there yet (or is empty); it appears whole or not at all.
        progress: called with bytes written so far and in all.

    Raises:
        CheckpointError: ``base`` is another than the delta's; a sum is beyond what the base's type holds; a file
            is unreadable or the disk is full.
        ConflictError: ``target`` is there already.
        NotFoundError, ConfigError: as ``config_json.read_config``.
    """
    checkpoint, manifest = Checkpoint.open(base), delta.manifest
    check_base(checkpoint, manifest)
    replaced: dict[str, Pieces] = {
        matrix.name: partial(_summed, matrix, checkpoint.tensors[matrix.name], checkpoint, delta)
        for matrix in manifest.matrices
    }
    replaced |= {tensor.name: partial(delta.pieces, tensor) for tensor in manifest.exact}
    companions = [file_within(delta.folder, each.name, "delta") for each in manifest.companions]
    written = write_derived(checkpoint, replaced, target, progress=progress, companions=companions)
    return ExportResult(directory=target, num_changed=len(replaced), written=written)


def _summed(matrix: MatrixRecord, entry: TensorEntry, checkpoint: Checkpoint, delta: Delta) -> Iterator[bytes]:
    """Yield the bytes of W + delta, a piece of W at a time."""
    change = delta.change(matrix).reshape(-1)
    item_bytes, begin = DTYPE_BITS[entry.dtype] // 8, 0
    for raw in checkpoint.chunks(matrix.name):
        end = begin + len(raw) // item_bytes
        yield encode_finite(decode_floats(raw, entry.dtype) + change[begin:end], entry.dtype, matrix.name)
        begin = end
