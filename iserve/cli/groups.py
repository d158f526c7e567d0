"""Groups of options: a dataclass parameter of a command becomes its fields.

A field of a request for a plan is an option, and its text is the option's help.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from fingerprint.errors import BadInputError, ConfigError
from iserve.api_types import ExpectedDeployment, PlanRequest
from iserve.cli.options import HELP, known_engine, not_empty, usage_errors
from planner.intent import Slo, check_replicas, parse_slo

if TYPE_CHECKING:
    from iserve.planning.pipeline import PlanOptions
    from iserve.settings import Settings

__all__ = ["checked", "grouped", "read_slo", "request_of"]

Request = TypeVar("Request", bound=PlanRequest)

_OF_COMMANDS = {  # which have them as arguments, or as options of their own
    *("model", "gpus", "deployment", "max_seconds", "relative_rates", "rate_window_s"),
    *("engine_args", "engine_version", "tool_call_parser", "reasoning_parser"),
}
_Trace = Annotated[
    str | None,
    typer.Option(
        "--traffic-trace",
        metavar="TRACE",
        help="How --rate moves and lengths vary: as in a trace file or synthetic:NAME. In place of "
        "--burstiness, --input-cv and --output-cv.",
    ),
]


def read_slo(text: str) -> Slo:
    """Return the limits in ``text``, for an option."""
    with usage_errors("--slo"):
        return parse_slo(text)


def _replicas(number: int | None) -> int | None:
    with usage_errors("--replicas"):
        return None if number is None else check_replicas(number)


def _expected_models(given: list[str]) -> tuple[ExpectedDeployment, ...]:
    """Return each ``MODEL`` or ``MODEL=RATE``."""
    found = []
    for text in given:
        model, separator, rate = text.rpartition("=")
        with usage_errors("--expected-model"):
            try:
                found.append(
                    ExpectedDeployment(model=model, rate_per_s=float(rate))
                    if separator
                    else ExpectedDeployment(model=text)
                )
            except ValueError as error:
                raise ConfigError(f"{text!r} is not MODEL or MODEL=RATE with requests per second") from error
    return tuple(found)


# What is not ``--name-of-the-field`` with the field's text, or takes no value as it is typed.
_MORE: Mapping[str, Mapping[str, Any]] = {
    "slo": {
        "parser": read_slo,
        "metavar": "<str>",
        "help": "Latency limits in seconds, such as ttft=0.5,tpot=0.05,e2e=10.",
    },
    "rate_per_s": {"flag": "--rate"},
    "context_tokens": {"flag": "--context", "min": 1},
    "expected_deployments": {"metavar": "N", "min": 0},
    "expected_models": {
        "flag": "--expected-model",
        "metavar": "MODEL[=RATE]",
        "callback": _expected_models,
        "hint": list[str],
    },
    "variants": {"metavar": "N", "min": 0},
    "variant_rank": {"flag": "--rank", "metavar": "R", "min": 0},
    "delta_mib": {"flag": "--delta-mib", "metavar": "MIB", "min": 0},
    "variant_popularity": {"flag": "--popularity", "metavar": "LAW"},
    "base_share": {"metavar": "SHARE"},
    "engine": {"callback": known_engine},
    "policy": {"callback": not_empty, "help": f"{HELP['policy']} simulate takes look-ahead[:PRICE] too."},
    "replicas": {"callback": _replicas, "metavar": "N"},
    "images": {"metavar": "N", "min": 0},
    "image_tokens": {"metavar": "T", "min": 1},
    "scale_to_zero_s": {"flag": "--scale-to-zero", "metavar": "SECONDS"},
}


def request_of(kind: type[Request], *, arrivals: str | None = None, **values: Any) -> Request:
    """Return the request of these options' values, with the traffic of ``arrivals``, a trace.

    Raises:
        typer.BadParameter: a value that cannot be used.
    """
    with usage_errors():
        request = kind(**values)
    if arrivals is None:
        return request
    with usage_errors("--traffic-trace"):
        if request.rate_per_s is None:
            raise BadInputError("a trace says how a rate moves; give --rate, the mean, as well")
        if request.given().keys() & {"burstiness", "input_cv", "output_cv"}:
            raise BadInputError("give either a trace or --burstiness, --input-cv and --output-cv")
    from traces.trace_argument import requests_of
    from traces.traffic import traffic_of

    found = traffic_of(requests_of(arrivals))
    return replace(
        request,
        burstiness=found.burstiness,
        input_cv=found.input_cv,
        output_cv=found.output_cv,
        relative_rates=found.relative_rates,
        rate_window_s=found.window_s,
    )


def checked(request: PlanRequest, settings: Settings, *, sees_load: bool = False) -> PlanOptions:
    """Return the planner's options of ``request``.

    Args:
        sees_load: the placer is given what is deployed and its load, which look-ahead needs.

    Raises:
        typer.BadParameter: a value that cannot be used.
    """
    from placement.placer_registry import need_solver

    with usage_errors():
        options = request.options(
            default_policy=settings.policy, load_threshold=settings.load_threshold, sees_load=sees_load
        )
    need_solver(options.policy)  # before any work
    return options


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` as typer reads it: a dataclass parameter becomes its fields."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind: Any = parameter.annotation
        own = [parameter]
        if isinstance(kind, type) and is_dataclass(kind):
            own = _options_of(kind)
            make: Callable[..., Any] = kind
            if issubclass(kind, PlanRequest):
                own.append(_option("arrivals", _Trace, None))
                make = functools.partial(request_of, kind)
            groups[parameter.name] = (make, tuple(option.name for option in own))
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own]

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        of = {name: make(**{n: values.pop(n) for n in names}) for name, (make, names) in groups.items()}
        command(**of, **values)

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _options_of(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    of_request = issubclass(group, PlanRequest)
    return [
        _option(
            field.name,
            _described(field.name, hints[field.name]) if of_request else hints[field.name],
            inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(group)
        if not (of_request and field.name in _OF_COMMANDS)
    ]


def _described(name: str, hint: Any) -> Any:
    """Return the field of a request as typer reads it."""
    more = {"flag": f"--{name.replace('_', '-')}", "help": HELP[name], **_MORE.get(name, {})}
    hint = more.pop("hint", hint)
    option = typer.Option(more.pop("flag"), **more)
    return Annotated[hint, option]


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
