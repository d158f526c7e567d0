"""Merged checkpoints, in iServe's home, of variants that are deployments of their own.

Each is named by its variant's content and base, is there whole or not at all, and goes when no deployment serves
it any longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from daemon.home import make_home
from fingerprint.errors import UnavailableError
from fingerprint.safetensors_writer import remove_abandoned
from iserve.fine_tune_folders import REMOVING, locked, remove_whole
from iserve.merged_keys import model_of
from iserve.settings import Settings

__all__ = ["drop_merged", "held_merge"]


class _HeldError(Exception):
    """A command holds the checkpoint."""


@contextmanager
def held_merge(
    settings: Settings, key: str, make: Callable[[Path], None], on_wait: Callable[[], None]
) -> Iterator[Path]:
    """Hold a merged checkpoint, made unless an earlier command did; it is kept.

    One command at a time holds it, and :func:`drop_merged` leaves it alone meanwhile. Where ``make`` raises
    nothing is left of it.

    Args:
        key: its name, of :func:`iserve.merged_keys.merged_key`.
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
    with locked(_lock(settings, key), on_wait):
        merged = folder / key
        if not (merged / "config.json").is_file():
            remove_whole(merged)
            try:
                make(merged)
            except BaseException:
                remove_whole(merged)
                raise
        yield merged


def drop_merged(settings: Settings, requests: Callable[[], Iterable[str]]) -> None:
    """Remove the merged checkpoints that no deployment serves, and what killed merges left.

    Args:
        requests: returns those of all deployments now, as JSON; asked again while a checkpoint is held, for a
            command that held it before may have had a deployment of it accepted.

    Raises:
        UnavailableError: the home cannot be written.
    """
    folder = settings.merged_folder
    if not folder.is_dir():
        return
    try:
        used = _used(requests)
        remove_abandoned(folder)
        for name in {entry.removeprefix(REMOVING) for entry in os.listdir(folder)}:
            # One with a dot is being written by a merge.
            if not name.startswith(".") and os.path.realpath(folder / name) not in used:
                _drop(settings, name, requests)
    except OSError as error:
        raise UnavailableError(f"cannot remove merged checkpoints in {folder}: {error.strerror}") from error


def _used(requests: Callable[[], Iterable[str]]) -> set[str | None]:
    """Return the models of deployments, links followed."""
    return {model_of(request) for request in requests()}


def _drop(settings: Settings, key: str, requests: Callable[[], Iterable[str]]) -> None:
    """Remove a merged checkpoint that no command holds and no deployment serves."""

    def refuse() -> None:
        raise _HeldError

    with suppress(_HeldError), locked(_lock(settings, key), refuse):
        if os.path.realpath(settings.merged_folder / key) not in _used(requests):
            remove_whole(settings.merged_folder / key)


def _lock(settings: Settings, key: str) -> Path:
    return settings.run_folder / f"{settings.merged_folder.name}-{key}.lock"
