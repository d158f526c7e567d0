"""The log of a long-lived process: a line for each record, kept to the file of its output and one older."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from pathlib import Path

from fingerprint.sanitize import printable

__all__ = ["bound_log", "log_to_stderr", "move_if_large", "why_silent"]

_LOG_BYTES = 8 * 2**20
_LOOK_S = 1.0
_PROBE_BYTES = 4096  # of a disk that has room for them a process can say in its log what is wrong


class _OneLine(logging.Formatter):
    """Formatter of one-line records: text from outside (a path, a name, an error) starts no line and no escape
    sequence.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Log to stderr from now on, from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def move_if_large(path: Path, *, max_bytes: int = _LOG_BYTES) -> bool:
    """Move a log that has grown past ``max_bytes`` to ``NAME.1``, in place of the one there.

    Raises:
        OSError: the folder cannot be written.
    """
    if not path.exists() or path.stat().st_size <= max_bytes:
        return False
    path.replace(path.with_name(f"{path.name}.1"))
    return True


def why_silent(path: Path) -> str:
    """Return why a process that failed left nothing in its log at ``path``; empty when nothing is known."""
    probe = path.with_name(f".{path.name}.probe")
    try:
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return f"its log {path} cannot be written: {error.strerror or error}; free space there or use another home"
    return ""


def bound_log(path: Path, *, max_bytes: int = _LOG_BYTES, look_s: float = _LOOK_S) -> None:
    """Keep the log at ``path`` to about ``max_bytes`` from now on, while this process's output goes there.

    All of the output, tracebacks and libraries' included: the descriptors are turned to a new file. Looked at once
    in ``look_s`` by a thread; output that goes elsewhere, a terminal say, is left alone.
    """

    def watch() -> None:
        while True:
            time.sleep(look_s)
            with contextlib.suppress(OSError):  # a full disk, or no file descriptor left: tried again
                _turn_over(path, max_bytes)

    threading.Thread(target=watch, name="own-log", daemon=True).start()


def _turn_over(path: Path, max_bytes: int) -> None:
    """Move a log that has grown, and turn the output to a new one. One that was cut short is taken up again.

    The new file is opened first: where none can be, the output stays in a file that is found under its name.
    """
    older = path.with_name(f"{path.name}.1")
    if moved := _outputs_at(older):  # by a turn cut short, or the start of another process of this role
        _turn(moved, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    elif (own := _outputs_at(path)) and path.stat().st_size > max_bytes:
        new = path.with_name(f".{path.name}.new")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            path.replace(older)
            new.replace(path)
        except OSError:
            os.close(handle)
            raise
        _turn(own, handle)


def _turn(numbers: list[int], handle: int) -> None:
    for number in numbers:
        os.dup2(handle, number)
    os.close(handle)


def _outputs_at(path: Path) -> list[int]:
    """Return those of this process's outputs that go to ``path``."""
    try:
        file = path.stat()
    except FileNotFoundError:
        return []
    return [number for number in (1, 2) if os.path.samestat(os.fstat(number), file)]
