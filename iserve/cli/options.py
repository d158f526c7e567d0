"""Options that several commands share, and how their values become the core's types.

A value that cannot be used is a usage error (exit code 2), as is an option that does not exist. This module is
imported for every ``--help``, so it imports what is heavy only when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from fingerprint.config import Workload
from fingerprint.errors import BadInputError
from iserve.api_types import DeployBody
from iserve.attribute_docs import attribute_docstrings
from planner.intent import CostModel, Intent, Quality

__all__ = [
    "HELP",
    "Batch",
    "CommandGroup",
    "CostOption",
    "EngineOption",
    "EngineSettings",
    "ImageTokens",
    "Images",
    "InputTokens",
    "JsonOption",
    "ModelArgument",
    "NameArgument",
    "OptionalModel",
    "OutputTokens",
    "QualityOption",
    "Refused",
    "TextOnly",
    "TrustRemoteCode",
    "known_engine",
    "not_empty",
    "print_json",
    "usage_errors",
    "warn_of_code",
    "workload_of",
]


# Names of options before 0.2, which still work for one release and are in no help.
FORMER_NAMES = {
    "--expect": "--expected-deployments",
    "--refuse-late": "--reject-late",
    "--max-waiting": "--queue-limit",
    "--most-waiting": "--abort-at-queue",
    "--judge": "--eval-slo",
    "--harvest": "--background-profile",
    "--picture": "--plot",
    "--truth": "--measurements",
    "--arrivals": "--traffic-trace",
    "--aggregate": "--merge-intervals",
    "--deploy-every": "--deploy-interval",
}


def _todays_name(word: str) -> str:
    name, separator, value = word.partition("=")
    return f"{FORMER_NAMES[name]}{separator}{value}" if name in FORMER_NAMES else word


class CommandGroup(TyperGroup):
    """Commands under one name. Its own flags that are not given are false, not None: typer 0.29 loads pydantic,
    a third of what ``iserve COMMAND --help`` took, to read a None."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if isinstance(param, TyperOption) and param.is_flag and param.default is None:
                param.default = False
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [_todays_name(word) for word in args])

    def invoke(self, ctx: Any) -> Any:
        """Invoke as typer does; a choice that does not exist is refused with the nearest one."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _choice_words(error.message)
            raise


def _choice_words(message: str) -> str:
    """Return typer's refusal of a choice without pydantic's prefix and with the nearest one."""
    from difflib import get_close_matches

    said = message.removeprefix("Value error, ")
    given, separator, known = said.partition(" is not one of '")
    if "did you mean" in known:  # of a group within this one
        return said
    choices = [choice.strip("'") for choice in known.rstrip(".").split(", ")]
    near = get_close_matches(given.strip("'"), choices, n=1) if separator else []
    return f"{said.rstrip('.')}; did you mean {near[0]!r}?" if near else said


HELP: Mapping[str, str] = {name: " ".join(text.split()) for name, text in attribute_docstrings(DeployBody).items()}
DEFAULT_WORKLOAD = Workload()
DEFAULT_INTENT = Intent()


def known_engine(name: str) -> str:
    if name != "auto":
        from daemon.engines.registry import capabilities_for

        with usage_errors():
            capabilities_for(name)
    return name


def not_empty(value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise typer.BadParameter("must not be empty")
    return value


def _may_be_named(name: str) -> str:
    """Return ``name``.

    Raises:
        NotFoundError: no deployment can have it; in a path it would ask for something else (``a/log``).
    """
    from fingerprint.errors import ConfigError, NotFoundError
    from iserve.api_types import check_name

    try:
        return check_name(name)
    except ConfigError as error:
        raise NotFoundError(f"no deployment is named {name[:80]!r}") from error


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The deployment's name.", callback=_may_be_named)
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint folder, a config folder, a hub id or a registered name.",
        callback=not_empty,
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A checkpoint folder, a hub id or a registered name; else the demo.",
        callback=not_empty,
    ),
]
CostOption = Annotated[CostModel, typer.Option("--cost", help=HELP["cost"])]
QualityOption = Annotated[
    Quality,
    typer.Option("--quality", help=HELP["quality"]),
]
InputTokens = Annotated[int, typer.Option("--input-tokens", help=HELP["input_tokens"])]
OutputTokens = Annotated[int, typer.Option("--output-tokens", help=HELP["output_tokens"])]
Batch = Annotated[int, typer.Option("--batch", help="Requests at once; also the most that run at once.")]
BatchOrMore = Annotated[int | None, typer.Option("--batch", help=HELP["batch"])]
EngineOption = Annotated[str, typer.Option("--engine", callback=known_engine, help=HELP["engine"])]
Refused = Annotated[
    bool, typer.Option("--refused", help="List every configuration that is refused, with its reason.")
]
_NEWEST = "newest"  # of the releases of an engine: none in particular
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def usage_errors(option: str | None = None) -> Iterator[None]:
    """Turn the core's complaint about a value into a usage error, of ``option`` where it names none."""
    try:
        yield
    except BadInputError as error:
        raise typer.BadParameter(str(error), param_hint=option and f"'{option}'") from error


def print_json(document: object) -> None:
    from fingerprint.codec import to_json

    typer.echo(to_json(document, indent=2).decode())


def workload_of(batch: int, input_tokens: int, output_tokens: int) -> Workload:
    """Return the checked workload of these options."""
    with usage_errors():
        return Workload(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The release of the engine, and options for the engine itself. As typed."""

    engine_version: Annotated[
        str | None,
        typer.Option(
            "--engine-version",
            metavar="VERSION",
            help="Installed release of the engine, such as 0.33.0; newest: none in particular.",
        ),
    ] = None
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-arg",
            metavar="KEY=VALUE",
            help="An option of the engine's own server, such as max-log-len=100 (KEY alone: a flag); repeatable. "
            "What iServe sets itself is refused.",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        typer.Option("--tool-call-parser", metavar="NAME", help=HELP["tool_call_parser"]),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        typer.Option("--reasoning-parser", metavar="NAME", help=HELP["reasoning_parser"]),
    ] = None

    def body(self) -> dict[str, Any]:
        """Return the fields as the REST API takes them, checked; what is not given is left out."""
        from daemon.engine_options import EngineOptions, read_engine_args

        with usage_errors("--engine-arg"):
            read = read_engine_args(self.engine_arg or [])
            EngineOptions(arguments=tuple(read.items()))
        with usage_errors():
            EngineOptions(tool_call_parser=self.tool_call_parser, reasoning_parser=self.reasoning_parser)
        parsers = {"tool_call_parser": self.tool_call_parser, "reasoning_parser": self.reasoning_parser}
        found: dict[str, Any] = {name: value for name, value in parsers.items() if value is not None}
        if self.engine_arg:
            found["engine_args"] = read
        if self.engine_version is not None:
            found["engine_version"] = None if self.engine_version == _NEWEST else self.engine_version
        return found


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
