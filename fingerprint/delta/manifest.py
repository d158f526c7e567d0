"""Manifest of a delta: what it was made of and by, and every tensor that it has, by hash.

Stored as ``delta.json`` next to the safetensors files that it names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from fingerprint.codec import to_json

__all__ = [
    "MANIFEST_FILE",
    "MANIFEST_VERSION",
    "AdapterOrigin",
    "Calibration",
    "CompanionRecord",
    "DeltaManifest",
    "ExactTensor",
    "MatrixRecord",
    "TensorHash",
    "checkpoint_hash",
]

MANIFEST_FILE = "delta.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHash:
    """Tensor of the base."""

    name: str
    sha256: str  # of type, shape and bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Tokens whose activations the errors were weighted by."""

    sha256: str | None  # of the file of texts; None: random tokens
    num_texts: int  # of the file that were used
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixRecord:
    """Matrix whose changes are compressed: ``NAME.codes`` and ``NAME.scales`` in its file."""

    name: str  # of the base's tensor
    shape: tuple[int, int]  # outputs, inputs
    format: str
    error: float  # relative squared error of what the change adds to the outputs on the calibration texts
    weight_error: float  # relative squared error of the change itself
    file: str
    codes: str  # hashes
    scales: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactTensor:
    """Tensor that is kept as it is in the fine-tune, in the base's type and under its name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CompanionRecord:
    """Tokenizer or settings file of the fine-tune that differs from the base's."""

    name: str
    sha256: str  # of its bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOrigin:
    """Adapter that was merged into the base to make the fine-tune of a delta."""

    method: str  # PEFT's name, such as "LORA"
    kinds: tuple[str, ...]  # parts that no engine serves unmerged, such as "DoRA"
    sha256: str  # of its files


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaManifest:
    """Content of a delta. Nothing in it depends on when, where or in how many attempts it was made."""

    version: int
    format: str  # that was asked for; a matrix may have a finer one
    max_error: float | None  # that was asked for, of each matrix
    base_name: str
    base: tuple[TensorHash, ...]  # all tensors, by name
    finetuned_name: str
    finetuned_sha256: str
    calibration: Calibration | None  # None: every value was rounded by itself
    matrices: tuple[MatrixRecord, ...]  # by name
    exact: tuple[ExactTensor, ...]  # by name
    companions: tuple[CompanionRecord, ...]  # by name
    adapter: AdapterOrigin | None = None  # None: the fine-tune was a model

    @property
    def base_sha256(self) -> str:
        """Hash of the base: of its tensors' names and hashes."""
        return checkpoint_hash(self.base)

    @property
    def content_hash(self) -> str:
        """Hash of what changes answers: the base and all tensors of the delta, whatever their files."""
        matrices = [(each.name, each.shape, each.format, each.codes, each.scales) for each in self.matrices]
        exact = [(each.name, each.sha256) for each in self.exact]
        return sha256(to_json((self.base_sha256, matrices, exact))).hexdigest()

    @property
    def changed(self) -> tuple[MatrixRecord | ExactTensor, ...]:
        """Tensors that differ from the base's."""
        return (*self.matrices, *self.exact)

    @property
    def files(self) -> tuple[str, ...]:
        """Safetensors files, in the order of their names."""
        return tuple(sorted({each.file for each in self.changed}))


def checkpoint_hash(tensors: Iterable[TensorHash]) -> str:
    """Return the hash of a checkpoint whose ``tensors`` are in the order of their names."""
    digest = sha256()
    for tensor in tensors:
        digest.update(f"{tensor.name}\n{tensor.sha256}\n".encode())
    return digest.hexdigest()
