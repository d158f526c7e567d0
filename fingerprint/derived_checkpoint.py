"""Checkpoints with the files, names, order and types of a base, some of whose tensors have other values.

Whatever serves the base serves the result. Memory: what the caller holds of one tensor, and a few MiB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fingerprint.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from fingerprint.companion_files import copy_code, copy_companions, copy_files
from fingerprint.config_json import read_config
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import decode_floats, encode_floats
from fingerprint.safetensors_writer import OutputTensor, new_directory, write_safetensors

__all__ = ["Pieces", "Progress", "WrittenCheckpoint", "encode_finite", "write_derived"]

Pieces = Callable[[], Iterable[bytes]]  # bytes of a tensor in order, as many as the base's has
Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCheckpoint:
    """Counts of a checkpoint that was written."""

    num_tensors: int
    num_files: int  # safetensors files
    bytes_written: int  # of these files


def write_derived(
    base: Checkpoint,
    replaced: Mapping[str, Pieces],
    target: Path,
    *,
    progress: Progress | None = None,
    companions: Sequence[Path] = (),
    durable: bool = True,
) -> WrittenCheckpoint:
    """Write to ``target`` the checkpoint ``base`` with the tensors of ``replaced`` in place of its own.

    Args:
        target: a directory that is not there yet (or is empty); it appears whole or not at all.
        progress: called with bytes written so far and in all.
        companions: tokenizer and settings files that go in place of the base's.
        durable: all files are on the disk before the name appears.

    Raises:
        CheckpointError: a file is unreadable or the disk is full.
        ConflictError: ``target`` is there already.
        NotFoundError, ConfigError: as ``config_json.read_config``.
    """
    folder, config = base.directory, read_config(base.directory)
    total, done = sum(entry.num_bytes for entry in base.tensors.values()), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    files = _by_file(base)
    with new_directory(target, needed_bytes=total, durable=durable) as part:
        for file, names in files.items():
            tensors = [_output(name, replaced.get(name), base) for name in names]
            write_safetensors(part / file, tensors, on_bytes=on_bytes)
        copy_companions(folder, part)
        copy_files(companions, part)
        if "auto_map" in config:
            copy_code(folder, part)
        if [*files] != [SINGLE_FILE]:
            _write_index(part / INDEX_FILE, files, total)
        shutil.copyfile(folder / "config.json", part / "config.json")
    return WrittenCheckpoint(num_tensors=len(base.tensors), num_files=len(files), bytes_written=total)


def encode_finite(values: npt.NDArray[np.float32], dtype: str, name: str) -> bytes:
    """Return ``values`` in ``dtype``.

    Raises:
        CheckpointError: one of them is NaN, infinite or beyond what ``dtype`` holds; the tensor ``name`` is in the
            message.
    """
    extremes = encode_floats(np.array([values.min(), values.max()], np.float32), dtype)  # NaN is either
    if not (np.isfinite(values.max()) and np.isfinite(decode_floats(extremes, dtype)).all()):
        raise CheckpointError(
            f"the merged {name} would have values that {dtype} does not hold (NaN or infinite); the update is too "
            "large, or the base is damaged: take another"
        )
    return encode_floats(values, dtype)


def _by_file(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the tensors of each file in the order of their bytes, so that the base is read from start to end."""
    files: dict[str, list[str]] = {}
    for name, entry in sorted(checkpoint.tensors.items(), key=lambda item: (item[1].file.name, item[1].offset)):
        files.setdefault(entry.file.name, []).append(name)
    return files


def _write_index(file: Path, files: Mapping[str, list[str]], total_bytes: int) -> None:
    weight_map = {name: stored for stored, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    file.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _output(name: str, pieces: Pieces | None, base: Checkpoint) -> OutputTensor:
    entry = base.tensors[name]
    return OutputTensor(name, entry.dtype, entry.shape, entry.num_bytes, pieces or partial(base.chunks, name))
