"""Processes on the engine's GPUs that appeared since it was loaded and are not its own.

By process ids where the driver lists them; else by memory in use beyond what the engine's allocators hold, since a
driver in a container may list no process, or the container's alone. The standard library alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

LEAST_BYTES = 2 * 2**30  # of memory that is not the engine's: kernels and libraries are loaded when first used

Processes = Mapping[int, int | None]  # bytes that each holds, where the driver says


class Gpus(Protocol):
    """View of the driver (``base.Nvml``)."""

    def processes(self) -> Processes | None: ...

    def used_bytes(self) -> list[int]: ...


class Neighbours:
    """Processes that are known, as of when the engine had started.

    Args:
        before: processes on the GPUs before the engine started; None: not reported.
        own: the engine's processes, in this process's namespace.
        reserved_bytes: held by the engine's allocators on all its GPUs; None: not known.
    """

    def __init__(self, gpus: Gpus, before: Processes | None, own: set[int], reserved_bytes: int | None) -> None:
        listed = set(gpus.processes() or ())
        # Ids of another namespace do not say whose they are: all that are there now count as the engine's.
        self._known = set(before or ()) | (own & listed or listed)
        self._rest_bytes = _rest(gpus, reserved_bytes)

    def appeared(self, gpus: Gpus, own: set[int], reserved_bytes: int | None = None) -> list[dict[str, Any]]:
        """Return those that are there now, as the client's OtherProcess.

        Args:
            own, reserved_bytes: as of now; None: do not judge by memory.
        """
        listed = gpus.processes() or {}
        found = [{"pid": pid, "used_bytes": used} for pid, used in listed.items() if pid not in self._known | own]
        rest = _rest(gpus, reserved_bytes)
        if not found and rest is not None and self._rest_bytes is not None:
            more = rest - self._rest_bytes
            if more >= LEAST_BYTES:
                found.append({"pid": None, "used_bytes": more})
        return found


def _rest(gpus: Gpus, reserved_bytes: int | None) -> int | None:
    return None if reserved_bytes is None else sum(gpus.used_bytes()) - reserved_bytes


def family(pid: int) -> set[int]:
    """Return ``pid`` and all processes that it, or one of these, started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue  # it has ended
            children.setdefault(parent, []).append(int(folder.name))
    found, open_ = set(), [pid]
    while open_:
        one = open_.pop()
        found.add(one)
        open_ += children.get(one, [])
    return found


def own_family() -> set[int]:
    """Return this process and all below it."""
    return family(os.getpid())
