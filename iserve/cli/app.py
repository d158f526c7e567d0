"""The commands, put together. Each lives in its own module and imports what is heavy only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from iserve import __version__

__all__ = ["app"]

app = typer.Typer(
    name="iserve",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Deploy a language model by intent: name it and what to optimise, get an OpenAI-compatible endpoint.",
    epilog="Example: iserve deploy --intent min-cost",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"iserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _register() -> None:
    from iserve.cli import operating, planning, replay, reporting, serving, simulate, tracing, verifying

    for module in (serving, planning, simulate, replay, tracing, verifying, reporting, operating):
        module.register(app)


_register()
