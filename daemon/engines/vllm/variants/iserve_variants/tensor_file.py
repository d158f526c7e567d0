"""Reading of safetensors files in an engine's worker: bytes by several threads, tensors as views of them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from iserve_variants.background import Pauses

__all__ = [
    "AdapterFile",
    "json_object",
    "read_by_threads",
    "read_header",
    "tensor_view",
    "torch_type",
]

_MAX_HEADER_BYTES = 64 * 2**20
_PIECE_BYTES = 2**24
# Tensors that share memory. Torch takes page-locked memory in powers of two: a small remainder of a file wastes
# little. A thread next to steps pauses after each group.
_GROUP_BYTES, _PAUSED_GROUP_BYTES = 2**22, 2**20
_READERS = 4  # threads of a file: one waits for the disk, or for pages of new memory, most of the time
_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}

_ENTRY = ("dtype", "shape", "data_offsets")
Header = dict[str, Any]  # of tensors, by name: dtype, shape, data_offsets


class AdapterFile:
    """Tensors of an adapter's file, all read when it is opened, as ``safetensors.safe_open`` returns them.

    ``safe_open`` copies a tensor at a time from the file's mapping, and vLLM each of them once more to memory that
    is page-locked for it. Here they are read to such memory at once.
    """

    def __init__(self, file: Path, *, pin: bool, pause: Pauses | None = None) -> None:
        """Read all tensors.

        Args:
            pin: whether to page-locked memory, from which copies to a GPU need no further buffer.
            pause: of a thread next to steps: groups of tensors are read one after the other, with a pause before
                each, and one now and then between the names, which vLLM goes through to check and to read them;
                None: several threads read them.

        Raises:
            ValueError: no safetensors file, or one that was cut short.
            OSError: it cannot be read.
        """
        self._pause = pause
        with file.open("rb", buffering=0) as stream:
            header, begin, size = read_header(stream, file)
            groups = list(_groups(header, _GROUP_BYTES if pause is None else _PAUSED_GROUP_BYTES))

            def read(group: list[str]) -> list[tuple[str, torch.Tensor]]:
                if pause is not None:
                    pause.take()
                first, end = header[group[0]]["data_offsets"][0], header[group[-1]]["data_offsets"][1]
                if not 0 <= first <= end <= size:
                    raise ValueError(f"{file}: tensor {group[-1]} does not lie within the file")
                buffer = torch.empty(end - first, dtype=torch.uint8, pin_memory=pin)
                _read_into(stream.fileno(), memoryview(buffer.numpy()), begin + first, file)
                return [(name, tensor_view(buffer, header[name], file, name, first=first)) for name in group]

            with ThreadPoolExecutor(_READERS, thread_name_prefix="iserve-read") as readers:
                each = map(read, groups) if pause is not None else readers.map(read, groups)
                self._tensors = {name: tensor for found in each for name, tensor in found}

    def __enter__(self) -> AdapterFile:
        return self

    def __exit__(self, *raised: object) -> None:
        return None

    def keys(self) -> Iterator[str]:
        """Yield the names of all tensors."""
        for name in self._tensors:
            if self._pause is not None:
                self._pause()
            yield name

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._tensors[name]


def _groups(header: Header, most_bytes: int) -> Iterator[list[str]]:
    """Yield names of tensors that follow each other in the file, and take so much together or are one."""
    group: list[str] = []
    for name in sorted(header, key=lambda name: tuple(header[name]["data_offsets"])):
        if group and header[name]["data_offsets"][1] - header[group[0]]["data_offsets"][0] > most_bytes:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def read_header(stream: BinaryIO, file: Path) -> tuple[Header, int, int]:
    """Return the header of a safetensors file, where its data begins, and of how many bytes it is.

    Raises:
        ValueError: the file is no safetensors file.
    """
    start = stream.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    size = os.fstat(stream.fileno()).st_size - 8 - length
    if not 0 < length <= _MAX_HEADER_BYTES or size < 0:
        raise ValueError(f"{file} is no safetensors file")
    header = json_object(stream.read(length), file)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not isinstance(entry, dict) or not _is_entry(**{key: entry.get(key) for key in _ENTRY}):
            raise ValueError(f"{file} says nothing of tensor {name}")
    return header, 8 + length, size


def _is_entry(dtype: Any, shape: Any, data_offsets: Any) -> bool:
    if not isinstance(dtype, str) or not all(isinstance(numbers, list) for numbers in (shape, data_offsets)):
        return False
    are_sizes = all(type(number) is int and number >= 0 for number in (*shape, *data_offsets))
    return are_sizes and len(data_offsets) == 2


def read_by_threads(handle: int, view: memoryview, begin: int, file: Path) -> None:
    """Fill ``view`` with a file's bytes from ``begin`` on, in several threads.

    Raises:
        ValueError: the file has fewer.
        OSError: it cannot be read.
    """

    def read(first: int) -> None:
        _read_into(handle, view[first : first + _PIECE_BYTES], begin + first, file)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="iserve-read") as readers:
        for _ in readers.map(read, range(0, len(view), _PIECE_BYTES)):
            pass


def _read_into(handle: int, view: memoryview, begin: int, file: Path) -> None:
    at = 0
    while at < len(view):
        got = os.preadv(handle, [view[at:]], begin + at)
        if not got:
            raise ValueError(f"{file} ends {len(view) - at} bytes before a tensor of it")
        at += got


def tensor_view(
    buffer: torch.Tensor, entry: dict[str, Any], file: Path, name: str, *, first: int = 0
) -> torch.Tensor:
    """Return a tensor of a file as a view of bytes of it, of which ``first`` is the first.

    Raises:
        ValueError: a tensor beyond the bytes, or of a type that is not known.
    """
    begin, end = (at - first for at in entry["data_offsets"])
    dtype, shape = torch_type(entry["dtype"]), entry["shape"]
    count = 1
    for side in shape:
        count *= side
    if not 0 <= begin <= end <= len(buffer) or end - begin != count * dtype.itemsize:
        raise ValueError(f"{file}: tensor {name} does not lie within the file")
    own = buffer[begin:end]
    if begin % dtype.itemsize:  # behind an odd number of values of a smaller type
        own = own.clone()
    return own.view(dtype).view(shape)


def torch_type(name: str) -> torch.dtype:
    """Raises ValueError: a type that is not known."""
    if name not in _TYPES:
        raise ValueError(f"type {name!r} of a tensor is none of {', '.join(_TYPES)}")
    return _TYPES[name]


def json_object(raw: bytes, file: Path) -> dict[str, Any]:
    """Raises ValueError: ``raw``, read from ``file``, is no JSON object."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not what it was: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not what it was: no object")
    return found
