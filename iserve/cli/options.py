"""Options that several commands share, and how their values become the core's types.

A value that cannot be used is a usage error (exit code 2), as is an option that does not exist. This module is
imported for every ``--help``, so it imports what is heavy only when it runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup, TyperOption

from fingerprint.config import Workload
from fingerprint.errors import BadInputError
from iserve import request_help as h
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo, Traffic, parse_slo

if TYPE_CHECKING:
    from iserve.planning.pipeline import PlanOptions
    from iserve.settings import Settings

__all__ = [
    "Batch",
    "CommandGroup",
    "CostOption",
    "EngineOption",
    "EngineSettings",
    "InputTokens",
    "JsonOption",
    "ModelArgument",
    "NameArgument",
    "OptionalModel",
    "OutputTokens",
    "QualityOption",
    "Refused",
    "Replicas",
    "Wish",
    "grouped",
    "not_empty",
    "replicated",
    "usage_errors",
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
    choices = [choice.strip("'") for choice in known.rstrip(".").split(", ")]
    near = get_close_matches(given.strip("'"), choices, n=1) if separator else []
    return f"{said.rstrip('.')}; did you mean {near[0]!r}?" if near else said


DEFAULT_WORKLOAD = Workload()
DEFAULT_INTENT = Intent()


def _known_engine(name: str) -> str:
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
CostOption = Annotated[CostModel, typer.Option("--cost", help=h.COST)]
QualityOption = Annotated[
    Quality,
    typer.Option("--quality", help=h.QUALITY),
]
InputTokens = Annotated[int, typer.Option("--input-tokens", help=h.INPUT_TOKENS)]
OutputTokens = Annotated[int, typer.Option("--output-tokens", help=h.OUTPUT_TOKENS)]
Batch = Annotated[int, typer.Option("--batch", help="Requests at once; also the most that run at once.")]
BatchOrMore = Annotated[
    int | None,
    typer.Option(
        "--batch",
        help=h.BATCH,
    ),
]
EngineOption = Annotated[str, typer.Option("--engine", callback=_known_engine, help=h.ENGINE)]
Replicas = Annotated[
    int,
    typer.Option(
        "--replicas",
        metavar="N",
        help=h.REPLICAS,
    ),
]
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


def replicated(options: PlanOptions, replicas: int) -> PlanOptions:
    """Return ``options`` for so many replicas, checked."""
    with usage_errors("--replicas"):
        return replace(options, replicas=replicas)


def workload_of(batch: int, input_tokens: int, output_tokens: int, longest_tokens: int | None = None) -> Workload:
    """Return the checked workload of these options."""
    with usage_errors():
        return Workload(
            batch=batch, input_tokens=input_tokens, output_tokens=output_tokens, longest_tokens=longest_tokens or 0
        )


@functools.cache
def _traffic_of(trace: str) -> Traffic:
    from traces.loader import requests_of
    from traces.traffic import traffic_of

    return traffic_of(requests_of(trace))


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Options of ``plan`` and ``deploy``: a field is an option. As typed; ``checked`` judges them."""

    intent: Annotated[IntentKind, typer.Option("--intent", help=h.INTENT)] = DEFAULT_INTENT.kind
    cost: CostOption = DEFAULT_INTENT.cost_model
    slo: Annotated[
        str | None, typer.Option("--slo", help="Latency limits in seconds, such as ttft=0.5,tpot=0.05,e2e=10.")
    ] = None
    percentile: Annotated[
        float,
        typer.Option("--percentile", help=h.PERCENTILE),
    ] = DEFAULT_INTENT.percentile
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            help=h.RATE,
        ),
    ] = None
    burstiness: Annotated[
        float,
        typer.Option("--burstiness", help=h.BURSTINESS),
    ] = DEFAULT_INTENT.traffic.burstiness
    input_cv: Annotated[float, typer.Option("--input-cv", help=h.INPUT_CV)] = DEFAULT_INTENT.traffic.input_cv
    output_cv: Annotated[float, typer.Option("--output-cv", help=h.OUTPUT_CV)] = DEFAULT_INTENT.traffic.output_cv
    arrivals: Annotated[
        str | None,
        typer.Option(
            "--traffic-trace",
            metavar="TRACE",
            help="How --rate moves and lengths vary: as in a trace file or synthetic:NAME. In place of "
            "--burstiness, --input-cv and --output-cv.",
        ),
    ] = None
    quality: QualityOption = DEFAULT_INTENT.quality
    budget: Annotated[float | None, typer.Option("--budget", help=h.BUDGET)] = None
    input_tokens: InputTokens = DEFAULT_WORKLOAD.input_tokens
    output_tokens: OutputTokens = DEFAULT_WORKLOAD.output_tokens
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            help=h.CONTEXT,
        ),
    ] = None
    batch: BatchOrMore = None
    expect: Annotated[
        int,
        typer.Option(
            "--expected-deployments",
            metavar="N",
            min=0,
            help=h.EXPECTED_DEPLOYMENTS,
        ),
    ] = 0
    engine: EngineOption = "auto"
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help=f"{h.POLICY} simulate takes look-ahead[:PRICE] too.",
        ),
    ] = None

    @property
    def limits(self) -> Slo | None:
        with usage_errors("--slo"):
            return None if self.slo is None else parse_slo(self.slo)

    @property
    def traffic(self) -> Traffic:
        """Traffic of the trace, or of the three options."""
        with usage_errors():
            told = Traffic(burstiness=self.burstiness, input_cv=self.input_cv, output_cv=self.output_cv)
        if self.arrivals is None:
            return told
        with usage_errors("--traffic-trace"):
            if self.rate is None:
                raise BadInputError("a trace says how a rate moves; give --rate, the mean, as well")
            if told != Traffic():
                raise BadInputError("give either a trace or --burstiness, --input-cv and --output-cv")
        return _traffic_of(self.arrivals)

    def checked(self, settings: Settings, *, sees_load: bool = False) -> PlanOptions:
        """Return the options in the core's types.

        Args:
            sees_load: the placer is given what is deployed and its load, which look-ahead needs.

        Raises:
            typer.BadParameter: a value that cannot be used.
        """
        from iserve.planning.pipeline import PlanOptions
        from placement.placer_registry import check_placement, need_solver

        batch = DEFAULT_WORKLOAD.batch if self.batch is None else self.batch
        workload = workload_of(batch, self.input_tokens, self.output_tokens, self.context)
        limits, traffic = self.limits, self.traffic
        policy = settings.policy if self.policy is None else self.policy
        with usage_errors():
            check_placement(policy, sees_load=sees_load)
        need_solver(policy)  # before any work
        with usage_errors():
            return PlanOptions(
                intent=Intent(
                    kind=self.intent,
                    cost_model=self.cost,
                    slo=limits,
                    percentile=self.percentile,
                    rate_per_s=self.rate,
                    traffic=traffic,
                    quality=self.quality,
                    budget=self.budget,
                ),
                workload=workload,
                policy=policy,
                load_threshold=settings.load_threshold,
                expect=self.expect,
                more_requests=self.batch is None,
                longer_requests=self.context is None,
            )

    def body(self) -> dict[str, Any]:
        """Return the fields that the REST API's plan and deployment bodies share."""
        limits, traffic = self.limits, self.traffic
        return {
            "intent": self.intent,
            "cost": self.cost,
            "slo": limits and {"ttft_s": limits.ttft_s, "tpot_s": limits.tpot_s, "e2e_s": limits.e2e_s},
            "percentile": self.percentile,
            "rate_per_s": self.rate,
            "burstiness": traffic.burstiness,
            "input_cv": traffic.input_cv,
            "output_cv": traffic.output_cv,
            "relative_rates": list(traffic.relative_rates),
            "rate_window_s": traffic.window_s,
            "quality": self.quality,
            "budget": self.budget,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "context_tokens": self.context,
            "batch": self.batch,
            "expected_deployments": self.expect,
            "engine": self.engine,
            "policy": self.policy,
        }


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
        typer.Option("--tool-call-parser", metavar="NAME", help=h.TOOL_CALL_PARSER),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        typer.Option("--reasoning-parser", metavar="NAME", help=h.REASONING_PARSER),
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


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` as typer reads it: a dataclass parameter, such as ``Wish``, becomes its fields."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type[Any], tuple[str, ...]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        own = [parameter]
        if isinstance(kind, type) and is_dataclass(kind):
            own = _options_of(kind)
            groups[parameter.name] = (kind, tuple(option.name for option in own))
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        of = {name: kind(**{n: values.pop(n) for n in names}) for name, (kind, names) in groups.items()}
        command(**of, **values)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _options_of(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
