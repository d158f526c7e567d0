"""Random adapters and deltas of a fingerprint: what a variant takes does not depend on its values.

An adapter updates every linear of the layers. A delta changes all that a full fine-tune does: linears and output
layer in its format, embeddings in ``EMBEDDING_FORMAT``, norms as they are. Same number, same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fingerprint.checkpoint import CHUNK_BYTES, INDEX_FILE, SINGLE_FILE, Checkpoint
from fingerprint.codec import to_json
from fingerprint.delta.formats import EMBEDDING_FORMAT, FORMATS, DeltaFormat
from fingerprint.delta.manifest import MANIFEST_FILE, MANIFEST_VERSION, DeltaManifest, ExactTensor, MatrixRecord
from fingerprint.delta.manifest import TensorHash as BaseHash
from fingerprint.delta.reader import CODES_DTYPE, SCALES_DTYPE, codes_name, scales_name
from fingerprint.families import family_of, read_blueprint, read_config
from fingerprint.float_bytes import encode_floats
from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE
from fingerprint.safetensors_writer import OutputTensor, new_directory, write_safetensors
from fingerprint.tensor_hash import tensor_hash
from fingerprint.tensor_shapes import Role, TensorShape
from fingerprint.variant_measurements import VariantKind

__all__ = ["base_hashes", "write_random_variant"]

_DEVIATION = 0.01  # of factors: as small as what training leaves
_SCALE = 0.001  # of a delta's levels
_BLOCK_VALUES = 1 << 20  # random values, which are repeated
_DELTA_FILE = "delta-00001.safetensors"
_Make = Callable[[np.random.Generator], bytes]


def base_hashes(base: Path) -> tuple[BaseHash, ...]:
    """Read the whole checkpoint in ``base``, and return its tensors' hashes, which each of its deltas names."""
    checkpoint = Checkpoint.open(base)
    return tuple(
        BaseHash(name=name, sha256=tensor_hash(entry.dtype, entry.shape, checkpoint.chunks(name)))
        for name, entry in sorted(checkpoint.tensors.items())
    )


