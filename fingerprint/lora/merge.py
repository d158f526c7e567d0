"""Merging an adapter into its base: an ordinary checkpoint with the changes that the adapter makes.

Values are computed in float32 and rounded once, to the type that the base has. Files, names, order and types are
the base's, so whatever serves the base serves the result. Memory: the factors of one matrix and a few MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fingerprint.checkpoint import Checkpoint
from fingerprint.config_json import read_config
from fingerprint.derived_checkpoint import Progress, write_derived
from fingerprint.lora.adapter import LoraAdapter, check_values, open_weights, require_mergeable
from fingerprint.lora.base_fit import BaseTensors, fitted_changes
from fingerprint.lora.changed_values import changed_pieces
from fingerprint.safetensors_header import StoredTensor

__all__ = ["MergeResult", "merge_adapter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeResult:
    """Counts of a checkpoint that a merge wrote."""

    directory: Path
    num_merged: int  # tensors that were changed
    num_tensors: int  # of the checkpoint
    num_files: int  # safetensors files
    bytes_written: int  # of these files


def merge_adapter(
    base: Path,
    adapter: LoraAdapter,
    target: Path,
    *,
    progress: Progress | None = None,
    durable: bool = True,
) -> MergeResult:
    """Write to ``target`` the model of ``base`` with the changes of ``adapter``.

    Args:
        base: a checkpoint directory (one or many safetensors files), which is not changed.
        target: a directory that is not there yet (or is empty); it appears whole or not at all.
        progress: called with bytes written so far and in all.
        durable: all files are on the disk before ``target`` appears.

    Raises:
        UnsupportedAdapterError: no merge computes ``adapter``, or not with these weights.
        CheckpointError: ``adapter`` is of another base or has values that are not finite, a result is beyond what
            the base's type holds, a file is unreadable, or the disk is full.
        ConflictError: ``target`` is there already.
        NotFoundError, ConfigError: as ``config_json.read_config``.
    """
    require_mergeable(adapter)
    config = read_config(base)
    checkpoint = Checkpoint.open(base)
    stored = {name: StoredTensor(entry.dtype, entry.shape) for name, entry in checkpoint.tensors.items()}
    changes = fitted_changes(adapter, BaseTensors(str(base), config, stored))
    check_values(adapter)
    tensors = open_weights(adapter.folder)
    updates = {change.target: partial(changed_pieces, change, checkpoint, tensors) for change in changes}
    written = write_derived(checkpoint, updates, target, progress=progress, durable=durable)
    return MergeResult(
        directory=target,
        num_merged=len(updates),
        num_tensors=written.num_tensors,
        num_files=written.num_files,
        bytes_written=written.bytes_written,
    )
