"""Bit fields of compressed matrices: codes to tiles of 16-bit words and back, and the values that they mean.

A tile of 64 outputs and 128 inputs is contiguous. In a row of a tile, word j holds the codes of inputs j, j + W,
j + 2 W, ... from its lowest bits on, W being the words of a row: position i of all words is a contiguous piece of
W inputs, so that a kernel multiplies it with a contiguous piece of the activations. Three bits are a row of the
two lower ones, then a row of the highest: a code never lies in two words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fingerprint.delta.formats import GROUP, TILE_ROWS, WORD_BITS, DeltaFormat

__all__ = ["dequantize", "pack_codes", "pad_scales", "planes", "unpack_codes"]

Codes = npt.NDArray[np.uint8]  # [outputs, inputs]
Words = npt.NDArray[np.uint16]  # [tiles, groups, 64, words]
Floats = npt.NDArray[np.float32]


def pack_codes(codes: Codes, bits: int) -> Words:
    """Return the words of ``codes`` [outputs, inputs], all below 2**bits; padding is of code 0."""
    outputs, inputs = codes.shape
    padded = np.pad(codes, ((0, -outputs % TILE_ROWS), (0, -inputs % GROUP)))
    tiles = padded.reshape(padded.shape[0] // TILE_ROWS, TILE_ROWS, -1, GROUP).transpose(0, 2, 1, 3)
    rows, low = [], 0
    for width in planes(bits):
        rows.append(_pack_row((tiles >> low) & (2**width - 1), width))
        low += width
    return np.concatenate(rows, axis=-1)


def unpack_codes(words: Words, bits: int, shape: tuple[int, int]) -> Codes:
    """Return the codes [outputs, inputs] of ``shape`` that ``words`` hold, without their padding."""
    tiles, groups = words.shape[:2]
    codes = np.zeros((tiles, groups, TILE_ROWS, GROUP), np.uint8)
    first, low = 0, 0
    for width in planes(bits):
        end = first + GROUP * width // WORD_BITS
        codes |= _unpack_row(words[..., first:end], width) << np.uint8(low)
        first, low = end, low + width
    return codes.transpose(0, 2, 1, 3).reshape(tiles * TILE_ROWS, groups * GROUP)[: shape[0], : shape[1]]


def pad_scales(scales: Floats) -> Floats:
    """Return the scales [groups, padded outputs] of ``scales`` [outputs, groups]; padding is 0."""
    return np.ascontiguousarray(np.pad(scales, ((0, -len(scales) % TILE_ROWS), (0, 0))).T)


def dequantize(codes: Codes, scales: Floats, format_: DeltaFormat) -> Floats:
    """Return the values [outputs, inputs] of codes, by the scales [groups, padded outputs] of a matrix."""
    outputs, inputs = codes.shape
    values = format_.levels[codes]
    with np.errstate(over="ignore"):  # looked for where the sum with the base is rounded
        for group in range(-(-inputs // GROUP)):
            values[:, group * GROUP : (group + 1) * GROUP] *= scales[group, :outputs, None]
    return values


def planes(bits: int) -> tuple[int, ...]:
    """Return the widths that divide a word, which together are ``bits``."""
    return (2, 1) if bits == 3 else (bits,)


def _pack_row(fields: Codes, width: int) -> Words:
    per_word = WORD_BITS // width
    lanes = fields.reshape(*fields.shape[:-1], per_word, GROUP // per_word).astype(np.uint16)
    words = np.zeros((*fields.shape[:-1], GROUP // per_word), np.uint16)
    for place in range(per_word):
        words |= lanes[..., place, :] << np.uint16(width * place)
    return words


def _unpack_row(words: Words, width: int) -> Codes:
    places = [(words >> np.uint16(low)) & np.uint16(2**width - 1) for low in range(0, WORD_BITS, width)]
    return np.concatenate(places, axis=-1).astype(np.uint8)
