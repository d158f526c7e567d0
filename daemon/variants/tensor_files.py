"""Files of the store's tensors: the tensor's bytes, plain or, where that saves, packed with zstandard.

A packed file has a frame for each MiB of the tensor, the last one for what is left, and before each frame a
skippable one with its length:

    50 2A 4D 18  04 00 00 00  <length of the next frame, 4 bytes, little-endian>  <frame>

Any zstandard program unpacks it. A packed file is always smaller than its tensor, so that the size of a file says
which it is. A reader holds one frame and believes no length before it has checked it: what a file costs in memory
is bounded, whatever is in it. Whether the bytes are the right ones is for the tensor's hash to say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from fingerprint.checkpoint import CHUNK_BYTES

__all__ = ["FRAME_BYTES", "DamagedFileError", "pack", "read_tensor", "unpack", "write_tensor"]

FRAME_BYTES = 2**20  # content of a frame
LEVEL = 1  # docs/decisions/0055-packed-tensors.md, as the next two
_LEAST_SHARE_SAVED = 0.05
_LEAST_BYTES_SAVED = 4096  # a block of the usual file systems
_HEAD = bytes.fromhex("502a4d18 04000000")  # of a skippable frame with four bytes
_LENGTH_BYTES = 4
_MOST_PACKED_BYTES = FRAME_BYTES + 2**13  # of a frame that nothing can be saved of, by zstandard's bound

Pieces = Callable[[], Iterator[bytes]]


class DamagedFileError(Exception):
    """A file is not what :func:`write_tensor` wrote."""


class _SavesTooLittleError(Exception):
    """A tensor is not enough smaller when it is packed."""


def write_tensor(write: Callable[[Iterable[bytes]], None], pieces: Pieces, num_bytes: int) -> None:
    """Write the file of a tensor, packed if its first MiB and then all of it are enough smaller for that.

    Args:
        write: gives the file its content, in place of what it had. Called again where only the end of a tensor
            shows that packing saves too little.
        pieces: yields the tensor's bytes in order, ``num_bytes`` in all, each time it is called.
    """
    if _is_worth_packing(pieces, num_bytes):
        try:
            write(_bounded(pack(pieces()), _most_packed(num_bytes)))
            return
        except _SavesTooLittleError:
            pass
    write(pieces())


def read_tensor(file: Path, num_bytes: int) -> Iterator[bytes]:
    """Yield the bytes of a tensor of ``num_bytes``, whose hash the caller checks.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedFileError: it is neither as long as the tensor nor packed, or ends early or late.
    """
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > num_bytes:
            raise DamagedFileError(f"{size:,} bytes of a tensor of {num_bytes:,}")
        if size < num_bytes:
            yield from unpack(stream, num_bytes)
            return
        left = num_bytes
        while piece := stream.read(min(CHUNK_BYTES, left)):
            left -= len(piece)
            yield piece


def pack(pieces: Iterable[bytes | memoryview], level: int = LEVEL) -> Iterator[bytes]:
    """Yield the content of a packed file: for each frame its length, and the frame."""
    compressor = zstandard.ZstdCompressor(level=level)  # without a checksum: there is the tensor's hash
    for content in _regrouped(pieces):
        frame = compressor.compress(content)
        yield _HEAD + len(frame).to_bytes(_LENGTH_BYTES, "little")
        yield frame


def unpack(stream: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Yield the content of the frames of ``stream``, whose tensor has ``num_bytes``.

    Raises:
        DamagedFileError: a frame is missing, incomplete, changed, of another length, or follows the last one.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=FRAME_BYTES)
    for start in range(0, num_bytes, FRAME_BYTES):
        yield _content(_frame(stream), min(FRAME_BYTES, num_bytes - start), decompressor)
    if stream.read(1):
        raise DamagedFileError("more than the tensor has")


def _frame(stream: BinaryIO) -> bytes:
    """Return the next frame."""
    head = stream.read(len(_HEAD) + _LENGTH_BYTES)
    length = int.from_bytes(head[len(_HEAD) :], "little")
    if not head.startswith(_HEAD) or length > _MOST_PACKED_BYTES:
        raise DamagedFileError("no length of a frame")
    frame = stream.read(length)
    if len(frame) < length:
        raise DamagedFileError("an incomplete frame")
    return frame


def _content(frame: bytes, num_bytes: int, decompressor: zstandard.ZstdDecompressor) -> bytes:
    """Return the content of ``frame``, of ``num_bytes``; zstandard allocates what a frame says that it has."""
    try:
        if zstandard.get_frame_parameters(frame).content_size != num_bytes:
            raise DamagedFileError("a frame of another length")
        return decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedFileError(str(error)) from error


def _most_packed(num_bytes: int) -> int:
    """Return how large a packed file may be to be kept."""
    return num_bytes - max(_LEAST_BYTES_SAVED, int(num_bytes * _LEAST_SHARE_SAVED))


def _is_worth_packing(pieces: Pieces, num_bytes: int) -> bool:
    if _most_packed(num_bytes) <= 0:  # before anything is read
        return False
    first = next(_regrouped(pieces()), b"")
    return sum(len(piece) for piece in pack([first])) <= _most_packed(len(first))


def _bounded(pieces: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield ``pieces``. Raises _SavesTooLittleError: they are more than ``most_bytes``."""
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > most_bytes:
            raise _SavesTooLittleError
        yield piece


def _regrouped(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of ``pieces`` as pieces of FRAME_BYTES, the last one of what is left."""
    held = b""
    for piece in pieces:
        view = memoryview(held + bytes(piece) if held else piece)
        whole = len(view) - len(view) % FRAME_BYTES
        for start in range(0, whole, FRAME_BYTES):
            yield view[start : start + FRAME_BYTES]
        held = bytes(view[whole:])
    if held:
        yield held
