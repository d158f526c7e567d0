"""Delta kernels without Triton: formats as they are in files, the reference, the assembly, and the route."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.delta.formats import FORMATS as FILE_FORMATS
from fingerprint.delta.packing import dequantize, pack_codes, unpack_codes
from tests.daemon.variant_kernels import variant_module

formats = variant_module("formats")
reference = variant_module("reference")
assembly = variant_module("assembly")
Route = variant_module("route").Route


def test_formats_are_those_of_files() -> None:
    assert formats.FORMATS.keys() == FILE_FORMATS.keys()
    for name, format_ in formats.FORMATS.items():
        file_format = FILE_FORMATS[name]
        assert (format_.bits, format_.zero) == (file_format.bits, file_format.zero)
        for shape in ((64, 128), (100, 200), (1, 1)):
            assert format_.codes_shape(*shape) == file_format.codes_shape(shape)
            assert format_.scales_shape(*shape) == file_format.scales_shape(shape)
            assert format_.matrix_bytes(*shape) == file_format.matrix_bytes(shape)


@pytest.mark.parametrize("name", sorted(FILE_FORMATS))
def test_reference_reads_what_files_have(name: str) -> None:
    format_, shape, random = FILE_FORMATS[name], (100, 300), np.random.default_rng(0)
    codes = random.integers(0, 2**format_.bits, shape).astype(np.uint8)
    scales = random.uniform(0.001, 0.01, format_.scales_shape(shape)).astype(np.float32)
    words = torch.from_numpy(pack_codes(codes, format_.bits).view(np.int16))
    found = reference.dequantize(words, torch.from_numpy(scales), formats.FORMATS[name])
    np.testing.assert_array_equal(found[:100, :300].numpy(), dequantize(codes, scales, format_))


@pytest.mark.parametrize("name", sorted(FILE_FORMATS))
def test_assembly_makes_the_values_of_codes(name: str) -> None:
    """Two words in a register become, place by place, two bfloat16 numbers ``code - zero``, exactly."""
    format_, random = FILE_FORMATS[name], np.random.default_rng(1)
    words = random.integers(0, 2**16, (1, 1, 64, format_.bits * 8)).astype(np.uint16)
    want = unpack_codes(words, format_.bits, (64, 128)).astype(np.float32) - np.float32(format_.zero)
    text = assembly.splice_asm(format_.bits, format_.zero)
    lanes, doubled = max(16, words.shape[-1]) if format_.bits != 3 else 16, format_.bits in (1, 3)
    for row in range(0, 64, 7):
        for lane in range(0, lanes, 2):
            single = words[0, 0, row, -8:][lane % 8 :][:2]  # of single bits, which two lanes share
            inputs = [_register(single if format_.bits == 1 else words[0, 0, row, lane : lane + 2])]
            inputs += [_register(single)] if format_.bits == 3 else []
            inputs += [(lane // 8) * 0x00010001] if doubled else []
            for place, value in enumerate(_run(text, inputs)):
                found = [_bfloat16(value & 0xFFFF), _bfloat16(value >> 16)]
                assert found == want[row, place * lanes + lane :][:2].tolist()


def _register(pair: np.ndarray) -> int:
    return int(pair[0]) | int(pair[1]) << 16


def _bfloat16(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def _run(text: str, inputs: list[int]) -> list[int]:
    """Execute inline assembly of the few instructions that the kernels use, and return its outputs."""
    registers: dict[str, int] = {}
    outputs = 1 + max(int(name) for name in re.findall(r"\$(\d+)", text)) - len(inputs)
    registers.update({f"${outputs + index}": value for index, value in enumerate(inputs)})
    for line in text.strip("{} \n").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if operation in (".reg", ""):
            continue
        target, *names = [name.strip() for name in rest.split(",")]
        values = [registers[name] if name in registers else int(name, 0) for name in names]
        match operation:
            case "mov.b32":
                result = values[0]
            case "shl.b32":
                result = values[0] << values[1]
            case "shr.b32":
                result = values[0] >> values[1]
            case "and.b32":
                result = values[0] & values[1]
            case "lop3.b32":
                assert values[3] == 0xEA
                result = values[0] & values[1] | values[2]
            case "fma.rn.bf16x2":
                result = _fma(*values)
            case _:
                raise AssertionError(f"unknown instruction: {line}")
        registers[target] = result & 0xFFFFFFFF
    return [registers[f"${index}"] for index in range(outputs)]


def _fma(a: int, b: int, c: int) -> int:
    result = 0
    for shift in (0, 16):
        x, y, z = (_bfloat16(value >> shift & 0xFFFF) for value in (a, b, c))
        bits = int(np.array([x * y + z], np.float32).view(np.uint32)[0])
        assert bits & 0xFFFF == 0, "the sum is no bfloat16 number"
        result |= (bits >> 16) << shift
    return result


@given(
    mix=st.lists(st.integers(-2, 6), min_size=1, max_size=40),
    segment_rows=st.sampled_from([1, 4, 8, 32]),
    before=st.lists(st.integers(-2, 6), min_size=1, max_size=40),
)
def test_segments_have_each_routed_row_once(mix: list[int], segment_rows: int, before: list[int]) -> None:
    slots = 5
    route = Route.empty(max_rows=40, slots=slots, segment_rows=segment_rows, device="cpu")
    route.fill(torch.tensor(before))
    route.fill(torch.tensor(mix))
    segments = route.segments[: int(route.num_segments)].tolist()
    assert int(route.num_segments) <= len(route.segments)
    served = []
    for slot, first, count, _ in segments:
        assert 1 <= count <= segment_rows
        rows = route.order[first : first + count].tolist()
        assert all(mix[row] == slot for row in rows)
        served += rows
    assert sorted(served) == [row for row, slot in enumerate(mix) if 0 <= slot < slots]
    for (slot, _, count, _), (following, *_) in pairwise(segments):
        assert slot < following or (slot == following and count == segment_rows)
