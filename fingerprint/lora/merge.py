"""Merging a LoRA adapter into its base: an ordinary checkpoint whose matrices are W + scale * B @ A.

Sums are computed in float32 and rounded once, to the type that the base has. Files, names, order and types are the
base's, so whatever serves the base serves the result. Memory: the factors of one matrix and a few MiB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fingerprint.checkpoint import DTYPE_BITS, INDEX_FILE, SINGLE_FILE, Checkpoint, TensorEntry
from fingerprint.companion_files import copy_code, copy_companions
from fingerprint.config_json import read_config
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import FLOAT_DTYPES, decode_floats, encode_floats
from fingerprint.lora.adapter import LoraAdapter, LoraModule, check_values, open_weights, require_supported
from fingerprint.lora.base_fit import BaseTensors, check_fit
from fingerprint.safetensors_header import StoredTensor
from fingerprint.safetensors_writer import OutputTensor, new_directory, write_safetensors

__all__ = ["MergeResult", "merge_adapter"]

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


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
    updates = {module.weight: module for module in adapter.modules}
    total, done = sum(entry.num_bytes for entry in checkpoint.tensors.values()), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    files = _by_file(checkpoint)
    with new_directory(target, needed_bytes=total, durable=True) as part:
        for file, names in files.items():
            tensors = [_output(name, updates.get(name), checkpoint, factors) for name in names]
            write_safetensors(part / file, tensors, on_bytes=on_bytes)
        copy_companions(base, part)
        if "auto_map" in config:
            copy_code(base, part)
        if [*files] != [SINGLE_FILE]:
            _write_index(part / INDEX_FILE, files, total)
        shutil.copyfile(base / "config.json", part / "config.json")
    return MergeResult(
        directory=target,
        num_merged=len(updates),
        num_tensors=len(checkpoint.tensors),
        num_files=len(files),
        bytes_written=total,
    )


def _by_file(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the tensors of each file in the order of their bytes, so that the base is read from start to end."""
    files: dict[str, list[str]] = {}
    for name, entry in sorted(checkpoint.tensors.items(), key=lambda item: (item[1].file.name, item[1].offset)):
        files.setdefault(entry.file.name, []).append(name)
    return files


def _write_index(file: Path, files: dict[str, list[str]], total_bytes: int) -> None:
    weight_map = {name: stored for stored, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _output(name: str, update: LoraModule | None, checkpoint: Checkpoint, factors: Checkpoint) -> OutputTensor:
    entry = checkpoint.tensors[name]
    pieces = (
        partial(checkpoint.chunks, name)
        if update is None
        else partial(_summed, update, entry, checkpoint, factors)
    )
    return OutputTensor(name, entry.dtype, entry.shape, entry.num_bytes, pieces)


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
        extremes = encode_floats(np.array([values.min(), values.max()], np.float32), entry.dtype)  # NaN is either
        if not (np.isfinite(values.max()) and np.isfinite(decode_floats(extremes, entry.dtype)).all()):
            raise CheckpointError(
                f"the merged {update.weight} would have values that {entry.dtype} does not hold (NaN or "
                "infinite); the update is too large, or the base is damaged: take another"
            )
        yield encode_floats(values, entry.dtype)
        begin = end


def _factor(factors: Checkpoint, name: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return a factor of an update, of the shape that was checked."""
    entry = factors.tensors.get(name)
    if entry is None or entry.shape != shape or entry.dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"the adapter in {factors.directory} was changed while read; merge it again")
    return decode_floats(factors.read(name), entry.dtype).reshape(shape)
