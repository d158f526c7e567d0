"""Writing a safetensors file in small pieces, in a directory that appears whole or not at all.

The caller says what each tensor is and hands over its bytes piece by piece; nothing here knows what they mean.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fingerprint.errors import CheckpointError, ConflictError
from fingerprint.output_file import why_not_written

__all__ = ["OutputTensor", "new_directory", "remove_abandoned", "scratch_directory", "write_safetensors"]

_ALIGNMENT = 8  # of the first tensor, as the safetensors library pads its headers


@dataclass(frozen=True)
class OutputTensor:
    """Tensor to write."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    num_bytes: int
    pieces: Callable[[], Iterable[bytes | memoryview]]  # its bytes in order, num_bytes in all


@contextmanager
def new_directory(target: Path, *, needed_bytes: int, durable: bool = False) -> Iterator[Path]:
    """Yield a folder to fill, next to ``target``; it becomes ``target`` when the block ends well, else it is
    removed.

    A writer holds a lock (flock) on its folder: what a killed one left is removed by the next for this target.

    Args:
        durable: all files are on the disk before the name appears, so that a power cut leaves no empty ones.

    Raises:
        ConflictError: ``target`` is there already and is not an empty directory.
        CheckpointError: the disk has less than ``needed_bytes`` free, or writing fails.
    """
    part = _part_of(target)
    try:
        if os.path.lexists(target) and not (target.is_dir() and not os.listdir(target)):
            raise _taken(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, target.name)
        free_bytes = shutil.disk_usage(target.parent).free
        if free_bytes < needed_bytes:
            unit, name = (2**30, "GiB") if needed_bytes >= 2**30 else (2**20, "MiB")
            raise CheckpointError(
                f"cannot write {target}: it needs {needed_bytes / unit:.2f} {name}, its disk has "
                f"{free_bytes / unit:.2f} {name} free; free some or choose another place"
            )
        part.mkdir()
        with _locked(part):
            yield part
            if durable:
                for file in (*part.iterdir(), part):
                    _sync(file)
            _appear(part, target)
        if durable:
            _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"cannot write {target}: {why_not_written(error, target.parent)}; nothing was kept"
            ) from error
        raise


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to ``target``, which is removed when the block ends.

    It is locked (flock): what a killed process left is removed by the next for this target.

    Raises:
        CheckpointError: it cannot be made.
    """
    part = _part_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(target.parent, target.name)
        part.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target.parent}: {why_not_written(error, target.parent)}; nothing was kept"
        ) from error
    try:
        with _locked(part):
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _part_of(target: Path) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(4)}.part"


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of ``folder``; yields False where it is held already, or the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except OSError:
            is_ours = False
        yield is_ours
    finally:
        os.close(handle)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers of ``folder / name``, or of any target there, have left, as far as possible."""
    part = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.[0-9a-f]{{8}}\.part", re.DOTALL)
    for entry in os.listdir(folder):
        if part.fullmatch(entry):
            with suppress(OSError), _locked(folder / entry) as is_ours:
                if is_ours:
                    shutil.rmtree(folder / entry)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _appear(part: Path, target: Path) -> None:
    try:
        os.rename(part, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # someone else finished the same name first
            raise _taken(target) from error
        raise


def _taken(target: Path) -> ConflictError:
    return ConflictError(f"{target} is there already; remove it or choose another name")


def write_safetensors(
    file: Path,
    tensors: Sequence[OutputTensor],
    *,
    metadata: Mapping[str, str] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Write ``tensors`` in their order. Memory: the header and one piece.

    Args:
        metadata: in addition to ``format: pt``, which transformers asks for.
        on_bytes: called with the size of each piece written.

    Returns:
        Bytes written.

    Raises:
        OSError: the disk is full or gone; the file is then incomplete (see :func:`new_directory`).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for tensor in tensors:
        assert tensor.name not in header, f"{tensor.name} twice"
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.num_bytes],
        }
        end += tensor.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces():
                stream.write(piece)
                written += len(piece)
                if on_bytes is not None:
                    on_bytes(len(piece))
            assert written == tensor.num_bytes, f"{tensor.name}: {written} bytes of {tensor.num_bytes}"
    return 8 + len(raw) + end
