"""Options that say how a model is used: as text alone, with images, with its own code."""

from __future__ import annotations

from typing import Annotated

import typer

from iserve.cli.options import HELP

__all__ = ["ImageTokens", "Images", "TextOnly", "TrustRemoteCode", "warn_of_code"]

TextOnly = Annotated[bool, typer.Option("--text-only", help=HELP["text_only"])]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help=HELP["trust_remote_code"])]
Images = Annotated[int, typer.Option("--images", metavar="N", min=0, help=HELP["images"])]
ImageTokens = Annotated[int | None, typer.Option("--image-tokens", metavar="T", min=1, help=HELP["image_tokens"])]


def warn_of_code(model: str | None, *, trusted: bool) -> None:
    """Say aloud, before anything is started, that code of the model will run."""
    if trusted:
        what = model or "the demo"
        typer.echo(
            f"iserve: --trust-remote-code runs Python code from the repository of {what} as the daemon's user",
            err=True,
        )
