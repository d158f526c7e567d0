"""``plan`` and ``estimate``: answers that start nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from iserve.cli import options as o

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("plan", epilog="Example: iserve plan ./Llama-2-7b --gpus a6000:8 --intent min-latency")(plan)
    app.command(
        "estimate",
        epilog="Example: iserve estimate ./Llama-2-7b --gpu h200 --config tp=2,weights=16bit --batch 8",
    )(estimate)


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A checkpoint folder, a config folder, a hub id or a registered name."),
]


def plan(
    model: ModelArgument,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="Plan for these instead, such as a6000:8. Needs no GPU.")
    ] = None,
    intent: o.IntentOption = o.DEFAULT_INTENT.kind,
    cost: o.CostOption = o.DEFAULT_INTENT.cost_model,
    slo: o.SloOption = None,
    percentile: o.Percentile = o.DEFAULT_INTENT.percentile,
    rate: o.Rate = None,
    quality: o.QualityOption = o.DEFAULT_INTENT.quality,
    budget: o.Budget = None,
    input_tokens: o.InputTokens = o.DEFAULT_WORKLOAD.input_tokens,
    output_tokens: o.OutputTokens = o.DEFAULT_WORKLOAD.output_tokens,
    batch: o.Batch = o.DEFAULT_WORKLOAD.batch,
    engine: o.EngineOption = "auto",
    policy: o.Policy = "hybrid",
    as_json: o.JsonOption = False,
) -> None:
    """Rank every configuration of MODEL for an intent, and explain the choice. Starts nothing.

    Without --gpus it plans for the devices that are free here, from the profile that `iserve profile` took.
    """
    from fingerprint.codec import to_json
    from fingerprint.gpus import parse_gpus
    from iserve.cli.live import registered_models
    from iserve.cli.render import print_plan
    from iserve.plan_service import plan_for_gpus

    wish = o.plan_options(
        intent=intent,
        cost=cost,
        slo=slo,
        percentile=percentile,
        rate=rate,
        quality=quality,
        budget=budget,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        batch=batch,
        policy=policy,
    )
    if gpus is None:
        from iserve.cli.live import live_plan

        document = live_plan(model, wish, engine)
    else:
        with o.usage_errors("--gpus"):
            gpu, count = parse_gpus(gpus)
        document = plan_for_gpus(model, gpu, count, wish, engine, registered=registered_models(model))
    if as_json:
        typer.echo(to_json(document, indent=2).decode())
    else:
        print_plan(document)


def estimate(
    model: ModelArgument,
    gpu: Annotated[str, typer.Option("--gpu", help="The GPU, such as h200.")],
    config: Annotated[
        str,
        typer.Option(
            "--config", help="tp=2,pp=1,weights=16bit,kv=16bit,pruning=none; what is left out: 1, 16bit."
        ),
    ] = "tp=1",
    batch: o.Batch = o.DEFAULT_WORKLOAD.batch,
    input_tokens: o.InputTokens = o.DEFAULT_WORKLOAD.input_tokens,
    output_tokens: o.OutputTokens = o.DEFAULT_WORKLOAD.output_tokens,
    engine: o.EngineOption = "auto",
    cost: o.CostOption = o.DEFAULT_INTENT.cost_model,
    as_json: o.JsonOption = False,
) -> None:
    """Predict memory, TTFT, TPOT and cost of one configuration on GPUs that need not be here."""
    from fingerprint.codec import to_json
    from fingerprint.config import Workload, parse_config
    from fingerprint.gpus import gpu_spec
    from iserve.cli.live import registered_models
    from iserve.cli.render import print_estimate
    from iserve.plan_service import estimate_for_gpu

    with o.usage_errors("--gpu"):
        device = gpu_spec(gpu)
    with o.usage_errors("--config"):
        wanted = parse_config(config, engine=engine)
    with o.usage_errors("--batch, --input-tokens, --output-tokens"):
        workload = Workload(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens)
    document = estimate_for_gpu(model, device, wanted, workload, cost, registered=registered_models(model))
    if as_json:
        typer.echo(to_json(document, indent=2).decode())
    else:
        print_estimate(document)
