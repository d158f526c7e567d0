"""Location of the home: the folder of one installation's state, logs, records and engine environments."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["default_home", "home_folder"]


def default_home() -> Path:
    """Return the home of a process whose environment names none."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data).absolute() / "iserve"


def home_folder() -> Path:
    """Return the home of this process: ``ISERVE_HOME``, else the default."""
    named = os.environ.get("ISERVE_HOME", "")
    return Path(named).expanduser().absolute() if named.strip() else default_home()
