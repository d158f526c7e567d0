"""iServe's own long-lived processes: the record each leaves of itself, starting one detached, ending a group.

Used for controller, gateway, daemon and shims alike. Knows nothing of what they do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from daemon import daemonize
from daemon.atomic_file import write_file_atomically
from daemon.home import make_private
from daemon.process_tree import signal_group
from daemon.procfs import boot_id, is_running, processes, read_stat
from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, UnavailableError

__all__ = [
    "ProcessRecord",
    "group_members",
    "is_alive",
    "kept_record",
    "kill_group",
    "own_record",
    "read_record",
    "spawn_detached",
    "write_record",
]

log = logging.getLogger(__name__)

_SPAWN_TIMEOUT_S = 20.0
_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessRecord:
    """Record of the process that serves a role of this home now. Holds a secret: its file has mode 0600."""

    pid: int
    start_time_ticks: int  # with the pid, names one process for good
    url: str  # "http://127.0.0.1:PORT"; empty for a role without HTTP
    token: str  # bearer token of its API; empty for none
    boot_id: str = ""  # the boot that the start time is counted from; empty in a record of an older release
    settings: dict[str, str | None] = field(
        default_factory=dict
    )  # by variable; empty in a record of an older release


def own_record(*, url: str, token: str, settings: Mapping[str, str | None] | None = None) -> ProcessRecord:
    """Return the record of the calling process, with the settings that it was started with."""
    stat = read_stat(os.getpid())
    assert stat is not None
    return ProcessRecord(
        pid=stat.pid,
        start_time_ticks=stat.start_time_ticks,
        url=url,
        token=token,
        boot_id=boot_id(),
        settings=dict(settings or {}),
    )


def write_record(path: Path, record: ProcessRecord) -> None:
    """Write ``record`` atomically, readable by its owner only.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    try:
        make_private(path.parent.parent)
        make_private(path.parent)
        write_file_atomically(path, to_json(record))
    except OSError as error:
        raise UnavailableError(
            f"cannot write {path}: {error.strerror or error}; free space or mend the folder"
        ) from error


@contextlib.contextmanager
def kept_record(path: Path, record: ProcessRecord, *, look_s: float = _LOOK_S) -> Iterator[None]:
    """Have ``record``, of the calling process, at ``path`` inside the block, and take it away afterwards.

    One that is lost meanwhile, by accident, is written again: by it alone the process is found, and without it
    another is started in its place. The record of another process that lives is left alone.

    Raises:
        UnavailableError: the folder cannot be written.
    """
    write_record(path, record)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(look_s):
            with contextlib.suppress(UnavailableError):  # a full disk: tried again
                if not is_alive(read_record(path)) and path.parent.parent.is_dir():  # else the home was taken away
                    write_record(path, record)
                    log.warning("%s was lost; it is there again", path)

    thread = threading.Thread(target=watch, name="own-record", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(UnavailableError, OSError):
            if read_record(path) == record:
                path.unlink()


def read_record(path: Path) -> ProcessRecord | None:
    """Return the record at ``path``; None when there is none, or none that may be read and is whole.

    Raises:
        UnavailableError: it cannot be read now (no file descriptor is left, say), whether or not the process
            lives.
    """
    try:
        return from_json(path.read_bytes(), ProcessRecord, what=str(path))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, BadInputError):
        return None
    except OSError as error:
        raise UnavailableError(f"cannot read {path}: {error.strerror or error}; try again") from error


def is_alive(record: ProcessRecord | None) -> bool:
    """Return whether the recorded process itself still runs.

    Raises:
        UnavailableError: that cannot be seen now.
    """
    try:
        return record is not None and is_running(record.pid, record.start_time_ticks, record.boot_id)
    except OSError as error:
        raise UnavailableError(f"cannot look for a process: {error.strerror or error}; try again") from error


def spawn_detached(argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None) -> int:
    """Start ``argv`` in a session of its own, parent init, stdin empty, output appended to ``log_path``.

    Args:
        env: the whole environment; the caller's own when None.

    Returns:
        The process id, also of its session and process group.

    Raises:
        UnavailableError: the program or the log cannot be opened, or no process can be made.
    """
    trampoline = [sys.executable, "-I", "-S", str(Path(daemonize.__file__)), str(log_path), *argv]
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
    """Return ids of the running processes of a process group, zombies not counted."""
    return tuple(stat.pid for stat in processes() if stat.group_id == group_id)


def kill_group(group_id: int, *, grace_s: float, poll_s: float = 0.05) -> bool:
    """End a process group: SIGTERM, ``grace_s`` seconds to obey, then SIGKILL. Blocks.

    Returns:
        Whether no process of the group is left; False only for one that the kernel will not let die.
    """
    if group_id <= 1 or group_id == os.getpgrp():
        raise ValueError(f"refusing to end process group {group_id}")
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
