"""Formats of compressed matrices: the levels that a code means, and the bytes that a matrix or a model takes.

A value is ``(code - zero) * scale`` with one scale for each group of 128 inputs of an output. Dense formats have
their levels half-way between whole numbers (1 bit: -0.5 and 0.5; 2 bits: -1.5, -0.5, 0.5, 1.5) and no zero. 2:4
formats need one and have whole numbers; they are kept as dense codes, which the same kernels read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from fingerprint.model_spec import ModelSpec

__all__ = [
    "DEFAULT_FORMAT",
    "EMBEDDING_FORMAT",
    "FORMATS",
    "GROUP",
    "TILE_ROWS",
    "WORD_BITS",
    "DeltaFormat",
    "delta_bytes",
]

GROUP = 128  # inputs that share a scale, and columns of a tile
TILE_ROWS = 64
WORD_BITS = 16
SCALE_BYTES = 2  # BF16


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaFormat:
    """Form in which the changes of a matrix are kept."""

    name: str
    bits: int
    """Bits of a code."""
    zero: float
    """Code that would mean 0, whole or not."""
    is_sparse: bool = False
    """Whether two of four neighbours in a row are 0."""
    finer: str | None
    """Format that a matrix gets when its error is too large in this one; None: there is none."""

    @property
    def levels(self) -> npt.NDArray[np.float32]:
        """Multiples of the scale that codes 0, 1, ... mean."""
        return np.arange(2**self.bits, dtype=np.float32) - np.float32(self.zero)

    @property
    def bits_per_weight(self) -> float:
        """Bits that a weight takes, its part of a scale included."""
        return self.bits + 8 * SCALE_BYTES / GROUP

    def holds(self, other: DeltaFormat) -> bool:
        """Return whether every level of ``other`` is a level of this format, for one scale."""
        offset = self.zero - other.zero
        return offset >= 0 and offset % 1 == 0 and offset + 2**other.bits <= 2**self.bits

    def codes_shape(self, shape: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return the shape of the 16-bit words that hold the codes of a matrix [outputs, inputs].

        Outputs are padded to whole tiles of 64 and inputs to whole groups.
        """
        tiles, groups = _padded(shape)
        return tiles, groups, TILE_ROWS, GROUP * self.bits // WORD_BITS

    def scales_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix [outputs, inputs], outputs padded to whole tiles."""
        tiles, groups = _padded(shape)
        return groups, tiles * TILE_ROWS

    def matrix_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of codes and scales of a matrix [outputs, inputs]."""
        words = prod(self.codes_shape(shape))
        return words * WORD_BITS // 8 + prod(self.scales_shape(shape)) * SCALE_BYTES


def _padded(shape: tuple[int, int]) -> tuple[int, int]:
    """Return the tiles of outputs and the groups of inputs that a matrix takes."""
    outputs, inputs = shape
    return -(-outputs // TILE_ROWS), -(-inputs // GROUP)


def _formats(*formats: DeltaFormat) -> Mapping[str, DeltaFormat]:
    return MappingProxyType({format_.name: format_ for format_ in formats})


FORMATS = _formats(
    DeltaFormat(name="int2", bits=2, zero=1.5, finer="int3"),
    DeltaFormat(name="int3", bits=3, zero=3.5, finer="int4"),
    DeltaFormat(name="int4", bits=4, zero=7.5, finer=None),
    DeltaFormat(name="sparse24-int4", bits=4, zero=8, is_sparse=True, finer="int4"),
    DeltaFormat(name="sparse24-int2", bits=2, zero=2, is_sparse=True, finer="int2"),
    DeltaFormat(name="int1", bits=1, zero=0.5, finer="int2"),
)
DEFAULT_FORMAT = FORMATS["int2"]
EMBEDDING_FORMAT = FORMATS["int4"]  # whatever the linears have: a token that is rare has no other row to help it


def delta_bytes(spec: ModelSpec, format_: DeltaFormat, *, has_vocabulary: bool = True) -> int:
    """Return the bytes of the delta of a model all of whose parameters were trained.

    Linears and the output layer in ``format_``, embeddings in ``EMBEDDING_FORMAT``, norms, biases and all else in
    16 bits. Exact where outputs are whole tiles and inputs whole groups; the padding of other matrices, which a
    specification does not tell, is not counted.

    Args:
        has_vocabulary: False: neither embeddings nor output layer were trained.
    """
    linears = spec.layer_linear_params * spec.num_layers
    rest = spec.layers_params - linears + spec.final_norm_params
    total = linears * format_.bits_per_weight + 16 * rest
    if has_vocabulary:
        embeddings = spec.embedding_params * EMBEDDING_FORMAT.bits_per_weight
        total += embeddings + spec.head_params * format_.bits_per_weight
    return int(total / 8)
