"""Files that a person named for output: never in place of anything but a file, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

from fingerprint.errors import ConfigError, ConflictError, NotFoundError

__all__ = ["output_file", "why_not_written", "write_output"]

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than this process may write",
}


def output_file(target: Path) -> Path:
    """Return the file itself, behind all links to it; it need not exist, its directory must.

    A file is written next to its name and then takes it, whole or not at all; a device or a pipe would be gone
    after that (``/dev/null`` too, for a user with the right), and a link would no longer be one.

    Raises:
        ConfigError: a directory, a device, a pipe, a socket, ``-``, or a directory that is not there.
    """
    if str(target) == "-":
        raise ConfigError("- is no name for a file here; nothing is written to standard output, give another")
    try:
        resolved = target.resolve()
    except (OSError, RuntimeError) as error:  # a ring of links; older Pythons raise the latter
        raise ConfigError(f"{target} leads nowhere: {getattr(error, 'strerror', None) or error}") from error
    if resolved.is_dir():
        raise ConfigError(f"{target} is a directory; name a file in it")
    if not resolved.parent.is_dir():
        raise ConfigError(f"the directory {resolved.parent} is not there; create it first")
    if resolved.is_symlink() or (resolved.exists() and not resolved.is_file()):
        raise ConfigError(f"{target} is not a file but a device, a pipe or a socket; name a file")
    return resolved


def write_output(target: Path, text: str, *, replaces: bool = True) -> None:
    """Put ``text`` into ``target`` whole or not at all.

    Args:
        replaces: False: a file that is there stays.

    Raises:
        NotFoundError: the directory cannot be written to.
        ConflictError: ``target`` is there and stays.
    """
    folder, temporary = target.absolute().parent, None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=folder, prefix=f".{target.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o644)
        if replaces:
            temporary.replace(target)
        else:
            os.link(temporary, target)
    except FileExistsError as error:
        raise ConflictError(f"{target} is there already; give another file with --output") from error
    except OSError as error:
        raise NotFoundError(f"cannot write {target}: {why_not_written(error, folder)}") from error
    except UnicodeEncodeError as error:
        raise NotFoundError(f"cannot write {target}: {error}") from error
    finally:
        if temporary is not None:  # a full disk, which a part of a file need not fill further
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


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
