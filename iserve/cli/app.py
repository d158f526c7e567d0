"""The commands, put together. Each lives in a module that is imported when one of its commands is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from iserve import __version__
from iserve.cli.options import CommandGroup

__all__ = ["COMMANDS", "make_app"]

# What each module registers, in the order of ``iserve --help``; typer shows groups of commands last.
COMMANDS = {
    "deploy": ("deploy", "ps", "rm", "chat"),
    "show": ("show", "logs"),
    "update": ("update",),
    "plan": ("plan", "estimate"),
    "simulate": ("simulate",),
    "evaluate": ("evaluate",),
    "replay": ("replay",),
    "trace": ("trace",),
    "verify": ("verify",),
    "report": ("report",),
    "variant": ("variant",),
    "quality": ("quality",),
    "engines": ("engines",),
    "backup": ("backup", "restore"),
    "installation": ("up", "down", "status", "nodes", "doctor", "register", "profile", "keys"),
}


def make_app(first_word: str = "") -> typer.Typer:
    """Return the command line; where ``first_word``, the first argument, is a command, only what that one needs.

    So that ``iserve COMMAND --help`` is quick.
    """
    modules = [module for module, names in COMMANDS.items() if first_word in names]
    app = typer.Typer(
        name="iserve",
        cls=CommandGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Deploy a language model by intent: name it and what to optimise, get an OpenAI-compatible endpoint.",
        epilog="Example: iserve deploy --intent min-cost",
    )
    app.callback()(_root)
    for module in modules or COMMANDS:
        import_module(f"iserve.cli.{module}").register(app)
    return app


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"iserve {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
