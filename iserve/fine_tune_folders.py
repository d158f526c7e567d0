"""Folders of iServe's home in which ``variant add`` compresses full fine-tunes, until each is registered."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from daemon.home import make_home
from fingerprint.codec import to_json
from fingerprint.delta import is_delta
from fingerprint.errors import UnavailableError
from fingerprint.safetensors_writer import remove_abandoned
from iserve.deltas import CompressOptions
from iserve.settings import Settings

__all__ = ["REMOVING", "compression_key", "held_delta", "locked", "remove_whole"]

REMOVING = ".removing-"
_KEPT_S = 30 * 86_400.0  # of commands that were given up


def compression_key(base: Path, finetuned: Path, options: CompressOptions) -> str:
    """Return a name for the delta of two model folders: the same for the same files, by their sizes and times."""
    files = [
        file for folder in (base, finetuned) for file in (*folder.glob("*.safetensors"), *folder.glob("*.json"))
    ]
    facts = [_facts(file) for file in sorted({file.resolve() for file in files})]
    texts = [_facts(file) for file in (options.calibration, options.text)]  # one file does either
    chosen = (options.format_name, options.max_error, options.max_quality_loss)
    return sha256(to_json([str(base.resolve()), str(finetuned.resolve()), chosen, texts, facts])).hexdigest()[:16]


def _facts(file: Path | None) -> tuple[str, int, int] | None:
    """Return path, size and time of a file; None where there is none."""
    path = None if file is None else file.expanduser().resolve()
    return (str(path), path.stat().st_size, path.stat().st_mtime_ns) if path and path.is_file() else None


@contextmanager
def held_delta(
    settings: Settings, key: str, make: Callable[[Path], None], on_wait: Callable[[], None]
) -> Iterator[Path]:
    """Hold the delta of ``key``, made unless an earlier command did; it is removed unless the block raises.

    One command at a time holds it, so that none removes what another one is about to register. Folders of commands
    that were given up are removed after 30 days.

    Args:
        make: called with the folder to be made.
        on_wait: called where another command holds it.

    Raises:
        UnavailableError: the home cannot be written.
    """
    work = settings.compressing_folder
    try:
        make_home(settings.home, settings.run_folder.name)
        make_home(settings.home, work.name)
        _remove_old(work)
        remove_abandoned(work)
    except OSError as error:
        raise UnavailableError(
            f"cannot write {work}: {error.strerror}; mend the folder, or set ISERVE_HOME to another one"
        ) from error
    with locked(settings.run_folder / f"{work.name}-{key}.lock", on_wait):
        folder = work / key
        if not is_delta(folder):
            remove_whole(folder)
            make(folder)
        yield folder
        remove_whole(folder)


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at ``path``, which is there only while a command holds or awaits it.

    Args:
        on_wait: called where another command holds it; an exception that it raises ends the attempt.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_at(handle, path):  # its last holder removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def remove_whole(folder: Path) -> None:
    """Remove a folder so that, killed in between, none of its name is left in part."""
    away = folder.with_name(f"{REMOVING}{folder.name}")
    shutil.rmtree(away, ignore_errors=True)
    if os.path.lexists(folder):
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def _remove_old(work: Path) -> None:
    for entry in work.iterdir():
        try:
            is_old = time.time() - entry.lstat().st_mtime > _KEPT_S
        except FileNotFoundError:  # its own command has removed it
            continue
        if entry.is_dir() and not entry.is_symlink() and (is_old or entry.name.startswith(REMOVING)):
            shutil.rmtree(entry, ignore_errors=True)
