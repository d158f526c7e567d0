"""Merging a LoRA adapter into its base: an ordinary checkpoint whose matrices are W + scale * B @ A.

Sums are computed in float32 and rounded once, to the type that the base has. Files, names, order and types are the
base's, so whatever serves the base serves the result. Memory: the factors of one matrix and a few MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fingerprint.checkpoint import DTYPE_BITS, Checkpoint, TensorEntry
from fingerprint.config_json import read_config
from fingerprint.derived_checkpoint import Progress, encode_finite, write_derived
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import FLOAT_DTYPES, decode_floats
from fingerprint.lora.adapter import LoraAdapter, LoraModule, check_values, open_weights, require_supported
from fingerprint.lora.base_fit import BaseTensors, check_fit
from fingerprint.safetensors_header import StoredTensor

__all__ = ["MergeResult", "merge_adapter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeResult:
    """Counts of a checkpoint that a merge wrote."""

    directory: Path
    num_merged: int  # matrices that were updated
    num_tensors: int  # of the checkpoint
    num_files: int  # safetensors files
    bytes_written: int  # of these files


def merge_adapter(
    base: Path, adapter: LoraAdapter, target: Path, *, progress: Progress | None = None
) -> MergeResult:
    """Write to ``target`` the model of ``base`` with ``adapter`` added to its weights.

    Args:
        base: a checkpoint directory (one or many safetensors files), which is not changed.
        target: a directory that is not there yet (or is empty); it appears whole or not at all.
        progress: called with bytes written so far and in all.

    Raises:
        UnsupportedAdapterError: ``adapter`` is more than a plain LoRA, or cannot be added to these weights.
        CheckpointError: ``adapter`` is of another base or has values that are not finite, the sum is beyond what
            the base's type holds, a file is unreadable, or the disk is full.
        ConflictError: ``target`` is there already.
        NotFoundError, ConfigError: as ``config_json.read_config``.
    """
    require_supported(adapter)
    config = read_config(base)
    checkpoint = Checkpoint.open(base)
    stored = {name: StoredTensor(entry.dtype, entry.shape) for name, entry in checkpoint.tensors.items()}
    check_fit(adapter, BaseTensors(str(base), config, stored))
    check_values(adapter)
    factors = open_weights(adapter.folder)
    updates = {
        module.weight: partial(_summed, module, checkpoint.tensors[module.weight], checkpoint, factors)
        for module in adapter.modules
    }
    written = write_derived(checkpoint, updates, target, progress=progress)
    return MergeResult(
        directory=target,
        num_merged=len(updates),
        num_tensors=written.num_tensors,
        num_files=written.num_files,
        bytes_written=written.bytes_written,
    )


def _summed(
    update: LoraModule, entry: TensorEntry, checkpoint: Checkpoint, factors: Checkpoint
) -> Iterator[bytes]:
    """Yield the bytes of W + scale * B @ A, a piece of W at a time."""
    down_name, up_name = update.factors
    down = _factor(factors, down_name, (update.rank, update.in_features))
    up = _factor(factors, up_name, (update.out_features, update.rank))
    width, item_bytes = update.in_features, DTYPE_BITS[entry.dtype] // 8
    scale, begin = np.float32(update.scale), 0
    for raw in checkpoint.chunks(update.weight):
        end = begin + len(raw) // item_bytes
        first, last = begin // width, -(-end // width)  # the rows that the piece has elements of
        values = decode_floats(raw, entry.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # looked for below
            delta = up[first:last] @ down
            delta *= scale
            values = values + delta.reshape(-1)[begin - first * width : end - first * width]
        yield encode_finite(values, entry.dtype, update.weight)
        begin = end


def _factor(factors: Checkpoint, name: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return a factor of an update, of the shape that was checked."""
    entry = factors.tensors.get(name)
    if entry is None or entry.shape != shape or entry.dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"the adapter in {factors.directory} was changed while read; merge it again")
    return decode_floats(factors.read(name), entry.dtype).reshape(shape)
