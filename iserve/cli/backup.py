"""``backup`` and ``restore``: the state of an installation, to a file and from one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("backup", epilog="Example: iserve backup iserve-backup.db")(backup)
    app.command("restore", epilog="Example: iserve down && iserve restore iserve-backup.db && iserve up")(restore)


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file; its mode is 0600.")],
) -> None:
    """Write deployments, models, variants, profiles, checks and API keys to FILE; iServe may be running.

    Names and hashes of variants are in it, their tensors are not: add the adapters again where the home's folder
    `variants` is lost.
    """
    from iserve.settings import load_settings
    from iserve.state.backup import back_up, state_file

    contents = back_up(state_file(load_settings().state), file)
    typer.echo(f"{file}: {contents}")
    typer.echo("weights, tensors of variants, logs and settings are not in it", err=True)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `iserve backup` made.")],
) -> None:
    """Put the state in FILE in place of this home's. Needs `iserve down` first; a refusal changes nothing.

    API keys become what they were too: one that was revoked since the backup is valid again.
    """
    from fingerprint.errors import ConflictError
    from iserve.cli.home_processes import living_workers, process_states
    from iserve.controller.home_lock import hold_home
    from iserve.settings import load_settings
    from iserve.state import backup as state_backup

    settings = load_settings()
    state = state_backup.state_file(settings.state)
    running = [process.name for process in process_states(settings)[:3] if process.pid is not None]
    running += [f"worker {worker.folder.name}" for worker in living_workers(settings)]
    if running:
        raise ConflictError(f"{settings.home} has processes: {', '.join(running)}; end them first: iserve down")
    with hold_home(settings):
        contents = state_backup.restore(file, state)
    typer.echo(f"{settings.home} now has {contents}; start it: iserve up")
    if dict(contents.rows).get("api_keys"):
        typer.echo(
            "keys revoked since the backup are valid again: `iserve keys ls`, `iserve keys revoke ID`", err=True
        )
