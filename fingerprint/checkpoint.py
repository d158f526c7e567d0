"""Safetensors checkpoints by byte range: which tensors there are, and their bytes in small pieces.

Standard library only; nothing is mapped, unpickled or held whole. It believes no length, name or offset in a file
before checking it, and knows nothing of models: names are only names. Format:
https://huggingface.co/docs/safetensors (8-byte header length, JSON header, tensors without gaps in between).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fingerprint.errors import CheckpointError, NotFoundError
from fingerprint.json_members import JsonMembers

__all__ = ["CHUNK_BYTES", "DTYPE_BITS", "Checkpoint", "TensorEntry", "indexed_files", "read_header"]

CHUNK_BYTES = 4 * 2**20
# The safetensors library reads headers of 100 MB; with 110 bytes to
# a tensor these 32 MiB are 300,000 tensors in a file, more than the largest models have in all their files.
MAX_HEADER_BYTES = MAX_INDEX_BYTES = 32 * 2**20
MAX_DIMENSIONS = 32
_MAX_ENTRY_CHARS = 4096  # 34 numbers of at most 19 digits, with white space between them
_MAX_INDEX_MEMBERS = 64
_MAX_METADATA = 10_000
_SORTED_AT_ONCE = 1_000
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8)
    | dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
    | dict.fromkeys(("I32", "U32", "F32"), 32)
    | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    file: Path
    dtype: str  # safetensors' name, e.g. "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class Checkpoint:
    """The tensors of a checkpoint directory. Opening it reads headers only.

    Attributes:
        tensors: entry per tensor name.
        source_bytes: size of the safetensors files together.
        bytes_read: read so far, headers and index included.
    """

    def __init__(
        self, directory: Path, tensors: Mapping[str, TensorEntry], source_bytes: int, bytes_read: int
    ) -> None:
        self.directory = directory
        self.tensors = MappingProxyType(dict(tensors))
        self.source_bytes = source_bytes
        self.bytes_read = bytes_read

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """The checkpoint in ``directory``: ``model.safetensors``, or the files that the index names.

        Raises:
            NotFoundError: no such directory.
            CheckpointError: no safetensors file (pickle-only checkpoints are refused), a file that the index names
                is missing or lacks a tensor, or a file that is truncated or contradicts itself.
        """
        if not directory.is_dir():
            raise NotFoundError(
                f"there is no directory {directory}; give a model directory with safetensors files"
            )
        if os.path.exists(directory / SINGLE_FILE):
            tensors, header_bytes = read_header(directory / SINGLE_FILE)
            return cls(directory, tensors, _size(directory / SINGLE_FILE), header_bytes)
        if not os.path.exists(directory / INDEX_FILE):
            raise CheckpointError(_nothing_to_load(directory))
        weight_map, bytes_read = _read_index(directory / INDEX_FILE)
        files: dict[str, dict[str, TensorEntry]] = {}
        for name in sorted(set(weight_map.values())):
            if not os.path.exists(directory / name):  # unlike Path.exists, never raises on an absurd name
                raise CheckpointError(
                    f"{directory / INDEX_FILE} names the file {name[:200]!r}, which is not there; fetch it"
                )
            files[name], header_bytes = read_header(directory / name)
            bytes_read += header_bytes
        tensors = {}
        for tensor, name in weight_map.items():
            if tensor not in files[name]:
                raise CheckpointError(
                    f"{directory / INDEX_FILE} says that {tensor[:200]!r} is in {name}, which lacks it"
                )
            tensors[tensor] = files[name][tensor]
        return cls(directory, tensors, sum(_size(directory / name) for name in files), bytes_read)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of one tensor, at most ``CHUNK_BYTES`` at a time.

        Raises:
            CheckpointError: no such tensor, or the file ends before the tensor does.
        """
        entry = self._entry(name)
        try:
            descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot read {entry.file}: {error.strerror}") from error
        try:
            done = 0
            while done < entry.num_bytes:
                want = min(CHUNK_BYTES, entry.num_bytes - done)
                piece = _pread(descriptor, want, entry.offset + done, entry.file)
                self.bytes_read += len(piece)
                done += len(piece)
                yield piece
        finally:
            os.close(descriptor)

    def read(self, name: str) -> bytes:
        """All bytes of one tensor; errors of :meth:`chunks`."""
        return b"".join(self.chunks(name))

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            raise CheckpointError(f"the checkpoint in {self.directory} has no tensor {name!r}")
        return self.tensors[name]


