"""Full fine-tunes of the tiny random models as deltas, and their exports; deltas of given tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from daemon.variants.compress import CompressOrder, compress_delta
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.delta import FORMATS, Delta, export_delta, read_delta
from fingerprint.delta.manifest import MANIFEST_FILE, MANIFEST_VERSION, DeltaManifest, ExactTensor, TensorHash
from fingerprint.float_bytes import decode_floats, encode_floats
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from fingerprint.tensor_hash import tensor_hash

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


def write_exact_delta(folder: Path, tensors: Mapping[str, npt.NDArray[np.float32]]) -> Delta:
    """Write the delta of a fine-tune whose changed ``tensors`` are kept as they are, of no base; return it."""
    folder.mkdir(parents=True)
    file, outputs, exact = "delta-00000.safetensors", [], []
    for name, values in sorted(tensors.items()):
        raw = encode_floats(values, "F32")
        digest = tensor_hash("F32", values.shape, (raw,))
        outputs.append(OutputTensor(name, "F32", values.shape, len(raw), lambda raw=raw: (raw,)))  # type: ignore[misc]
        exact.append(ExactTensor(name=name, dtype="F32", shape=values.shape, file=file, sha256=digest))
    write_safetensors(folder / file, outputs)
    manifest = DeltaManifest(
        version=MANIFEST_VERSION,
        format="int2",
        max_error=None,
        base_name="base",
        base=tuple(TensorHash(name=each.name, sha256="0" * 64) for each in exact),
        finetuned_name="tuned",
        finetuned_sha256="0" * 64,
        calibration=None,
        matrices=(),
        exact=tuple(exact),
        companions=(),
    )
    (folder / MANIFEST_FILE).write_bytes(to_json(manifest))
    return read_delta(folder)


def write_export(base: Path, delta: Path, folder: Path) -> Path:
    """Write base + delta as a checkpoint; return its folder."""
    export_delta(base, read_delta(delta), folder)
    return folder
