"""Manifests of stored variants: the tensors of a LoRA adapter by their hashes, and the one scale of its updates;
those of a delta, and its own manifest.

A manifest has what changes answers and nothing else: its own hash names the content. The scale is one for the
whole adapter because vLLM 0.24 reads ``r`` and ``lora_alpha`` and neither ``rank_pattern`` nor ``alpha_pattern``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod

from fingerprint.checkpoint import DTYPE_BITS
from fingerprint.codec import from_json, to_json
from fingerprint.delta import DeltaManifest
from fingerprint.delta.manifest import MANIFEST_FILE
from fingerprint.delta.reader import codes_name, scales_name
from fingerprint.errors import BadInputError, CheckpointError
from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE

__all__ = [
    "DELTA_WEIGHTS_FILE",
    "DeltaContent",
    "Manifest",
    "TensorRecord",
    "peft_config",
    "read_manifest",
    "referenced_tensors",
]

DELTA_WEIGHTS_FILE = "delta-00000.safetensors"

_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """Tensor of a variant."""

    name: str  # as PEFT names it
    sha256: str  # of type, shape and bytes
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a variant."""

    scale: float  # factor of B @ A, of every module
    tensors: tuple[TensorRecord, ...]  # in the order of their names

    @property
    def content_hash(self) -> str:
        return sha256(to_json(self)).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def weights_file(self) -> str:
        """Name of the file of tensors in a loadable folder."""
        return WEIGHTS_FILE

    @property
    def config_file(self) -> tuple[str, bytes]:
        """Name and content of the file next to it."""
        return CONFIG_FILE, peft_config(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaContent:
    """Content of a variant that is a delta of a full fine-tune."""

    tensors: tuple[TensorRecord, ...]  # in the order of their names
    delta: DeltaManifest

    @property
    def content_hash(self) -> str:
        return self.delta.content_hash

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def weights_file(self) -> str:
        """Name of the file of tensors in a loadable folder."""
        return DELTA_WEIGHTS_FILE

    @property
    def config_file(self) -> tuple[str, bytes]:
        """Name and content of the file next to it."""
        return MANIFEST_FILE, to_json(self.delta)

    def names_its_tensors(self) -> bool:
        """Return whether the tensors have the hashes of the delta's manifest, which the content hash covers."""
        said = {tensor.name: tensor.sha256 for tensor in self.delta.exact}
        for matrix in self.delta.matrices:
            said |= {codes_name(matrix.name): matrix.codes, scales_name(matrix.name): matrix.scales}
        return said == {tensor.name: tensor.sha256 for tensor in self.tensors}


@dataclass(frozen=True, slots=True)
class _Version:
    version: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """Field by which the manifest of a delta differs from that of an adapter."""

    delta: _Version | None = None


@dataclass(frozen=True, slots=True)
class _Reference:
    sha256: str


@dataclass(frozen=True, slots=True)
class _References:
    """The hashes of a manifest alone, which are read faster than all of it."""

    tensors: tuple[_Reference, ...]


def read_manifest(data: bytes, content_hash: str) -> Manifest | DeltaContent:
    """Return the manifest in ``data``.

    Raises:
        CheckpointError: it is not the manifest of ``content_hash``.
    """
    what = f"the manifest of variant {content_hash[:16]}"
    try:
        manifest: Manifest | DeltaContent
        manifest = (
            from_json(data, DeltaContent, what=what) if _is_delta(data) else from_json(data, Manifest, what=what)
        )
    except BadInputError as error:
        raise CheckpointError(f"{error}; add the adapter again") from error
    is_same = manifest.content_hash == content_hash
    if not is_same or (isinstance(manifest, DeltaContent) and not manifest.names_its_tensors()):
        raise CheckpointError(f"{what} was changed; add the adapter again")
    return manifest


def _is_delta(data: bytes) -> bool:
    try:
        return from_json(data, _Kind, what="a manifest").delta is not None
    except BadInputError:  # which the caller reports
        return False


def referenced_tensors(data: bytes) -> frozenset[str]:
    """Return the hashes of the tensors that the manifest in ``data`` names. Raises BadInputError."""
    return frozenset(tensor.sha256 for tensor in from_json(data, _References, what="a manifest").tensors)


def peft_config(manifest: Manifest) -> bytes:
    """Return an ``adapter_config.json`` of which vLLM and ``fingerprint.lora`` read the same ranks and scale."""
    ranks = _ranks(manifest)
    rank = max(ranks.values())
    smaller = {name: each for name, each in sorted(ranks.items()) if each != rank}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "bias": "none",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _number(manifest.scale * rank),
        "target_modules": sorted({name.rpartition(".")[2] for name in ranks}),
        # The same scale at a smaller rank; ``^``: the end of no other name.
        "rank_pattern": {_exactly(name): each for name, each in smaller.items()},
        "alpha_pattern": {_exactly(name): _number(manifest.scale * each) for name, each in smaller.items()},
    }
    return json.dumps(fields, indent=2).encode() + b"\n"


def _ranks(manifest: Manifest) -> Mapping[str, int]:
    """Return the rank of each module: the rows of its A."""
    found = ((_FACTOR.fullmatch(tensor.name), tensor.shape) for tensor in manifest.tensors)
    return {match[1]: shape[0] for match, shape in found if match is not None and match[2] == "A"}


def _exactly(name: str) -> str:
    return "^" + name.replace(".", r"\.")


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() else value