def read_header(file: Path) -> tuple[dict[str, TensorEntry], int]:
    """The tensors that a safetensors file holds, and how many bytes were read to know.

    Raises:
        CheckpointError: cannot be read, a header over 32 MiB or not as the format has it, tensors that overlap,
            leave gaps, or do not end where the file ends.
    """
    size = _size(file)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    try:
        if size < 8:
            raise CheckpointError(f"{file} has {size} bytes, a safetensors file has at least 8; fetch it again")
        first = _pread(descriptor, 8, 0, file)
        if first == b"version ":
            raise CheckpointError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull`")
        length = int.from_bytes(first, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} claims a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed"
            )
        if length > size - 8:
            raise CheckpointError(f"{file} is truncated: expected a header of {length} bytes, has {size - 8}")
        raw = _pread(descriptor, length, 8, file)
    finally:
        os.close(descriptor)
    return _parse_header(raw, file, 8 + length, size), 8 + length


def _parse_header(raw: bytes, file: Path, data_start: int, size: int) -> dict[str, TensorEntry]:
    header = JsonMembers(raw, f"the header of {file}")
    tensors = {}
    for name in header.members():
        if name == "__metadata__":
            for number, _key in enumerate(header.members()):
                if number >= _MAX_METADATA:
                    raise CheckpointError(f"{file} has more than {_MAX_METADATA} keys in its __metadata__")
                header.string()
        else:
            tensors[name] = _parse_entry(name, header.value(_MAX_ENTRY_CHARS), file, data_start)
    header.end()
    end = data_start
    for name, entry in _by_offset(tensors):
        if entry.offset != end:
            kind = "overlaps the one before it" if entry.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{file}: tensor {name[:200]!r} at byte {entry.offset} {kind} (ends at {end})")
        end += entry.num_bytes
    if end > size:
        raise CheckpointError(f"{file} is truncated: expected {end} bytes, has {size}; fetch it again")
    if end < size:
        raise CheckpointError(f"{file} has {size} bytes, its header accounts for {end}; fetch it again")
    return tensors


def _by_offset(tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the tensors by offset, then size.

    They are sorted in runs that are merged: one call that sorts them all holds every other thread of the process,
    for seconds where a header names half a million.
    """
    rest = iter(tensors.items())
    runs = iter(lambda: sorted(islice(rest, _SORTED_AT_ONCE), key=_place), [])
    return merge(*runs, key=_place)


def _place(item: tuple[str, TensorEntry]) -> tuple[int, int]:
    return item[1].offset, item[1].num_bytes


def _parse_entry(name: str, value: object, file: Path, data_start: int) -> TensorEntry:
    where = f"{file}: tensor {name[:200]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where} has dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPE_BITS)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where} must have a shape of at most {MAX_DIMENSIONS} sizes from 0 to 2**63 - 1")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} must have data_offsets [begin, end], begin not above end")
    bits = prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(
            f"{where} of {dtype} {str(shape)[:80]} takes {str(bits)[:40]} bits, "
            f"its data_offsets span {8 * (offsets[1] - offsets[0])}"
        )
    return TensorEntry(file, dtype, tuple(shape), data_start + offsets[0], offsets[1] - offsets[0])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def indexed_files(directory: Path) -> frozenset[str]:
    """Names of the files that the index in ``directory`` names; they may be missing.

    Raises:
        CheckpointError: the index cannot be read, is larger than 32 MiB, or names other than safetensors files.
    """
    return frozenset(_read_index(directory / INDEX_FILE)[0].values())


def _read_index(file: Path) -> tuple[dict[str, str], int]:
    size = _size(file)
    if size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{file} has {size} bytes, an index has at most {MAX_INDEX_BYTES}")
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    weight_map = _parse_weight_map(raw, file)
    for name in weight_map.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
            or "\0" in name
        ):
            raise CheckpointError(
                f"{file} names {str(name)[:200]!r}; weights load from safetensors files beside the index only"
            )
    return weight_map, len(raw)


def _parse_weight_map(raw: bytes, file: Path) -> dict[str, Any]:
    index = JsonMembers(raw, str(file))
    weight_map: dict[str, Any] = {}
    for number, key in enumerate(index.members()):
        if number >= _MAX_INDEX_MEMBERS:
            raise CheckpointError(f"{file} has more than {_MAX_INDEX_MEMBERS} members; an index has two")
        if key == "weight_map":
            weight_map = {tensor: index.value(_MAX_ENTRY_CHARS) for tensor in index.members()}
        else:
            index.value(_MAX_ENTRY_CHARS)
    index.end()
    if not weight_map:
        raise CheckpointError(f"{file} has no weight_map from tensor to file; fetch it again")
    return weight_map


def _pread(descriptor: int, num_bytes: int, offset: int, file: Path) -> bytes:
    """Exactly ``num_bytes``: a file that shrinks under the reader is an error, never a short tensor."""
    pieces = []
    missing = num_bytes
    while missing:
        try:
            piece = os.pread(descriptor, missing, offset + num_bytes - missing)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
        if not piece:
            raise CheckpointError(
                f"{file} ended at byte {offset + num_bytes - missing}; it was changed while read"
            )
        pieces.append(piece)
        missing -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _size(file: Path) -> int:
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file")
        return file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error


def _nothing_to_load(directory: Path) -> str:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        return f"cannot read {directory}: {error.strerror}"
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        return f"{directory} has only pickle ({pickles[0]}); weights load from safetensors only; convert it"
    others = [name for name in names if name.endswith(".safetensors")]
    found = f"it has {others[0]}, which no index names" if others else "it has no weights"
    return f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}: {found}"
