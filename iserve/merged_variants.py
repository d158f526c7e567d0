"""Merged checkpoints, in iServe's home, of variants that are deployments of their own.

Each is named by the hash of its variant's content, is there whole or not at all, and goes when no deployment
serves it any longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath

from daemon.home import make_home
from fingerprint.errors import UnavailableError
from fingerprint.safetensors_writer import remove_abandoned
from iserve.fine_tune_folders import REMOVING, locked, remove_whole
from iserve.settings import Settings

__all__ = ["drop_merged", "held_merge"]


class _HeldError(Exception):
    """A command holds the checkpoint."""


@contextmanager
def held_merge(
    settings: Settings, content_hash: str, make: Callable[[Path], None], on_wait: Callable[[], None]
) -> Iterator[Path]:
    """Hold the merged checkpoint of a content, made unless an earlier command did; it is kept.

    One command at a time holds it, and :func:`drop_merged` leaves it alone meanwhile.

    Args:
        make: called with the folder to be made.
        on_wait: called where another command holds it.

    Raises:
        UnavailableError: the home cannot be written.
    """
    folder = settings.merged_folder
    try:
        make_home(settings.home, settings.run_folder.name)
        make_home(settings.home, folder.name)
        remove_abandoned(folder)
    except OSError as error:
        raise UnavailableError(
            f"cannot write {folder}: {error.strerror}; mend the folder, or set ISERVE_HOME to another one"
        ) from error
    with locked(_lock(settings, content_hash), on_wait):
        merged = folder / content_hash
        if not (merged / "config.json").is_file():
            remove_whole(merged)
            make(merged)
        yield merged


def drop_merged(settings: Settings, requests: Iterable[str]) -> None:
    """Remove the merged checkpoints that no deployment serves, and what killed merges left.

    Args:
        requests: of all deployments, as JSON.

    Raises:
        UnavailableError: the home cannot be written.
    """
    folder = settings.merged_folder
    if not folder.is_dir():
        return
    used = {PurePath(str(json.loads(request).get("model") or "")).name for request in requests}
    try:
        remove_abandoned(folder)
        for name in {entry.removeprefix(REMOVING) for entry in os.listdir(folder)} - used:
            if not name.startswith("."):  # else a merge writes it
                _drop(settings, name)
    except OSError as error:
        raise UnavailableError(f"cannot remove merged checkpoints in {folder}: {error.strerror}") from error


def _drop(settings: Settings, content_hash: str) -> None:
    """Remove a merged checkpoint that no command holds."""

    def refuse() -> None:
        raise _HeldError

    with suppress(_HeldError), locked(_lock(settings, content_hash), refuse):
        remove_whole(settings.merged_folder / content_hash)


def _lock(settings: Settings, content_hash: str) -> Path:
    return settings.run_folder / f"{settings.merged_folder.name}-{content_hash}.lock"
