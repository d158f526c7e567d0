"""The engines of this machine: ``engines``, ``engines install``, ``engines rm``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import options as o

if TYPE_CHECKING:
    from daemon.engines.external import ExternalEngine

__all__ = ["register"]

_SOURCES = {"environment": "iserve engines install", "here": "iServe's own Python"}
_VERIFIED = {"run": "by running it", "read": "sources read", "unknown": "no"}

EngineName = Annotated[str, typer.Argument(metavar="ENGINE", help="The engine: vllm.")]


def register(app: typer.Typer) -> None:
    engines = typer.Typer(cls=o.CommandGroup, help="Engines: which are installed, and installing vLLM.")
    engines.callback(invoke_without_command=True, epilog="Example: iserve engines --json")(engines_list)
    engines.command("install", epilog="Example: iserve engines install vllm")(install)
    engines.command("rm", epilog="Example: iserve engines rm vllm 0.24.0")(remove)
    app.add_typer(engines, name="engines")


def engines_list(context: typer.Context, as_json: o.JsonOption = False) -> None:
    """List the engines of this machine with version, Python, and how far each was verified."""
    if context.invoked_subcommand is not None:
        return
    from iserve.cli.render import print_rows
    from iserve.engine_inventory import engine_documents
    from iserve.settings import load_settings

    documents = engine_documents(load_settings().home)
    if as_json:
        o.print_json(documents)
        return
    print_rows(
        ("engine", "version", "verified", "installed by", "Python"),
        [
            (
                f"{d.engine} (used)" if d.is_used else d.engine,
                d.version or "not installed",
                _VERIFIED.get(d.verified or "", ""),
                _SOURCES.get(d.source or "", "") if d.source != "setting" else "the setting",
                d.python or "",
            )
            for d in documents
        ],
    )
    for document in documents:
        if document.problem is not None:
            version = document.version
            typer.echo(document.problem if version is None else f"{document.engine} {version}: {document.problem}")


def install(
    engine: EngineName,
    version: Annotated[
        str | None,
        typer.Option("--version", metavar="V", help="Such as 0.33.0; else the one last run on a GPU."),
    ] = None,
) -> None:
    """Install ENGINE in an environment of its own under the home, with uv if it is there, else pip.

    Running processes find it at once. Interrupted, the same command begins anew with what was downloaded.
    """
    from iserve.engine_installer import install as install_engine
    from iserve.settings import load_settings

    adapter = _checked(engine, version)
    made = install_engine(load_settings(), engine, version, lambda line: typer.echo(line, err=True))
    typer.echo(f"{made.engine} {made.version} is installed in {made.folder}")
    used = adapter.interpreter.find()
    if used.python != str(made.python):
        typer.echo(f"workers are started with {used.python} all the same ({engine} {used.version(engine)})")


def remove(
    engine: EngineName,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="From `iserve engines`.")],
) -> None:
    """Remove what `iserve engines install` made. Refused while a deployment uses it."""
    from iserve.engine_installer import remove as remove_engine
    from iserve.settings import load_settings

    _checked(engine, version)
    remove_engine(load_settings(), engine, version)
    typer.echo(f"{engine} {version} is removed")


def _checked(engine: str, version: str | None) -> ExternalEngine:
    """Return the adapter of ``engine``, or raise a usage error: not installed so, or not a version."""
    from daemon.engines.environments import exact_version
    from iserve.engine_installer import installable

    with o.usage_errors():
        if version is not None:
            exact_version(version)
        return installable(engine)
