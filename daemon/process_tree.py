"""Means of a parent to outlive its descendants: Linux's prctl, and ending all of them.

Standard library only; for processes with one thread (the shim, an engine's wrapper).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

from daemon.procfs import processes

__all__ = ["become_subreaper", "end_all_children", "set_parent_death_signal", "signal_group"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 5.0


def become_subreaper() -> None:
    """Make orphans of our descendants our children from now on, whatever their group or session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """Have the kernel send us ``signum`` when our parent dies; 0 for nothing."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def signal_group(group_id: int, signum: int) -> bool:
    """Send ``signum`` to a process group; False when no process of it remains that may be signalled."""
    try:
        os.killpg(group_id, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_all_children() -> None:
    """Kill and reap every descendant of a subreaper; gives up after 5 s on what the kernel keeps."""
    me, deadline = os.getpid(), time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # the one sure sign that none is left
        for stat in processes():
            if stat.parent_pid == me:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stat.pid, signal.SIGKILL)
        time.sleep(0.02)
