"""Folders of a home: private to its owner, those of older releases too. Standard library only."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["default_home", "home_folder", "make_home", "make_private"]

# Older releases made some of them readable by everybody.
_PARTS = ("run", "logs", "workers", "engines")


def make_home(home: Path, part: str) -> Path:
    """Make the folder ``part`` of a home, and the home itself, mode 0700; mend what is there and ours.

    A home that is the user's own home folder, or lies directly below ``/``, is left as it is; its parts are not.

    Raises:
        OSError: a folder cannot be made.
    """
    make_private(home)
    make_private(home / part)
    for name in _PARTS:
        _close_to_others(home / name)
    if home.resolve() != Path.home().resolve() and len(home.resolve().parts) > 2:
        _close_to_others(home)
    return home / part


def make_private(folder: Path) -> None:
    """Make a folder, mode 0700, and what is missing above it. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _close_to_others(folder: Path) -> None:
    """Take the rights of all other users from a folder of ours, unless it is one that is shared (sticky)."""
    with contextlib.suppress(OSError):
        status = folder.stat()
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid == os.geteuid() and mode & 0o077 and not mode & stat.S_ISVTX:
            folder.chmod(mode & 0o700)


def default_home() -> Path:
    """Return the home of a process whose environment names none."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data).absolute() / "iserve"


def home_folder() -> Path:
    """Return the home of this process: ``ISERVE_HOME``, else the default."""
    named = os.environ.get("ISERVE_HOME", "")
    return Path(named).expanduser().absolute() if named.strip() else default_home()
