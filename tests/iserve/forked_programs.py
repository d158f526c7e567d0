"""Programs of an installation, each forked from a process that has imported it (:mod:`tests.forked_process`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fork_server import PROGRAMS
from tests.forked_process import Forking

__all__ = ["COMMAND", "CONTROLLERS", "SHIMS", "run_command"]

COMMAND = Path(sys.executable).with_name("iserve")
SHIMS = Forking("tests.imported_worker")
_SOURCES = "tests.known_sources"
# With what opening the state and the first estimate from a profile import.
CONTROLLERS = Forking(
    "iserve.controller.__main__", _SOURCES, "alembic.command", "scipy.optimize", "sklearn.linear_model"
)
_COMMANDS = Forking("tests.iserve.imported_commands", _SOURCES)
_TORCH_COMMANDS = Forking("tests.iserve.imported_torch_commands", _SOURCES)
# Servers of what commands, the controller and the daemon start, by the module that `python -m` would run.
_PROGRAMS = {
    "iserve.controller": CONTROLLERS,
    "iserve.gateway": Forking("iserve.gateway.__main__", "daemon.variants.store"),
    "daemon": Forking("daemon.__main__", _SOURCES),
    "daemon.shim": SHIMS,
}


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``iserve ARGUMENTS``; it forks the controller, daemon and gateway that it starts."""
    programs = {name: server.socket for name, server in _PROGRAMS.items()}
    own = dict(environment) | {PROGRAMS: json.dumps(programs)}
    commands = _TORCH_COMMANDS if _computes(arguments) else _COMMANDS
    return commands.run([str(COMMAND), *arguments], own, stdin)


def _computes(arguments: Sequence[str]) -> bool:
    """Return whether the command computes with a checkpoint that it is given, in its own process."""
    return arguments[0] in {"quality", "variant"} and any(
        Path(word, "config.json").is_file() for word in arguments
    )
