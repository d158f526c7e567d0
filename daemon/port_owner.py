"""Ports: one that is free, and which process listens on one, a worker or another program that was first.

``/health`` is open to all and does not identify the process that answers, so that its 200 alone proves no worker.
Linux lists listening sockets with their inodes, and to the user whose process it is each process's descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from functools import cache

__all__ = ["free_port", "is_listening"]

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENING = b"0A"


def free_port(host: str) -> int:
    """Return a port on which no process listens now.

    Another process may take it first; the worker then is moved.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_listening(pids: Iterable[int], port: int) -> bool | None:
    """Return whether one of these processes listens on a TCP port; None where that cannot be seen."""
    inodes, hidden = _listening_inodes(port), False
    for pid in pids:
        try:
            if inodes and _holds(pid, inodes):
                return True
        except OSError:  # another user's process, or hidden by a sandbox
            hidden = True
    return None if hidden or not _is_shown() else False


def _listening_inodes(port: int) -> frozenset[str]:
    """Return the inodes of the sockets that listen on a port; none where the kernel has no table."""
    inodes, mark = set(), f":{port:04X} ".encode()
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table, "rb") as lines:
            for line in lines:
                if mark in line:  # most lines are not taken apart: there may be thousands of connections
                    _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                    if state == _LISTENING and local.endswith(mark.rstrip()):
                        inodes.add(inode.decode())
    return frozenset(inodes)


def _holds(pid: int, inodes: frozenset[str]) -> bool:
    """Return whether a process has one of these sockets open.

    Raises:
        OSError: its descriptors cannot be read.
    """
    links = {f"socket:[{inode}]" for inode in inodes}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), os.scandir(f"/proc/{pid}/fd") as descriptors:
        for descriptor in descriptors:
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(descriptor.path) in links:
                    return True
    return False


@cache
def _is_shown() -> bool:
    """Return whether this kernel shows whose a socket is; some sandboxes have the tables and leave them empty."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        try:
            return _holds(os.getpid(), _listening_inodes(own.getsockname()[1]))
        except OSError:
            return False
