"""Programs of an installation, each forked from a process that has imported it (:mod:`tests.forked_process`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fork_server import PROGRAMS
from tests.forked_process import Forking

__all__ = ["COMMAND", "SHIMS", "run_command"]

COMMAND = Path(sys.executable).with_name("iserve")
SHIMS = Forking("tests.imported_worker")
_COMMANDS = Forking("tests.iserve.imported_commands")
# Servers of what commands, the controller and the daemon start, by the module that `python -m` would run.
_PROGRAMS = {
    "iserve.controller": Forking("iserve.controller.__main__"),
    "iserve.gateway": Forking("iserve.gateway.__main__"),
    "daemon": Forking("daemon.__main__"),
    "daemon.shim": SHIMS,
}


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``iserve ARGUMENTS``; it forks the controller, daemon and gateway that it starts."""
    programs = {name: server.socket for name, server in _PROGRAMS.items()}
    own = dict(environment) | {PROGRAMS: json.dumps(programs)}
    return _COMMANDS.run([str(COMMAND), *arguments], own, stdin)
