"""iServe's own long-lived processes: the record each leaves of itself, starting one detached, ending a group.

Used for controller, gateway, daemon and keepers alike. Knows nothing of what they do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon import detach
from daemon.procfs import is_running, processes, read_stat
from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, UnavailableError

__all__ = [
    "ProcessRecord",
    "group_members",
    "is_alive",
    "kill_group",
    "own_record",
    "read_record",
    "spawn_detached",
    "write_file_atomically",
    "write_record",
]

_SPAWN_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRecord:
    """Who serves a role of this home now. Holds a secret: its file has mode 0600."""

    pid: int
    start_time_ticks: int  # with the pid, names one process for good
    url: str  # "http://127.0.0.1:PORT"; empty for a role without HTTP
    token: str  # bearer token of its API; empty for none


def own_record(*, url: str, token: str) -> ProcessRecord:
    """The record of the calling process."""
    stat = read_stat(os.getpid())
    assert stat is not None
    return ProcessRecord(pid=stat.pid, start_time_ticks=stat.start_time_ticks, url=url, token=token)


def write_file_atomically(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace ``path`` in one step: a reader sees the old content or the new, never a part.

    Raises:
        OSError: not writable or no space; the old file is untouched and no temporary one is left.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def write_record(path: Path, record: ProcessRecord) -> None:
    """Write ``record`` atomically, readable by its owner only.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file_atomically(path, to_json(record))
    except OSError as error:
        raise UnavailableError(
            f"cannot write {path}: {error.strerror or error}; free space or mend the folder"
        ) from error


def read_record(path: Path) -> ProcessRecord | None:
    """The record at ``path``; None when there is none or it cannot be read (it is then as good as absent)."""
    try:
        return from_json(path.read_bytes(), ProcessRecord, what=str(path))
    except (OSError, BadInputError):
        return None


def is_alive(record: ProcessRecord | None) -> bool:
    """Whether the recorded process itself still runs."""
    return record is not None and is_running(record.pid, record.start_time_ticks)


def spawn_detached(argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> int:
    """Start ``argv`` in a session of its own, parent init, stdin empty, output appended to ``log_path``.

    Args:
        env: the whole environment; the caller's own when None.

    Returns:
        The process id, also of its session and process group.

    Raises:
        UnavailableError: the program or the log cannot be opened, or no process can be made.
    """
    trampoline = [sys.executable, "-I", "-S", str(Path(detach.__file__)), str(log_path), *argv]
    try:
        done = subprocess.run(
            trampoline,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=env,
            timeout=_SPAWN_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"cannot start {argv[0]}: {error}") from error
    pid_text, _, failure = done.stdout.decode(errors="replace").partition("\n")
    if failure or not pid_text.isdigit():
        raise UnavailableError(f"cannot start {argv[0]}: {failure.strip() or 'it gave no process id'}")
    return int(pid_text)


def group_members(group_id: int) -> tuple[int, ...]:
    """Ids of the running processes of a process group, zombies not counted."""
    return tuple(stat.pid for stat in processes() if stat.group_id == group_id)


def signal_group(group_id: int, signum: int) -> bool:
    """Send a signal to a whole group; False when no process of it remains."""
    if group_id <= 1 or group_id == os.getpgrp():
        raise ValueError(f"refusing to signal process group {group_id}")
    try:
        os.killpg(group_id, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_group(group_id: int, *, grace_s: float, poll_s: float = 0.05) -> bool:
    """End a process group: SIGTERM, ``grace_s`` seconds to obey, then SIGKILL. Blocks.

    Returns:
        Whether no process of the group is left; False only for one that the kernel will not let die.
    """
    if not signal_group(group_id, signal.SIGTERM):
        return True
    deadline = time.monotonic() + grace_s
    while group_members(group_id):
        if time.monotonic() >= deadline:
            signal_group(group_id, signal.SIGKILL)
            break
        time.sleep(poll_s)
    deadline = time.monotonic() + 5.0
    while group_members(group_id):
        if time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
    return True
