"""Safetensors checkpoints by byte range: which tensors there are, and their bytes in small pieces.

Nothing is mapped, unpickled or held whole. What the bytes of a header mean, and whether they can be believed, is
``fingerprint.safetensors_header``'s to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fingerprint.errors import CheckpointError, NotFoundError
from fingerprint.safetensors_header import (
    DTYPE_BITS,
    INDEX_FILE,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    SINGLE_FILE,
    DeclaredTensor,
    StoredTensor,
    check_num_tensors,
    header_length,
    parse_header,
    parse_index,
    tensors_of_index,
)

__all__ = [
    "CHUNK_BYTES",
    "DTYPE_BITS",
    "INDEX_FILE",
    "MAX_HEADER_BYTES",
    "SINGLE_FILE",
    "Checkpoint",
    "StoredTensor",
    "TensorEntry",
    "indexed_files",
    "stored_tensors",
]

CHUNK_BYTES = 4 * 2**20
FileStamp = tuple[int, int, int]  # bytes, inode, time of the last change in ns


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of one tensor."""

    file: Path
    dtype: str  # safetensors' name, e.g. "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class Checkpoint:
    """The tensors of a checkpoint directory. Opening it reads headers only.

    Attributes:
        tensors: entry per tensor name.
        stamps: of each safetensors file, taken before its header was read.
        bytes_read: read so far, headers and index included.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, TensorEntry],
        stamps: Mapping[Path, FileStamp],
        bytes_read: int,
    ) -> None:
        self.directory = directory
        self.tensors = MappingProxyType(dict(tensors))
        self.stamps = MappingProxyType(dict(stamps))
        self.bytes_read = bytes_read

    @property
    def source_bytes(self) -> int:
        """Size of the safetensors files together."""
        return sum(num_bytes for num_bytes, _, _ in self.stamps.values())

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Return the checkpoint in ``directory``: ``model.safetensors``, or the files that the index names.

        Raises:
            NotFoundError: no such directory.
            CheckpointError: no safetensors file (pickle-only checkpoints are refused), a file that the index names
                is missing or lacks a tensor, or a file that is truncated or contradicts itself.
        """
        weight_map, headers, index_bytes = _read_headers(directory)
        tensors = {
            name: headers[file].entry(tensor) for name, file, tensor in _declared(weight_map, headers, directory)
        }
        return cls(
            directory,
            tensors,
            {header.file: header.stamp for header in headers.values()},
            index_bytes + sum(header.data_start for header in headers.values()),
        )

    @classmethod
    def of_file(cls, file: Path) -> Checkpoint:
        """Return the tensors of one safetensors file, whatever its name.

        Raises:
            CheckpointError: it cannot be read, is truncated or contradicts itself.
        """
        header = _read_header(file)
        tensors = {name: header.entry(tensor) for name, tensor in header.tensors.items()}
        return cls(file.parent, tensors, {file: header.stamp}, header.data_start)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of one tensor, at most ``CHUNK_BYTES`` at a time.

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
        """Return all bytes of one tensor; errors of :meth:`chunks`."""
        return b"".join(self.chunks(name))

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            raise CheckpointError(f"the checkpoint in {self.directory} has no tensor {name!r}")
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class _Header:
    """The header of one file."""

    file: Path
    tensors: Mapping[str, DeclaredTensor]
    data_start: int  # bytes from the start of the file, all of which were read
    stamp: FileStamp

    def entry(self, tensor: DeclaredTensor) -> TensorEntry:
        begin, end = tensor.data_offsets
        return TensorEntry(self.file, tensor.dtype, tensor.shape, self.data_start + begin, end - begin)


def stored_tensors(directory: Path) -> Mapping[str, StoredTensor]:
    """Return type and shape of every tensor of the checkpoint in ``directory``; only headers are read.

    Raises:
        NotFoundError, CheckpointError: as :meth:`Checkpoint.open`.
    """
    weight_map, headers, _ = _read_headers(directory)
    declared = _declared(weight_map, headers, directory)
    return MappingProxyType({name: StoredTensor(tensor.dtype, tensor.shape) for name, _, tensor in declared})


def _read_headers(directory: Path) -> tuple[dict[str, str], dict[str, _Header], int]:
    """Return the file of each tensor, the files' headers, and the size of the index; errors of Checkpoint.open."""
    if not directory.is_dir():
        raise NotFoundError(f"there is no directory {directory}; give a model directory with safetensors files")
    if os.path.exists(directory / SINGLE_FILE):
        header = _read_header(directory / SINGLE_FILE)
        return dict.fromkeys(header.tensors, SINGLE_FILE), {SINGLE_FILE: header}, 0
    if not os.path.exists(directory / INDEX_FILE):
        raise CheckpointError(_nothing_to_load(directory))
    weight_map, index_bytes = _read_index(directory / INDEX_FILE)
    headers = {}
    for name in sorted(set(weight_map.values())):
        if not os.path.exists(directory / name):  # unlike Path.exists, never raises on an absurd name
            raise CheckpointError(
                f"{directory / INDEX_FILE} names the file {name[:200]!r}, which is not there; fetch it"
            )
        headers[name] = _read_header(directory / name)
        check_num_tensors((header.tensors for header in headers.values()), str(directory / INDEX_FILE))
    return weight_map, headers, index_bytes


def _declared(
    weight_map: Mapping[str, str], headers: Mapping[str, _Header], directory: Path
) -> Iterator[tuple[str, str, DeclaredTensor]]:
    tensors = {file: header.tensors for file, header in headers.items()}
    return tensors_of_index(weight_map, tensors, str(directory / INDEX_FILE))


def _read_header(file: Path) -> _Header:
    stamp = _stamp(file)
    size, _, _ = stamp
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    try:
        length = header_length(_pread(descriptor, min(size, LENGTH_BYTES), 0, file), str(file))
        if length > size - LENGTH_BYTES:
            raise CheckpointError(
                f"{file} is truncated: expected a header of {length} bytes, has {size - LENGTH_BYTES}"
            )
        raw = _pread(descriptor, length, LENGTH_BYTES, file)
    finally:
        os.close(descriptor)
    return _Header(file, parse_header(raw, str(file), size), LENGTH_BYTES + length, stamp)


def indexed_files(directory: Path) -> frozenset[str]:
    """Return the files that the index in ``directory`` names; they may be missing.

    Raises:
        CheckpointError: the index cannot be read, is larger than 100 MB, or names other than safetensors files.
    """
    return frozenset(_read_index(directory / INDEX_FILE)[0].values())


def _read_index(file: Path) -> tuple[dict[str, str], int]:
    size, _, _ = _stamp(file)
    if size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{file} has {size} bytes, an index has at most {MAX_INDEX_BYTES}")
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    return parse_index(raw, str(file)), len(raw)


def _pread(descriptor: int, num_bytes: int, offset: int, file: Path) -> bytes:
    """Read exactly ``num_bytes``: a file that shrinks under the reader is an error, never a short tensor."""
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


def _stamp(file: Path) -> FileStamp:
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is not a regular file")
        found = file.stat()
        return found.st_size, found.st_ino, found.st_mtime_ns
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
