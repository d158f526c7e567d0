"""Limit on the open files of this process, and how many connections it allows. Standard library only."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["most_connections", "raise_file_limit"]

_MOST_FILES = 65_536  # more are of no use to us, and some programs walk over all that are allowed
_OTHER_FILES = 256  # for all that is no connection of a client, and for connections on their way out
_FEWEST_CONNECTIONS = 16


def raise_file_limit() -> None:
    """Raise the soft limit on open files, usually 1,024, to the hard one, for what is started from here on too.

    Each process that iServe starts calls this first: without a file descriptor left it could neither look at
    another process nor reach it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections(wanted: int, *, files_each: int = 1) -> int:
    """Return the bound on clients' connections: ``wanted``, or fewer where the limit on open files is low.

    Args:
        files_each: 2 where each connection of a client may need one to a worker.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(_FEWEST_CONNECTIONS, (soft - _OTHER_FILES) // files_each))
