"""Atomic and durable replacement of small files, and removal of what a killed writer left.

A writer holds a lock (flock) on its temporary file while it writes, which distinguishes a stale file from one in
use. Standard library only (the shim uses it).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

__all__ = ["remove_stale_temporaries", "sync", "sync_folder", "write_file_atomically"]

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{1,8}")  # older releases: eight such characters, or a process id


def write_file_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace ``path`` in one step: a reader sees the old content or the new, never a part, after a power cut too.

    Raises:
        OSError: not writable or no space; the old file is untouched and no temporary one is left.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk.

    Raises:
        OSError: it is gone, or the disk failed.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make the new name durable. A file system that cannot is left as it is: the file itself is in place."""
    with contextlib.suppress(OSError):
        sync(folder)


def remove_stale_temporaries(folder: Path, *names: str) -> None:
    """Remove the temporary files of ``names`` in ``folder`` that a killed writer left, as far as possible."""
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            if _TEMPORARY.fullmatch(entry) and any(entry.startswith(f".{name}.") for name in names):
                with contextlib.suppress(OSError):
                    _remove_if_unused(folder / entry)


def _remove_if_unused(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(handle)
