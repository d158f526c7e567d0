"""What /proc says of processes: start times, groups, children, resident memory.

Standard library only (the keeper uses it). A process is known by its id *and* its start time, so that a reused id
is never taken for the old process; a zombie counts as gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ProcessStat",
    "is_running",
    "pids_with",
    "processes",
    "read_stat",
    "sees",
    "start_time_ticks",
    "started_as",
]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
    """None when there is no such process."""
    try:
        text = (proc / str(pid) / "stat").read_bytes()
    except OSError:
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
    """Every process that is not a zombie; about 20 microseconds each."""
    for name in os.listdir(proc):
        if name.isdigit():
            stat = read_stat(int(name), proc=proc)
            if stat is not None and not stat.is_gone:
                yield stat


def pids_with(variable: str, value: str, *, proc: Path = Path("/proc")) -> Iterator[int]:
    """Processes that were started with this environment variable, those whose environment we may read."""
    wanted = f"{variable}={value}".encode()
    for stat in processes(proc=proc):
        with contextlib.suppress(OSError):
            if wanted in (proc / str(stat.pid) / "environ").read_bytes().split(b"\0"):
                yield stat.pid


def started_as(words: Sequence[str], *, proc: Path = Path("/proc")) -> Iterator[ProcessStat]:
    """Processes with these words in a row on their command line."""
    wanted = b"".join(f"\0{word}".encode() for word in words) + b"\0"
    for stat in processes(proc=proc):
        with contextlib.suppress(OSError):
            if wanted in b"\0" + (proc / str(stat.pid) / "cmdline").read_bytes():
                yield stat


def sees(pid: int, path: Path, *, proc: Path = Path("/proc")) -> bool:
    """Whether ``path`` is the same file to that process as to us; in a container it may be another, or none."""
    try:
        return os.path.samefile(path, proc / str(pid) / "root" / path.relative_to("/"))
    except OSError:
        return False


def start_time_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks after boot; None when it is gone."""
    stat = read_stat(pid)
    return None if stat is None or stat.is_gone else stat.start_time_ticks


def is_running(pid: int, started_ticks: int) -> bool:
    """Whether this very process (not a later one of the same id) still runs."""
    return pid > 0 and start_time_ticks(pid) == started_ticks
