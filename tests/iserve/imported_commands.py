"""The command line with what its commands import when they are run, for a process that is forked for each."""

from __future__ import annotations

import atexit
import threading
from importlib import import_module

import iserve.cli
from iserve.cli.app import make_app

__all__ = ["main"]

_USED = (
    "daemon.engines.registry",
    "iserve.api_documents",
    "iserve.cli.connection",
    "iserve.cli.home_processes",
    "iserve.cli.progress",
    "iserve.cli.render",
    "iserve.client",
    "iserve.planning.deployment_choice",
    "iserve.planning.document",
    "iserve.planning.estimator_factory",
    "iserve.planning.plan_document",
    "iserve.state.store",
    "iserve.verify.documents",
    "typer._adapters",
)
for name in _USED:
    import_module(name)
make_app()


def main() -> None:
    """Run the command, and end as Python does: its threads first, then what was to be called at the end."""
    try:
        iserve.cli.main()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