def write_random_variant(
    base: Path,
    target: Path,
    kind: VariantKind,
    number: int,
    *,
    hashes: Callable[[Path], tuple[BaseHash, ...]] = base_hashes,
) -> int:
    """Write to ``target`` variant ``number`` of the model in ``base``, and return its tensors' bytes.

    Args:
        base: a folder with config.json; a delta of one with weights names its tensors by their hashes.
        target: a folder that is not there yet.
        hashes: called with ``base``, for deltas of one with weights alone.

    Raises:
        IserveError: ``base`` cannot be read, or its family has no table of tensors.
    """
    blueprint = read_blueprint(config := read_config(base))
    stack = family_of(config).layout.layers
    layers = [
        TensorShape(f"{stack}.{index}.{shape.name}", shape.shape, shape.role)
        for index in range(blueprint.spec.num_layers)
        for shape in blueprint.layer
    ]
    if kind.is_delta:
        tensors, format_ = [*layers, *blueprint.rest], FORMATS[kind.delta_format]
        has_weights = any((base / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
        if not has_weights:  # an engine makes them
            known = {tensor.name: _Known("BF16", tensor.shape) for tensor in tensors}
            return _write_delta(known, (), target, tensors, format_, number)
        read = Checkpoint.open(base).tensors
        known = {name: _Known(entry.dtype, tuple(entry.shape)) for name, entry in read.items()}
        return _write_delta(known, hashes(base), target, tensors, format_, number)
    return _write_adapter(target, [shape for shape in layers if _is_matrix(shape)], kind.rank, number)


class _Known(NamedTuple):
    """Tensor of the base."""

    dtype: str
    shape: tuple[int, ...]


def _is_matrix(tensor: TensorShape) -> bool:
    return tensor.role is Role.LINEAR and len(tensor.shape) == 2


def _write_adapter(target: Path, matrices: list[TensorShape], rank: int, number: int) -> int:
    values = _Values(number)
    tensors = []
    for matrix in matrices:
        name, (outputs, inputs) = f"base_model.model.{matrix.name.removesuffix('.weight')}", matrix.shape
        tensors.append(values.floats(f"{name}.lora_A.weight", (rank, inputs)))
        tensors.append(values.floats(f"{name}.lora_B.weight", (outputs, rank)))
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "fingerprint",
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({matrix.name.removesuffix(".weight").rpartition(".")[2] for matrix in matrices}),
        "inference_mode": True,
    }
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    with new_directory(target, needed_bytes=num_bytes) as part:
        write_safetensors(part / WEIGHTS_FILE, tensors)
        (part / CONFIG_FILE).write_text(json.dumps(fields), encoding="utf-8")
    return num_bytes


def _write_delta(
    known: Mapping[str, _Known],
    hashes: tuple[BaseHash, ...],
    target: Path,
    tensors: list[TensorShape],
    format_: DeltaFormat,
    number: int,
) -> int:
    values = _Values(number)
    matrices, exact, written = [], [], []
    for tensor in sorted(tensors, key=lambda each: each.name):
        entry = known.get(tensor.name)
        if entry is None:
            continue
        if tensor.role is Role.NORM:
            norm = values.floats(tensor.name, entry.shape, dtype=entry.dtype, around=1.0)
            exact.append(
                ExactTensor(
                    name=tensor.name, dtype=entry.dtype, shape=entry.shape, file=_DELTA_FILE, sha256=_hash(norm)
                )
            )
            written.append(norm)
        elif len(entry.shape) == 2 and tensor.role in (Role.LINEAR, Role.EMBEDDING, Role.HEAD):
            of = EMBEDDING_FORMAT if tensor.role is Role.EMBEDDING else format_
            shape = (entry.shape[0], entry.shape[1])
            codes = values.words(codes_name(tensor.name), of.codes_shape(shape))
            scales = values.scales(scales_name(tensor.name), of.scales_shape(shape))
            matrices.append(
                MatrixRecord(
                    name=tensor.name,
                    shape=shape,
                    format=of.name,
                    error=1.0,
                    weight_error=1.0,
                    file=_DELTA_FILE,
                    codes=_hash(codes),
                    scales=_hash(scales),
                )
            )
            written += (codes, scales)
    manifest = DeltaManifest(
        version=MANIFEST_VERSION,
        format=format_.name,
        max_error=None,
        base_name="fingerprint",
        base=hashes,
        finetuned_name="random",
        finetuned_sha256="0" * 64,
        calibration=None,
        matrices=tuple(matrices),
        exact=tuple(exact),
        companions=(),
    )
    num_bytes = sum(tensor.num_bytes for tensor in written)
    with new_directory(target, needed_bytes=num_bytes) as part:
        write_safetensors(part / _DELTA_FILE, written)
        (part / MANIFEST_FILE).write_bytes(to_json(manifest))
    return num_bytes


def _hash(tensor: OutputTensor) -> str:
    return tensor_hash(tensor.dtype, tensor.shape, (bytes(piece) for piece in tensor.pieces()))


@dataclass
class _Values:
    """Random values in blocks that are repeated."""

    number: int
    _blocks: dict[tuple[str, float], bytes] = field(default_factory=dict)

    def floats(
        self, name: str, shape: tuple[int, ...], *, dtype: str = "BF16", around: float = 0.0
    ) -> OutputTensor:
        return self._tensor(name, dtype, shape, self._floats(dtype, around))

    def words(self, name: str, shape: tuple[int, ...]) -> OutputTensor:
        block = self._block("words", 0.0, lambda random: random.bytes(2 * _BLOCK_VALUES))
        return self._tensor(name, CODES_DTYPE, shape, block)

    def scales(self, name: str, shape: tuple[int, ...]) -> OutputTensor:
        block = self._block(
            "scales",
            0.0,
            lambda random: encode_floats(
                _SCALE * (0.5 + random.random(_BLOCK_VALUES, dtype=np.float32)), SCALES_DTYPE
            ),
        )
        return self._tensor(name, SCALES_DTYPE, shape, block)

    def _floats(self, dtype: str, around: float) -> bytes:
        def made(random: np.random.Generator) -> bytes:
            values = random.standard_normal(_BLOCK_VALUES, dtype=np.float32) * np.float32(_DEVIATION)
            return encode_floats(values + np.float32(around), dtype)

        return self._block(dtype, around, made)

    def _block(self, what: str, around: float, make: _Make) -> bytes:
        if (what, around) not in self._blocks:
            self._blocks[what, around] = make(np.random.default_rng(self.number))
        return self._blocks[what, around]

    @staticmethod
    def _tensor(name: str, dtype: str, shape: tuple[int, ...], block: bytes) -> OutputTensor:
        width = len(block) // _BLOCK_VALUES
        num_bytes = width * prod(shape)

        def pieces() -> Iterator[memoryview]:
            left = num_bytes
            while left:
                piece = memoryview(block)[: min(left, CHUNK_BYTES)]
                yield piece
                left -= len(piece)

        return OutputTensor(name, dtype, shape, num_bytes, pieces)
