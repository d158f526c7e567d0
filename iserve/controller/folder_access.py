"""Reach of a caller of the REST API: the folders of this machine that it may name as a model.

The home's own token is read from a file of mode 0600: a caller that has it may read all that the controller may,
and names any folder. An API key may be anyone's, anywhere: it names what is registered, a Hugging Face id, or a
folder that lies, all links followed, within ISERVE_MODEL_FOLDERS, and so must every file in it. What is refused is
refused in the same words whether it exists or not. Looked at when something is asked for, not while it is carried
out.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from fingerprint.errors import NotFoundError
from fingerprint.sanitize import is_plain
from iserve.model_source import existing_path, is_hub_id

__all__ = ["ANYWHERE", "Reach"]

_MOST_ENTRIES = 10_000


class Reach:
    """Args: folders: that may be named, with what is in them; None: any."""

    def __init__(self, folders: Collection[Path] | None) -> None:
        self._roots = None if folders is None else [Path(os.path.realpath(folder)) for folder in folders]

    def check(self, model: str | None, registered: Collection[str] = ()) -> None:
        """Return if ``model``, as a request names it, may be looked at.

        Raises:
            NotFoundError: not by this caller.
        """
        if self._roots is None or model is None or model in registered:
            return
        path = existing_path(model)
        if path is None and is_hub_id(model):
            return
        if path is None or not Path(model).expanduser().is_absolute() or not self._holds(path):
            raise NotFoundError(
                f"{model[:200]!r} is no registered model, and an API key may name folders by their absolute path "
                "within ISERVE_MODEL_FOLDERS only, with nothing in them that leads out"
            )

    def may_see(self, path: str) -> bool:
        """Return whether a path of this machine may be shown to the caller: one that it may name."""
        if self._roots is None:
            return True
        return is_plain(path) and Path(path).is_absolute() and self._is_inside(Path(path))

    def _holds(self, path: Path) -> bool:
        folder = path if path.is_dir() else path.parent
        if not self._is_inside(folder):
            return False
        try:
            with os.scandir(folder) as entries:
                for number, entry in enumerate(entries):
                    if number >= _MOST_ENTRIES or (entry.is_symlink() and not self._is_inside(Path(entry.path))):
                        return False
        except OSError:
            return False
        return True

    def _is_inside(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(root) for root in self._roots or ())


ANYWHERE = Reach(None)
