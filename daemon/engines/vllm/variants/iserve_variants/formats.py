"""Formats of packed codes as kernels read them; the words are laid out as ``fingerprint.delta`` writes them.

A value is ``(code - zero) * scale``, with one scale for 128 inputs of an output. Words of 16 bits lie in tiles of
64 outputs and 128 inputs. In a row of a tile, word j holds at position i the code of input ``i * lanes + j``.
Three bits are 16 words of the two lower ones, then 8 words of the highest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["FORMATS", "GROUP", "TILE_ROWS", "CodeFormat", "padded"]

GROUP = 128
TILE_ROWS = 64
_WORD_BITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeFormat:
    """Bits of a code, and the code that would mean 0."""

    bits: int
    zero: float

    @property
    def words(self) -> int:
        """16-bit words that 128 inputs of an output take."""
        return GROUP * self.bits // _WORD_BITS

    def holds(self, other: CodeFormat) -> bool:
        """Return whether every level of ``other`` is a level of this format, for one scale."""
        offset = self.zero - other.zero
        return offset >= 0 and offset % 1 == 0 and offset + 2**other.bits <= 2**self.bits

    def codes_shape(self, outputs: int, inputs: int) -> tuple[int, int, int, int]:
        """Return the shape of the words of a matrix: [tiles, groups, 64, words]."""
        tiles, groups = padded(outputs, inputs)
        return tiles, groups, TILE_ROWS, self.words

    def scales_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the scales of a matrix: [groups, outputs padded to whole tiles]."""
        tiles, groups = padded(outputs, inputs)
        return groups, tiles * TILE_ROWS

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of codes and scales of a matrix."""
        tiles, groups = padded(outputs, inputs)
        return tiles * TILE_ROWS * groups * (self.words + 1) * 2


def padded(outputs: int, inputs: int) -> tuple[int, int]:
    """Return the tiles of 64 outputs and the groups of 128 inputs that a matrix takes."""
    return -(-outputs // TILE_ROWS), -(-inputs // GROUP)


FORMATS: Mapping[str, CodeFormat] = MappingProxyType(
    {
        "int1": CodeFormat(bits=1, zero=0.5),
        "int2": CodeFormat(bits=2, zero=1.5),
        "int3": CodeFormat(bits=3, zero=3.5),
        "int4": CodeFormat(bits=4, zero=7.5),
        "sparse24-int2": CodeFormat(bits=2, zero=2),
        "sparse24-int4": CodeFormat(bits=4, zero=8),
    }
)
