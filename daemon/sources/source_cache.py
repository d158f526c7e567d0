"""Kept readings of installed packages: a package is read once, and again when another one is installed there."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from daemon.atomic_file import write_file_atomically
from daemon.home import home_folder
from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, EngineError

__all__ = ["kept_reading", "sources_stamp"]

_FOLDER = "engine-sources"
_FORMAT = 1  # of the files; one more with each change of what is read, or of how
_MAX_BYTES = 4 << 20

_READING = threading.RLock()

T = TypeVar("T")


def kept_reading(
    read: Callable[[Path, str], T],
    kind: type[T],
    package: Path,
    version: str,
    *,
    file: str,
    is_editable: bool = False,
) -> T:
    """Return ``read(package, version)``, from the home where it was read before.

    Args:
        kind: the type that it returns.
        file: of the package, which each installation writes anew.
        is_editable: its sources may change without being installed anew; all of them count then.

    Raises:
        EngineError: as ``read`` raises it, or ``file`` is not there.
    """
    stamp = sources_stamp(package) if is_editable else _stamp(package / file)
    with _READING:  # a caller meanwhile wants what is being read
        return _kept(read, kind, package, version, stamp)  # type: ignore[return-value, arg-type]


@lru_cache(maxsize=16)
def _kept(
    read: Callable[[Path, str], object], kind: type[object], package: Path, version: str, stamp: str
) -> object:
    folder = home_folder() / _FOLDER
    name = hashlib.sha256(str(package).encode()).hexdigest()[:16]
    kept = folder / f"{kind.__name__.lower()}-{name}.jsonl"
    key = to_json(f"{_FORMAT} {version} {stamp}")
    with suppress(OSError, BadInputError):
        if kept.stat().st_size <= _MAX_BYTES:
            read_of, _, answer = kept.read_bytes().partition(b"\n")
            if read_of == key:
                return from_json(answer, kind, what=kept.name)
    found = read(package, version)
    with suppress(OSError):  # it is read again the next time
        if folder.parent.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            write_file_atomically(kept, key + b"\n" + to_json(found))
    return found


def _stamp(file: Path) -> str:
    try:
        found = file.stat()
    except OSError as error:
        raise EngineError(f"{file} cannot be read: {error.strerror or error}") from error
    return f"{found.st_size} {found.st_mtime_ns}"


def sources_stamp(package: Path) -> str:
    """Return a text that changes with the Python files in ``package``."""
    digest = hashlib.sha256()
    with suppress(OSError):  # another checkout is being made
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path} {path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()
