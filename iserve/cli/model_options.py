"""Options that say how a model is used: as text alone, with images, with its own code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from fingerprint.model_use import ModelUse
from iserve import request_help as h
from iserve.cli.options import usage_errors

__all__ = ["ImageTokens", "Images", "TextOnly", "TrustRemoteCode", "UseOptions", "warn_of_code"]

TextOnly = Annotated[bool, typer.Option("--text-only", help=h.TEXT_ONLY)]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help=h.TRUST_REMOTE_CODE)]
Images = Annotated[int, typer.Option("--images", metavar="N", min=0, help=h.IMAGES)]
ImageTokens = Annotated[int | None, typer.Option("--image-tokens", metavar="T", min=1, help=h.IMAGE_TOKENS)]


@dataclass(frozen=True, kw_only=True)
class UseOptions:
    """Use of the model, as typed."""

    text_only: TextOnly = False
    images: Images = 0
    image_tokens: ImageTokens = None
    trust_remote_code: TrustRemoteCode = False

    @property
    def use(self) -> ModelUse:
        """The checked use of the model."""
        with usage_errors():
            return ModelUse(
                text_only=self.text_only,
                images=self.images,
                image_tokens=self.image_tokens,
                trust_remote_code=self.trust_remote_code,
            )

    def body(self) -> dict[str, Any]:
        """Return the checked fields of the REST body; defaults are left out."""
        return {name: value for name, value in asdict(self.use).items() if value}


def warn_of_code(model: str | None, *, trusted: bool) -> None:
    """Say aloud, before anything is started, that code of the model will run."""
    if trusted:
        what = model or "the demo"
        typer.echo(
            f"iserve: --trust-remote-code runs Python code from the repository of {what} as the daemon's user",
            err=True,
        )
