"""Safetensors headers and indexes, parsed from bytes: the tensors of a file, their types, shapes and ranges.

Pure: the bytes may come from a file or from a hub. No length, name or offset is believed before it is checked, and
nothing is known of models: names are only names. Format: https://huggingface.co/docs/safetensors (8-byte header
length, JSON header, tensors without gaps in between).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from math import prod
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated

import msgspec

from fingerprint.errors import CheckpointError
from fingerprint.json_members import JsonMembers, decode_canonical

__all__ = [
    "DTYPE_BITS",
    "INDEX_FILE",
    "LENGTH_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_INDEX_BYTES",
    "SINGLE_FILE",
    "DeclaredTensor",
    "StoredTensor",
    "check_num_tensors",
    "header_length",
    "parse_header",
    "parse_index",
    "tensors_of_index",
]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
LENGTH_BYTES = 8  # a header's length, before the header
# As many as the safetensors library reads. A tensor takes about 110 bytes there; the largest models have 200,000.
MAX_HEADER_BYTES = MAX_INDEX_BYTES = 100_000_000
MAX_TENSORS = 1_000_000  # of an index, and of all its files: bounds the memory of what is parsed
MAX_DIMENSIONS = 32
_MAX_ENTRY_CHARS = 4096  # 34 numbers of at most 19 digits, with white space between them
_MAX_INDEX_MEMBERS = 64
_MAX_METADATA = 10_000
_SORTED_AT_ONCE = 1_000
DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8)
    | dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
    | dict.fromkeys(("I32", "U32", "F32"), 32)
    | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
)
# The first member, where there is one; an unusual one is left to the slower reader.
_METADATA = re.compile(rb'\{"__metadata__":(\{(?:"[^"\\]*":"[^"\\]*",?){0,100}\}),')
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type and shape of a tensor, as its file's header declares them."""

    dtype: str  # safetensors' name, e.g. "BF16"
    shape: tuple[int, ...]


class DeclaredTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Entry of one tensor in a header; the fields have the format's own names, in the order of its writers."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]  # begin and end, in bytes from the end of the header


def header_length(first: bytes, what: str) -> int:
    """Return the header's length in bytes from the ``first`` eight of the file ``what``.

    Raises:
        CheckpointError: fewer than eight, a Git LFS pointer, or a header over 100 MB.
    """
    if len(first) < LENGTH_BYTES:
        raise CheckpointError(
            f"{what} has {len(first)} bytes, a safetensors file has at least {LENGTH_BYTES}; fetch it again"
        )
    if first == b"version ":
        raise CheckpointError(f"{what} is a Git LFS pointer, not the weights; run `git lfs pull`")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{what} claims a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed")
    return length


def parse_header(raw: bytes, what: str, file_bytes: int) -> dict[str, DeclaredTensor]:
    """Return the tensors that the header ``raw`` of the file ``what`` declares, by name.

    Args:
        raw: the header without its length.
        file_bytes: size of the whole file, which the tensors must fill.

    Raises:
        CheckpointError: not as the format has it, over a million tensors, or tensors that overlap, leave gaps, or
            do not end where the file ends.
    """
    data_start = LENGTH_BYTES + len(raw)
    tensors = _canonical_tensors(raw) or _any_tensors(raw, what)
    end = data_start
    for name, tensor in _by_offset(tensors):
        begin = data_start + tensor.data_offsets[0]
        _check_entry(tensor, what, name)
        if begin != end:
            kind = "overlaps the one before it" if begin < end else "leaves a gap before it"
            raise CheckpointError(f"{what}: tensor {name[:200]!r} at byte {begin} {kind} (ends at {end})")
        end = data_start + tensor.data_offsets[1]
    if end > file_bytes:
        raise CheckpointError(f"{what} is truncated: expected {end} bytes, has {file_bytes}; fetch it again")
    if end < file_bytes:
        raise CheckpointError(f"{what} has {file_bytes} bytes, its header accounts for {end}; fetch it again")
    return tensors


def _by_offset(tensors: Mapping[str, DeclaredTensor]) -> Iterator[tuple[str, DeclaredTensor]]:
    """Yield the tensors by offset, then size.

    They are sorted in runs that are merged: one call that sorts them all holds every other thread of the process,
    for seconds where a header names half a million.
    """
    rest = iter(tensors.items())
    runs = iter(lambda: sorted(islice(rest, _SORTED_AT_ONCE), key=_place), [])
    return merge(*runs, key=_place)


def _place(item: tuple[str, DeclaredTensor]) -> tuple[int, int]:
    return item[1].data_offsets


def _canonical_tensors(raw: bytes) -> dict[str, DeclaredTensor] | None:
    """Return the tensors of a header that is written as the safetensors library writes it, else None."""
    text = raw.rstrip(b" ")
    metadata = _METADATA.match(text)
    if metadata is None:
        return decode_canonical(text, 1, DeclaredTensor, b'},"', MAX_TENSORS)
    if decode_canonical(metadata[1], 1, str, b'","', _MAX_METADATA) is None:
        return None
    return decode_canonical(text, metadata.end(), DeclaredTensor, b'},"', MAX_TENSORS)


