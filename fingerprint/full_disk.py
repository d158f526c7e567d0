"""Messages on a file that could not be written, and on what a person can do about it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

__all__ = ["why_not_written"]

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than this process may write",
}


def why_not_written(error: OSError, folder: Path) -> str:
    """Say why in a few words; where there is no room, how much is left in ``folder`` and that some has to be
    freed.
    """
    full = _FULL.get(error.errno or 0)
    if full is None:
        return error.strerror or str(error)
    try:
        left = f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB are free in {folder}; "
    except OSError:
        left = ""
    return f"{full}; {left}free some or choose another place"
