"""Tensors of a delta as they are stored, and its manifest with all of them in one file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from daemon.variants.adapter_tensors import TensorToStore
from daemon.variants.manifest import DELTA_WEIGHTS_FILE
from fingerprint.delta import Delta, DeltaManifest

__all__ = ["delta_manifest", "delta_tensors_to_store"]


def delta_tensors_to_store(delta: Delta) -> Iterator[TensorToStore]:
    """Yield the codes, scales and exact tensors of ``delta``."""
    for file in delta.manifest.files:
        checkpoint = delta.files[file]
        for name, entry in checkpoint.tensors.items():
            pieces = partial(checkpoint.chunks, name)
            yield TensorToStore(
                delta.folder, name, entry.dtype, entry.shape, entry.num_bytes, pieces, may_be_packed=True
            )


def delta_manifest(delta: Delta) -> DeltaManifest:
    """Return the manifest of the stored form, without tokenizer and settings: the base's are used."""
    manifest = delta.manifest
    return replace(
        manifest,
        matrices=tuple(replace(each, file=DELTA_WEIGHTS_FILE) for each in manifest.matrices),
        exact=tuple(replace(each, file=DELTA_WEIGHTS_FILE) for each in manifest.exact),
        companions=(),
    )
