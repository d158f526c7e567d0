"""Options that several commands share, and how their values become the core's types.

A value that cannot be used is a usage error (exit code 2), as is an option that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from fingerprint.config import Workload
from fingerprint.errors import BadInputError
from iserve.planning import PlanOptions
from planner.intent import CostModel, Intent, IntentKind, Quality, parse_slo

__all__ = [
    "Batch",
    "Budget",
    "CostOption",
    "EngineOption",
    "InputTokens",
    "IntentOption",
    "JsonOption",
    "OutputTokens",
    "Percentile",
    "Policy",
    "QualityOption",
    "Rate",
    "SloOption",
    "plan_options",
    "usage_errors",
]

DEFAULT_WORKLOAD = Workload()
DEFAULT_INTENT = Intent()


def _known_engine(name: str) -> str:
    if name != "auto":
        from daemon.engines.registry import capabilities_for

        try:
            capabilities_for(name)
        except BadInputError as error:
            raise typer.BadParameter(str(error)) from error
    return name


IntentOption = Annotated[IntentKind, typer.Option("--intent", help="What to optimise.")]
CostOption = Annotated[CostModel, typer.Option("--cost", help="What a request costs.")]
SloOption = Annotated[
    str | None, typer.Option("--slo", help="Latency limits in seconds, such as ttft=0.5,tpot=0.05,e2e=10.")
]
Percentile = Annotated[float, typer.Option("--percentile", help="Of the waiting time, when --rate is given.")]
Rate = Annotated[float | None, typer.Option("--rate", help="Requests per second to be served.")]
QualityOption = Annotated[
    Quality,
    typer.Option("--quality", help="exact: 16 bits only; near: int8 and fp8 too; any: everything, unmeasured."),
]
Budget = Annotated[float | None, typer.Option("--budget", help="Most a request may cost, in the cost's unit.")]
InputTokens = Annotated[int, typer.Option("--input-tokens", help="Prompt length to plan for.")]
OutputTokens = Annotated[int, typer.Option("--output-tokens", help="Answer length to plan for.")]
Batch = Annotated[int, typer.Option("--batch", help="Requests at once; also the most that run at once.")]
EngineOption = Annotated[
    str, typer.Option("--engine", callback=_known_engine, help="torch, vllm, tensorrt-llm or auto.")
]
Policy = Annotated[str, typer.Option("--policy", help="Placement: hybrid, packing or least-loaded.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def usage_errors(option: str) -> Iterator[None]:
    """Turn the core's complaint about a value into a usage error of ``option``."""
    try:
        yield
    except BadInputError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from error


def plan_options(
    *,
    intent: IntentKind,
    cost: CostModel,
    slo: str | None,
    percentile: float,
    rate: float | None,
    quality: Quality,
    budget: float | None,
    input_tokens: int,
    output_tokens: int,
    batch: int,
    policy: str,
    load_threshold: float = PlanOptions().load_threshold,
) -> PlanOptions:
    """The checked options of a plan."""
    from placement.policies import make_policy

    with usage_errors("--slo"):
        limits = None if slo is None else parse_slo(slo)
    with usage_errors("--policy"):
        make_policy(policy)
    with usage_errors("--batch, --input-tokens, --output-tokens"):
        workload = Workload(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens)
    with usage_errors("--intent"):
        wish = Intent(
            kind=intent,
            cost_model=cost,
            slo=limits,
            percentile=percentile,
            rate_per_s=rate,
            quality=quality,
            budget=budget,
        )
    return PlanOptions(intent=wish, workload=workload, policy=policy, load_threshold=load_threshold)
