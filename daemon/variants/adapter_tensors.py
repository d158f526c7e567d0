"""Tensors of an adapter as they are stored: one scale for all, that of the rest is in their B."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from daemon.variants.manifest import Manifest, peft_config
from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import FLOAT_DTYPES, decode_floats, encode_floats
from fingerprint.lora import LoraAdapter, LoraModule
from fingerprint.lora.adapter import open_weights
from fingerprint.lora.adapter_config import parse_adapter_config

__all__ = ["TensorToStore", "changed_while_read", "check_readable", "common_scale", "tensors_to_store"]


def common_scale(modules: Sequence[LoraModule]) -> float:
    """Return the scale that most of ``modules`` have, not zero where one is not."""
    counts: dict[float, int] = {}
    for module in modules:
        counts[module.scale] = counts.get(module.scale, 0) + 1
    return max(counts, key=lambda scale: (scale != 0.0, counts[scale], scale))


@dataclass(frozen=True, slots=True)
class TensorToStore:
    """Tensor of an adapter's or a delta's file, as it is stored."""

    folder: Path  # of the adapter or delta
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    pieces: Callable[[], Iterator[bytes]]
    may_be_packed: bool  # where that saves


def tensors_to_store(adapter: LoraAdapter, scale: float) -> Iterator[TensorToStore]:
    """Yield the tensors of ``adapter`` with ``scale`` as that of every update.

    They stay plain: requests wait for the first load of an adapter, which unpacking makes longer.
    """
    weights = open_weights(adapter.folder)
    for module in adapter.modules:
        in_b = module.scale / scale if scale else 1.0
        shapes = ((module.rank, module.in_features), (module.out_features, module.rank))
        for name, shape, factor in zip(module.factors, shapes, (1.0, in_b), strict=True):
            entry = weights.tensors.get(name)
            if entry is None or entry.shape != shape or entry.dtype not in FLOAT_DTYPES:
                raise changed_while_read(name, adapter.folder)
            pieces = partial(_scaled_pieces, weights, name, factor)
            yield TensorToStore(
                adapter.folder, name, entry.dtype, shape, entry.num_bytes, pieces, may_be_packed=False
            )


def _scaled_pieces(weights: Checkpoint, name: str, factor: float) -> Iterator[bytes]:
    """Yield the bytes of a tensor, its values times ``factor``."""
    dtype = weights.tensors[name].dtype
    for piece in weights.chunks(name):
        if factor == 1.0:
            yield piece
            continue
        with np.errstate(over="ignore"):  # looked for below
            scaled = encode_floats(decode_floats(piece, dtype) * np.float32(factor), dtype)
        if not np.isfinite(decode_floats(scaled, dtype)).all():
            raise CheckpointError(
                f"tensor {name!r} of {weights.directory} is too large for {dtype} with its scale in it; save the "
                "adapter in float32"
            )
        yield scaled


def check_readable(manifest: Manifest, adapter: LoraAdapter) -> None:
    """Raise UnsupportedAdapterError where the configuration that is made of ``manifest`` cannot be read back."""
    config = parse_adapter_config(json.loads(peft_config(manifest)))
    names = [module.name for module in adapter.modules]
    found = config.rank_pattern.of_modules(names, config.rank)
    assert found == [module.rank for module in adapter.modules], adapter.folder


def changed_while_read(name: str, folder: Path) -> CheckpointError:
    return CheckpointError(f"tensor {name[:200]!r} of {folder} changed while it was read; add the adapter again")
