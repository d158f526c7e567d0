"""Check of a path that a person named for output: never in place of anything but a file."""

from __future__ import annotations

from pathlib import Path

from fingerprint.errors import ConfigError

__all__ = ["output_file"]


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
