"""The files by which a shim and a daemon know of each other: command, lease, exit. Standard library only.

``command.json`` is the daemon's order to the shim, ``lease.json`` the shim's answer, whose mtime the daemon
renews, and ``exit.json`` the shim's last word. ``keeper.lock`` is held (flock) as long as the shim lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from daemon.atomic_file import write_file_atomically

__all__ = [
    "COMMAND_FILE",
    "EXIT_FILE",
    "LEASE_FILE",
    "LOCK_FILE",
    "ExitRecord",
    "Lease",
    "LeaseFileError",
    "ShimOrder",
    "read_file",
    "shim_is_alive",
    "try_lock",
    "write_file",
]

COMMAND_FILE = "command.json"
LEASE_FILE = "lease.json"
EXIT_FILE = "exit.json"
LOCK_FILE = "keeper.lock"  # as shims were called once: a worker that such a release started is adopted
_FORMER_FIELDS = {"keeper_pid": "shim_pid", "keeper_start_time_ticks": "shim_start_time_ticks"}

_MAX_FILE_BYTES = 4 * 2**20


class LeaseFileError(Exception):
    """A file of a worker's folder is missing or is not what it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShimOrder:
    """Command of a worker and how its shim watches it."""

    worker_id: str
    argv: list[str]
    env: dict[str, str]  # added to the environment
    cores: list[int]  # the process group is pinned to these; empty: not pinned
    port: int
    config_hash: str
    lease_ttl_s: float
    grace_s: float  # between SIGTERM and SIGKILL
    log_max_bytes: int  # of one log file
    log_files: int  # rotated files kept in addition to the current one
    log_tail_bytes: int  # repeated in exit.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A living worker. The file's mtime is when it was last renewed."""

    worker_id: str
    pid: int  # of the engine; also its process group
    start_time_ticks: int
    shim_pid: int
    shim_start_time_ticks: int
    port: int
    config_hash: str
    started_at: float  # seconds since the epoch
    lease_ttl_s: float
    boot_id: str = ""  # the boot that the start times are counted from; empty in a lease of an older release


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitRecord:
    """End of a worker."""

    worker_id: str
    pid: int
    exit_code: int | None  # None: ended by a signal
    signal: int | None
    ended_at: float  # seconds since the epoch
    reason: str  # "exited" | "told to stop" | "lease expired" | "could not start: ..."
    log_tail: str


T = TypeVar("T", ShimOrder, Lease, ExitRecord)

_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "int | None": (int, type(None)),
    "list[str]": (list,),
    "list[int]": (list,),
    "dict[str, str]": (dict,),
}


def write_file(path: Path, value: ShimOrder | Lease | ExitRecord) -> None:
    """Replace ``path`` in one step, mode 0600. Raises OSError when that cannot be done; nothing is left then."""
    write_file_atomically(path, json.dumps(dataclasses.asdict(value)).encode())


def read_file(path: Path, kind: type[T]) -> T:
    """Return the ``kind`` in ``path``.

    Raises:
        LeaseFileError: missing, too large, not JSON, or with other fields than ``kind`` has.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise LeaseFileError(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
        data: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LeaseFileError(f"{path} cannot be read: {error}") from error
    if isinstance(data, dict):
        data = {_FORMER_FIELDS.get(name, name): value for name, value in data.items()}
    fields = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(kind)}
    optional = {f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING}
    if not isinstance(data, dict) or not fields.keys() - optional <= data.keys() <= fields.keys():
        raise LeaseFileError(f"{path} does not have the fields of a {kind.__name__}")
    for name, types in ((name, types) for name, types in fields.items() if name in data):
        if not isinstance(data[name], types) or isinstance(data[name], bool):
            raise LeaseFileError(f"{path}: {name} is {data[name]!r}")
    return kind(**data)


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Hold the file's lock inside the block, if no other process does: yields whether that is so."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield _lock_now(handle, fcntl.LOCK_EX)
    finally:
        os.close(handle)


def shim_is_alive(folder: Path) -> bool:
    """Return whether a shim holds the folder's lock; no process id can be mistaken here.

    Raises:
        OSError: that cannot be seen now (no file descriptor is left, say); the shim may well live.
    """
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not _lock_now(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _lock_now(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
