"""Lock of one role of a home, the daemon's or the controller's, held by its process as long as that lives."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon.home import make_home
from daemon.process import ProcessRecord, is_alive, read_record
from fingerprint.errors import ConflictError, UnavailableError

__all__ = ["hold_role"]

_PATIENCE_S = 20.0  # for the record of a holder that has just started, or the end of one that was killed
_LOOK_EVERY_S = 0.05


@contextmanager
def hold_role(run_folder: Path, role: str, refusal: Callable[[ProcessRecord | None], str]) -> Iterator[None]:
    """Hold the lock of ``role`` in a home's run folder, which is made.

    A holder without a living record is waited for. It has only just started, or was killed: the kernel shows its
    first thread as gone before the last one has let go of its files, which takes seconds where a thread waits for
    a busy disk.

    Args:
        refusal: message where another process has that role, with its record; None: it has left none.

    Raises:
        ConflictError: another process has that role.
        UnavailableError: the home cannot be written, or its file system has no locks.
    """
    lock = run_folder / f"{role}.lock"
    try:
        make_home(run_folder.parent, run_folder.name)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise _unusable(lock, error) from error
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while not _is_locked(handle, lock):
            record = read_record(run_folder / f"{role}.json")
            holder = record if is_alive(record) else None
            if holder is not None or time.monotonic() > deadline:
                raise ConflictError(refusal(holder))
            time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        os.close(handle)


def _is_locked(handle: int, lock: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _unusable(lock, error) from error
    return True


def _unusable(lock: Path, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"cannot write {lock}: {error.strerror or error}; mend the folder, or set ISERVE_HOME to another one"
    )
