"""Writing a delta out as an ordinary checkpoint: base + delta, for engines that serve no deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fingerprint.checkpoint import DTYPE_BITS, Checkpoint, TensorEntry
from fingerprint.delta.manifest import MatrixRecord, TensorHash
from fingerprint.delta.reader import Delta
from fingerprint.derived_checkpoint import Pieces, Progress, WrittenCheckpoint, encode_finite, write_derived
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import FLOAT_DTYPES, decode_floats
from fingerprint.folder_file import file_within
from fingerprint.tensor_hash import tensor_hash

__all__ = ["ExportResult", "check_base", "export_delta"]


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
    check_base(checkpoint, manifest.base)
    replaced: dict[str, Pieces] = {}
    for matrix in manifest.matrices:
        entry = checkpoint.tensors[matrix.name]
        if entry.shape != matrix.shape or entry.dtype not in FLOAT_DTYPES:
            raise _not_of_base(matrix.name, base, f"it is {entry.dtype} {list(entry.shape)} there")
        replaced[matrix.name] = partial(_summed, matrix, entry, checkpoint, delta)
    for tensor in manifest.exact:
        entry = checkpoint.tensors[tensor.name]
        if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            raise _not_of_base(tensor.name, base, f"it is {entry.dtype} {list(entry.shape)} there")
        replaced[tensor.name] = partial(delta.pieces, tensor)
    companions = [file_within(delta.folder, each.name, "delta") for each in manifest.companions]
    written = write_derived(checkpoint, replaced, target, progress=progress, companions=companions)
    return ExportResult(directory=target, num_changed=len(replaced), written=written)


def check_base(checkpoint: Checkpoint, expected: Sequence[TensorHash], *, most_bytes: int | None = None) -> None:
    """Read ``checkpoint`` and raise CheckpointError unless its tensors are those of ``expected``.

    The message names the first tensor that is not.

    Args:
        most_bytes: of a tensor whose values are compared; of larger ones the name is. None: all are read.
    """
    hashes = {tensor.name: tensor.sha256 for tensor in expected}
    for name in sorted(hashes.keys() | checkpoint.tensors.keys()):
        if name not in checkpoint.tensors:
            raise _not_of_base(name, checkpoint.directory, "it has none of that name")
        if name not in hashes:
            raise _not_of_base(name, checkpoint.directory, "the delta's base has none of that name")
        entry = checkpoint.tensors[name]
        if most_bytes is not None and entry.num_bytes > most_bytes:
            continue
        if tensor_hash(entry.dtype, entry.shape, checkpoint.chunks(name)) != hashes[name]:
            raise _not_of_base(name, checkpoint.directory, "it has other values there")


def _summed(matrix: MatrixRecord, entry: TensorEntry, checkpoint: Checkpoint, delta: Delta) -> Iterator[bytes]:
    """Yield the bytes of W + delta, a piece of W at a time."""
    change = delta.change(matrix).reshape(-1)
    item_bytes, begin = DTYPE_BITS[entry.dtype] // 8, 0
    for raw in checkpoint.chunks(matrix.name):
        end = begin + len(raw) // item_bytes
        yield encode_finite(decode_floats(raw, entry.dtype) + change[begin:end], entry.dtype, matrix.name)
        begin = end


def _not_of_base(tensor: str, folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the delta was made of another base than {folder}: tensor {tensor[:200]!r} differs ({why}); give the "
        "base that it was made of"
    )
