"""Full fine-tunes of the tiny random models as deltas, and their exports."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from daemon.variants.compress import CompressOrder, compress_delta
from fingerprint.checkpoint import Checkpoint
from fingerprint.delta import FORMATS, export_delta, read_delta
from fingerprint.float_bytes import decode_floats, encode_floats
from fingerprint.safetensors_writer import OutputTensor, write_safetensors

CHANGE = 0.3  # of a weight's usual size: the fine-tune has other tokens


def write_fine_tune(
    base: Path, folder: Path, seed: int, is_changed: Callable[[str], bool] = bool, change: float = CHANGE
) -> Path:
    """Write a checkpoint of which every tensor of ``base`` that ``is_changed`` is changed at random."""
    folder.mkdir(parents=True)
    random, outputs, checkpoint = np.random.default_rng(seed), [], Checkpoint.open(base)
    for name, entry in sorted(checkpoint.tensors.items()):
        raw = checkpoint.read(name)
        if entry.dtype in ("F32", "BF16") and is_changed(name):
            values = decode_floats(raw, entry.dtype)
            size = np.float32(change) * values.std() + np.float32(0.01)
            raw = encode_floats(
                values + size * random.standard_normal(values.shape).astype(np.float32), entry.dtype
            )
        outputs.append(OutputTensor(name, entry.dtype, entry.shape, len(raw), lambda raw=raw: (raw,)))  # type: ignore[misc]
    write_safetensors(folder / "model.safetensors", outputs)
    for file in base.glob("*.json"):
        if "index" not in file.name:
            shutil.copyfile(file, folder / file.name)
    return folder


def write_tiny_delta(
    base: Path,
    folder: Path,
    format_name: str,
    seed: int,
    is_changed: Callable[[str], bool] = bool,
    change: float = CHANGE,
) -> Path:
    """Write to ``folder / "delta"`` the delta of a random fine-tune, every value rounded by itself; return it."""
    tuned = write_fine_tune(base, folder / "tuned", seed, is_changed, change)
    order = CompressOrder(
        base=base,
        finetuned=tuned,
        target=folder / "delta",
        format=FORMATS[format_name],
        calibration=None,
        max_error=None,
        base_name="base",
        finetuned_name="tuned",
        is_compensated=False,
    )
    compress_delta(order)
    return folder / "delta"


def write_export(base: Path, delta: Path, folder: Path) -> Path:
    """Write base + delta as a checkpoint; return its folder."""
    export_delta(base, read_delta(delta), folder)
    return folder
