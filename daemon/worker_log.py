"""A worker's rotated log as clients read it: its end, and what was added since a position."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fingerprint.errors import BadInputError

__all__ = ["MAX_LOG_LINES", "LogPart", "log_after", "log_end"]

MAX_LOG_LINES = 10_000
_MAX_BYTES = 4 << 20
_MOST_FILES = 10  # of one log that are looked at
_POSITION = re.compile(r"([0-9]{1,20}):([0-9]{1,20})")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPart:
    """Text of a log, and the position behind it, from which the next part is read."""

    text: str
    position: str  # ``INODE:OFFSET``, which a rotation leaves valid; empty: there is no log yet


def log_end(path: Path, lines: int) -> LogPart:
    """Return the last lines, of at most 4 MiB."""
    data, position = b"", ""
    for part in (path, path.with_name(f"{path.name}.1")):
        with contextlib.suppress(OSError), part.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - (_MAX_BYTES - len(data))))
            read = file.read(_MAX_BYTES - len(data))
            position = position or f"{os.fstat(file.fileno()).st_ino}:{file.tell()}"
            data = read + data
        if data.count(b"\n") > lines or len(data) >= _MAX_BYTES:  # one more: a file may begin amid a line
            break
    text = b"".join(data.splitlines(keepends=True)[-lines:]).decode("utf-8", errors="replace")
    return LogPart(text=text, position=position)


def log_after(path: Path, position: str) -> LogPart:
    """Return at most 4 MiB of what was written behind ``position``; all there is where that was rotated away.

    A character that is not written whole yet is left for the next part.

    Raises:
        BadInputError: no position that a part had.
    """
    inode, offset = _parsed(position)
    with contextlib.ExitStack() as stack:
        files = _oldest_first(path, stack)
        inodes = [os.fstat(file.fileno()).st_ino for file in files]
        begin = inodes.index(inode) if inode in inodes else 0
        if inode not in inodes or os.fstat(files[begin].fileno()).st_size < offset:
            offset = 0
        data = b""
        for number, file in enumerate(files[begin:], begin):
            file.seek(offset if number == begin else 0)
            data += file.read(_MAX_BYTES - len(data))
            position = f"{inodes[number]}:{_whole(file.tell(), data)}"
            if len(data) >= _MAX_BYTES:
                break
    return LogPart(text=codecs.getincrementaldecoder("utf-8")("replace").decode(data), position=position)


def _parsed(position: str) -> tuple[int, int]:
    if not position:
        return -1, 0
    found = _POSITION.fullmatch(position)
    if found is None:
        raise BadInputError(f"the position is that of the part before, such as 1234:567, got {position[:40]!r}")
    return int(found[1]), int(found[2])


def _oldest_first(path: Path, stack: contextlib.ExitStack) -> list[BinaryIO]:
    """Open the log's files, each once: a rotation meanwhile can show one under two names."""
    files: list[BinaryIO] = []
    for number in range(_MOST_FILES):
        name = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            file = stack.enter_context(name.open("rb"))
        except OSError:
            break
        if not any(os.path.sameopenfile(file.fileno(), other.fileno()) for other in files):
            files.append(file)
    return files[::-1]


def _whole(offset: int, data: bytes) -> int:
    """Return ``offset`` without the character at the end of ``data`` that is not whole."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return max(0, offset - len(decoder.getstate()[0]))
