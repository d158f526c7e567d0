"""The lock of an installation's home, held by its controller as long as it lives."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from daemon.home import make_home
from daemon.process import ProcessRecord, is_alive, read_record
from fingerprint.errors import ConflictError, UnavailableError
from iserve.settings import Settings

__all__ = ["hold_home"]

_PATIENCE_S = 5.0  # for the record of a controller that has just started


@contextmanager
def hold_home(settings: Settings) -> Iterator[None]:
    """Hold the lock of this installation: one controller, or one restore, at a time.

    Raises:
        ConflictError: another controller holds it.
        UnavailableError: the home cannot be written.
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
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _await_record(settings)
            who = "" if holder is None else f" (pid {holder.pid}, {holder.url})"
            raise ConflictError(
                f"another controller{who} runs on {settings.home}; use it, or set ISERVE_HOME to another folder"
            ) from error
        yield
    finally:
        os.close(handle)


def _await_record(settings: Settings) -> ProcessRecord | None:
    """Return the record of the process that holds the lock, which may only just have taken it."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        record = read_record(settings.run_folder / "controller.json")
        if is_alive(record):
            return record
        time.sleep(0.05)
    return None