def _any_tensors(raw: bytes, what: str) -> dict[str, DeclaredTensor]:
    """Return the tensors of any valid header, or raise the error that says what is wrong in it."""
    header = JsonMembers(raw, f"the header of {what}")
    tensors: dict[str, DeclaredTensor] = {}
    for name in header.members():
        if name == "__metadata__":
            for number, _key in enumerate(header.members()):
                if number >= _MAX_METADATA:
                    raise CheckpointError(f"{what} has more than {_MAX_METADATA} keys in its __metadata__")
                header.string()
        elif len(tensors) >= MAX_TENSORS:
            raise CheckpointError(f"{what} has more than {MAX_TENSORS} tensors, which no model has")
        else:
            tensors[name] = _parse_entry(header.value(_MAX_ENTRY_CHARS), what, name)
            _check_entry(tensors[name], what, name)
    header.end()
    return tensors


def _parse_entry(value: object, what: str, name: str) -> DeclaredTensor:
    where = f"{what}: tensor {name[:200]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where} has dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPE_BITS)}")
    if not _is_sizes(shape):
        raise CheckpointError(f"{where} must have a shape of at most {MAX_DIMENSIONS} sizes from 0 to 2**63 - 1")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} must have data_offsets [begin, end], begin not above end")
    return DeclaredTensor(dtype, tuple(shape), (offsets[0], offsets[1]))


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_entry(tensor: DeclaredTensor, what: str, name: str) -> None:
    """Raise CheckpointError unless type, shape and offsets are possible and agree."""
    bits_each = DTYPE_BITS.get(tensor.dtype)
    begin, end = tensor.data_offsets
    if bits_each is None:
        wrong = f"has dtype {tensor.dtype[:40]!r}; known are {', '.join(DTYPE_BITS)}"
    elif len(tensor.shape) > MAX_DIMENSIONS:
        wrong = f"must have a shape of at most {MAX_DIMENSIONS} sizes from 0 to 2**63 - 1"
    elif begin > end:
        wrong = "must have data_offsets [begin, end], begin not above end"
    elif (bits := prod(tensor.shape) * bits_each) != 8 * (end - begin):
        wrong = (
            f"of {tensor.dtype} {str(list(tensor.shape))[:80]} takes {str(bits)[:40]} bits, "
            f"its data_offsets span {8 * (end - begin)}"
        )
    else:
        return
    raise CheckpointError(f"{what}: tensor {name[:200]!r} {wrong}")


def parse_index(raw: bytes, what: str) -> dict[str, str]:
    """Return the file of each tensor, by the index ``raw`` of a checkpoint in several files.

    Raises:
        CheckpointError: larger than 100 MB, not JSON, no weight_map, over a million tensors, or a file name that
            leads elsewhere or is of another kind.
    """
    if len(raw) > MAX_INDEX_BYTES:
        raise CheckpointError(f"{what} has {len(raw)} bytes, an index has at most {MAX_INDEX_BYTES}")
    index = JsonMembers(raw, what)
    weight_map: dict[str, str] = {}
    for number, key in enumerate(index.members()):
        if number >= _MAX_INDEX_MEMBERS:
            raise CheckpointError(f"{what} has more than {_MAX_INDEX_MEMBERS} members; an index has two")
        if key == "weight_map":
            weight_map = index.canonical_strings(MAX_TENSORS) or _any_weight_map(index, what)
        else:
            index.value(_MAX_ENTRY_CHARS)
    index.end()
    if not weight_map:
        raise CheckpointError(f"{what} has no weight_map from tensor to file; fetch it again")
    for file in set(weight_map.values()):
        _check_file_name(file, what)
    return weight_map


def _any_weight_map(index: JsonMembers, what: str) -> dict[str, str]:
    """Return any valid weight_map, or raise the error that says what is wrong in it."""
    weight_map: dict[str, str] = {}
    for tensor in index.members():
        if len(weight_map) >= MAX_TENSORS:
            raise CheckpointError(f"{what} has more than {MAX_TENSORS} tensors, which no model has")
        file = index.value(_MAX_ENTRY_CHARS)
        _check_file_name(file, what)
        weight_map[tensor] = file
    return weight_map


def _check_file_name(file: object, what: str) -> None:
    if (
        not isinstance(file, str)
        or PurePath(file).name != file
        or not file.endswith(".safetensors")
        or "\0" in file
    ):
        raise CheckpointError(
            f"{what} names {str(file)[:200]!r}; weights load from safetensors files next to the index only"
        )


def check_num_tensors(headers: Iterable[Sized], what: str) -> None:
    """Raise CheckpointError when the files of the index ``what`` have more than a million tensors together."""
    if sum(map(len, headers)) > MAX_TENSORS:
        raise CheckpointError(f"the files of {what} have more than {MAX_TENSORS} tensors, which no model has")


def tensors_of_index(
    weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, DeclaredTensor]], what: str
) -> Iterator[tuple[str, str, DeclaredTensor]]:
    """Yield name, file and declaration of every tensor of the index ``what``, by the headers of its files.

    Raises:
        CheckpointError: a file lacks a tensor that the index says is in it.
    """
    for name, file in weight_map.items():
        tensor = headers[file].get(name)
        if tensor is None:
            raise CheckpointError(f"{what} says that {name[:200]!r} is in {file}, which lacks it")
        yield name, file, tensor
