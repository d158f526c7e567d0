"""The lock of an installation's home, held by its controller as long as it lives."""

from __future__ import annotations

from contextlib import AbstractContextManager

from daemon.process import ProcessRecord
from daemon.role_lock import hold_role
from iserve.settings import Settings

__all__ = ["hold_home"]


def hold_home(settings: Settings) -> AbstractContextManager[None]:
    """Hold the lock of this installation: one controller, or one restore, at a time.

    Raises:
        ConflictError: another controller holds it.
        UnavailableError: the home cannot be written.
    """

    def refusal(holder: ProcessRecord | None) -> str:
        who = "" if holder is None else f" (pid {holder.pid}, {holder.url})"
        return f"another controller{who} runs on {settings.home}; use it, or set ISERVE_HOME to another folder"

    return hold_role(settings.run_folder, "controller", refusal)
