"""The lock of an installation's home, held by its controller as long as it lives."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from daemon.home import make_home
from daemon.process import is_alive, read_record
from fingerprint.errors import ConflictError, UnavailableError
from iserve.settings import Settings

__all__ = ["hold_home"]

_PATIENCE_S = 20.0  # for the record of a controller that has just started, or the end of one that was killed
_LOOK_EVERY_S = 0.05


@contextmanager
def hold_home(settings: Settings) -> Iterator[None]:
    """Hold the lock of this installation: one controller, or one restore, at a time.

    Raises:
        ConflictError: another controller holds it.
        UnavailableError: the home cannot be written, or its file system has no locks.
    """
    lock = settings.run_folder / "controller.lock"
    try:
        make_home(settings.home, settings.run_folder.name)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UnavailableError(
            f"cannot write {lock}: {error.strerror}; mend the folder, or set ISERVE_HOME to another one"
        ) from error
    try:
        _take(handle, settings)
        yield
    finally:
        os.close(handle)


def _take(handle: int, settings: Settings) -> None:
    """Lock ``handle``; wait for a holder that has no living record.

    That one has only just started, or was killed: the kernel shows its first thread as gone before the last one
    has let go of its files, which takes seconds where a thread waits for a busy disk.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            record = read_record(settings.run_folder / "controller.json")
            holder = record if record is not None and is_alive(record) else None
            if holder is not None or time.monotonic() > deadline:
                who = "" if holder is None else f" (pid {holder.pid}, {holder.url})"
                raise ConflictError(
                    f"another controller{who} runs on {settings.home}; use it, or set ISERVE_HOME to another "
                    "folder"
                ) from error
        except OSError as error:
            raise UnavailableError(f"cannot lock {settings.home}: {error.strerror}; set ISERVE_HOME") from error
        time.sleep(_LOOK_EVERY_S)
