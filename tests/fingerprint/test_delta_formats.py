"""Formats of deltas: packing loses nothing, layouts are as documented, and bytes are those that are written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.delta.formats import DEFAULT_FORMAT, EMBEDDING_FORMAT, FORMATS, GROUP, TILE_ROWS, delta_bytes
from fingerprint.delta.packing import dequantize, pack_codes, pad_scales, unpack_codes
from fingerprint.families import load_spec
from iserve.demo import demo_model_path

shapes = st.tuples(st.integers(1, 140), st.integers(1, 300))


@given(st.sampled_from([1, 2, 3, 4]), shapes, st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_unpacking_is_the_inverse_of_packing(bits: int, shape: tuple[int, int], seed: int) -> None:
    codes = np.random.default_rng(seed).integers(2**bits, size=shape, dtype=np.uint8)
    words = pack_codes(codes, bits)
    format_ = replace(DEFAULT_FORMAT, bits=bits)
    assert words.shape == format_.codes_shape(shape)
    assert words.dtype == np.uint16
    assert np.array_equal(unpack_codes(words, bits, shape), codes)
    # Every word is valid: any bits are the codes of some matrix.
    whole = (words.shape[0] * TILE_ROWS, words.shape[1] * GROUP)
    assert np.array_equal(pack_codes(unpack_codes(words, bits, whole), bits), words)


@pytest.mark.parametrize("bits, expected", [(1, [1, 0]), (2, [1, 0]), (4, [1, 0])])
def test_a_word_holds_inputs_a_row_of_words_apart(bits: int, expected: list[int]) -> None:
    lanes = 8 * bits
    codes = np.zeros((TILE_ROWS, GROUP), np.uint8)
    codes[5, 3 + 2 * lanes] = 1  # position 2 of word 3
    words = pack_codes(codes, bits)
    assert words[0, 0, 5, 3] == 1 << 2 * bits
    assert np.count_nonzero(words) == 1


def test_three_bits_are_two_and_one() -> None:
    codes = np.zeros((TILE_ROWS, GROUP), np.uint8)
    codes[0, 1] = 0b110
    words = pack_codes(codes, 3)
    assert words.shape == (1, 1, TILE_ROWS, 24)
    assert words[0, 0, 0, 1] == 0b10  # of the row of two bits
    assert words[0, 0, 0, 16 + 1] == 0b1  # of the row of one, after it


def test_levels_are_those_of_the_study() -> None:
    levels = {name: format_.levels.tolist() for name, format_ in FORMATS.items()}
    assert levels["int1"] == [-0.5, 0.5]
    assert levels["int2"] == [-1.5, -0.5, 0.5, 1.5]
    assert levels["sparse24-int2"] == [-2, -1, 0, 1]
    assert levels["int3"] == [-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5]
    assert 0 in levels["sparse24-int4"]
    assert [format_.bits_per_weight for format_ in FORMATS.values()] == [2.125, 3.125, 4.125, 4.125, 2.125, 1.125]


def test_finer_formats_end() -> None:
    for name in FORMATS:
        seen = [name]
        while (finer := FORMATS[seen[-1]].finer) is not None:
            assert FORMATS[finer].bits >= FORMATS[seen[-1]].bits
            seen.append(finer)
        assert seen[-1] == "int4"


@given(st.sampled_from(list(FORMATS)), shapes, st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_a_value_is_its_level_times_its_groups_scale(name: str, shape: tuple[int, int], seed: int) -> None:
    random, format_ = np.random.default_rng(seed), FORMATS[name]
    codes = random.integers(2**format_.bits, size=shape, dtype=np.uint8)
    scales = random.random((shape[0], -(-shape[1] // GROUP))).astype(np.float32)
    padded = pad_scales(scales)
    assert padded.shape == format_.scales_shape(shape)
    values = dequantize(codes, padded, format_)
    for row, column in ((0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 2)):
        expected = np.float32(format_.levels[codes[row, column]] * scales[row, column // GROUP])
        assert values[row, column] == expected


@pytest.mark.parametrize("name", FORMATS)
def test_matrix_bytes_are_those_of_its_words_and_scales(name: str) -> None:
    format_, shape = FORMATS[name], (100, 300)
    words = pack_codes(np.zeros(shape, np.uint8), format_.bits)
    scales = pad_scales(np.zeros((100, 3), np.float32))
    assert format_.matrix_bytes(shape) == words.nbytes + scales.size * 2
    whole = (128, 256)
    assert format_.matrix_bytes(whole) == whole[0] * whole[1] * format_.bits_per_weight / 8


def test_bytes_of_a_model_are_those_of_its_matrices() -> None:
    """The demo model: 128 wide, every matrix whole tiles and groups but for its vocabulary of 258."""
    spec = load_spec(demo_model_path())
    layer = [(128, 128), (64, 128), (64, 128), (128, 128), (384, 128), (384, 128), (128, 384)]
    for format_ in FORMATS.values():
        linears = 8 * sum(format_.matrix_bytes(shape) for shape in layer)
        norms = 2 * (8 * 2 * 128 + 128)
        assert delta_bytes(spec, format_, has_vocabulary=False) == linears + norms
        embeddings = int(258 * 128 * EMBEDDING_FORMAT.bits_per_weight / 8)
        assert delta_bytes(spec, format_) == linears + norms + embeddings
