"""Facts of processes in /proc: start times, groups, children, resident memory.

Standard library only (the shim uses it). A process is known by its id, its start time *and* the boot, so that a
reused id is never taken for the old process; a zombie counts as gone. Only ENOENT and ESRCH mean that a process is
gone: a read that fails otherwise (no file descriptor left, say) is an OSError to the caller, never "dead".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = [
    "ProcessStat",
    "boot_id",
    "is_running",
    "pids_with",
    "processes",
    "read_stat",
    "running_from",
    "sees",
    "start_time_ticks",
    "started_as",
]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GONE = (FileNotFoundError, ProcessLookupError)
_NOT_OURS = (*_GONE, PermissionError)  # another user's process: ours can always be read


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat that supervision needs."""

    pid: int
    state: str  # one letter; "Z" zombie, "X" dead
    parent_pid: int
    group_id: int
    session_id: int
    start_time_ticks: int  # clock ticks after boot
    rss_bytes: int

    @property
    def is_gone(self) -> bool:
        return self.state in ("Z", "X", "x")


def read_stat(pid: int, *, proc: Path = Path("/proc")) -> ProcessStat | None:
    """Return the stat of a process; None when there is no such process.

    Raises:
        OSError: it cannot be read for another reason; the process may be there.
    """
    try:
        text = (proc / str(pid) / "stat").read_bytes()
    except _GONE:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses: split after the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        state=fields[0].decode(),
        parent_pid=int(fields[1]),
        group_id=int(fields[2]),
        session_id=int(fields[3]),
        start_time_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def processes(*, proc: Path = Path("/proc")) -> Iterator[ProcessStat]:
    """Yield every process that is not a zombie and may be read; about 20 microseconds each.

    Raises:
        OSError: the list would not be whole.
    """
    for name in os.listdir(proc):
        if name.isdigit():
            with contextlib.suppress(PermissionError):
                stat = read_stat(int(name), proc=proc)
                if stat is not None and not stat.is_gone:
                    yield stat


def pids_with(variable: str, value: str, *, proc: Path = Path("/proc")) -> Iterator[int]:
    """Yield processes that were started with this environment variable, those whose environment we may read.

    Raises:
        OSError: the list would not be whole.
    """
    wanted = f"{variable}={value}".encode()
    for stat in processes(proc=proc):
        with contextlib.suppress(*_NOT_OURS):
            if wanted in (proc / str(stat.pid) / "environ").read_bytes().split(b"\0"):
                yield stat.pid


def started_as(words: Sequence[str], *, proc: Path = Path("/proc")) -> Iterator[ProcessStat]:
    """Yield processes with these words in a row on their command line.

    Raises:
        OSError: the list would not be whole.
    """
    wanted = b"".join(f"\0{word}".encode() for word in words) + b"\0"
    for stat in processes(proc=proc):
        with contextlib.suppress(*_NOT_OURS):
            if wanted in b"\0" + (proc / str(stat.pid) / "cmdline").read_bytes():
                yield stat


def running_from(folder: Path, *, proc: Path = Path("/proc")) -> Iterator[ProcessStat]:
    """Yield processes whose command line names a file in ``folder``, such as the Python of an environment."""
    within = b"\0" + os.fsencode(folder) + b"/"
    for stat in processes(proc=proc):
        with contextlib.suppress(OSError):
            if within in b"\0" + (proc / str(stat.pid) / "cmdline").read_bytes():
                yield stat


def sees(pid: int, path: Path, *, proc: Path = Path("/proc")) -> bool:
    """Return whether ``path`` is the same file to that process as to us; in a container it may be another, or
    none.
    """
    try:
        return os.path.samefile(path, proc / str(pid) / "root" / path.relative_to("/"))
    except OSError:
        return False


def start_time_ticks(pid: int) -> int | None:
    """Return when the process began, in clock ticks after boot; None when it is gone.

    Raises:
        OSError: as :func:`read_stat`.
    """
    stat = read_stat(pid)
    return None if stat is None or stat.is_gone else stat.start_time_ticks


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the kernel's name of this boot; empty where it cannot be read."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def is_running(pid: int, started_ticks: int, boot: str = "") -> bool:
    """Return whether this very process (not a later one of the same id) still runs.

    Args:
        boot: the :func:`boot_id` it was started under; empty: not recorded.

    Raises:
        OSError: as :func:`read_stat`, but for a process of another user, which is not ours.
    """
    if pid <= 0 or (boot and boot_id() and boot != boot_id()):
        return False
    try:
        return start_time_ticks(pid) == started_ticks
    except PermissionError:
        return False
