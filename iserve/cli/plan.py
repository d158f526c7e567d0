"""``plan`` and ``estimate``: answers that start no deployment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fingerprint.model_use import ModelUse
from iserve.api_types import LaunchBody, PlanBody
from iserve.cli import export as e
from iserve.cli import gpu_options as g
from iserve.cli import options as o
from iserve.cli.groups import checked, grouped

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command(
        "plan",
        epilog="Example: iserve plan ./Llama-2-7b --gpus a6000:8 --intent min-latency; or "
        "iserve plan ./Llama-2-7b --gpus my-gpu:8 --gpu-file my-gpu.json; or "
        "iserve plan ./llava-1.5-7b --gpus h200:1 --images 2",
    )(grouped(plan))
    app.command(
        "estimate",
        epilog="Example: iserve estimate ./Llama-2-7b --gpu h200 --config tp=2,weights=16bit --batch 8; or "
        "iserve estimate ./Llama-2-7b --gpu-file my-gpu.json",
    )(estimate)


def plan(
    model: o.ModelArgument,
    *,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="Plan for these instead, such as a6000:8. Needs no GPU.")
    ] = None,
    gpu_file: g.GpuFile = None,
    request: PlanBody,
    picture: Annotated[
        bool, typer.Option("--plot", help="Draw the Pareto front: cost against latency, in characters.")
    ] = False,
    refused: o.Refused = False,
    as_kind: e.AsOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Rank every configuration of MODEL for an intent, and explain the choice. Starts no deployment of MODEL.

    With --gpus or --gpu-file it starts nothing. Without, it plans for the devices that are free here, from the
    profile that `iserve profile` took, and starts this home, with its deployments, as `iserve up` if it is down.
    With --as it prints the command or file that starts what a deploy would: the same engine, limits and devices.
    Exit code 1 if no configuration is feasible.
    """
    from iserve.cli.connection import client_for_plan, registered_models, with_model_arguments
    from iserve.cli.render import print_plan
    from iserve.planning.document import PlanDocument
    from iserve.planning.offline import plan_for_gpus
    from iserve.settings import load_settings

    settings = load_settings()
    if as_kind is not None:
        given = {"--json": as_json, "--plot": picture, "--refused": refused}
        if others := [name for name, value in given.items() if value]:
            raise typer.BadParameter(f"--as prints nothing else; leave {', '.join(others)} out")
        checked(request, settings)  # here already: a bad value must not start a controller
        e.print_as(as_kind, g.named_gpus(gpus, gpu_file), LaunchBody(**vars(replace(request, model=model))))
        return
    options = checked(request, settings)
    there = g.named_gpus(gpus, gpu_file)
    if there is None:
        request = with_model_arguments(request, model, settings)
        document = client_for_plan(settings).post("/api/v1/plans", request.given(), PlanDocument)
    else:
        registered = registered_models(model, settings)
        document = plan_for_gpus(model, *there, options, request.engine, registered=registered, use=request.use)
    if as_json:
        o.print_json(document)
    else:
        print_plan(document, refused=refused)
        if picture:
            from iserve.cli.pareto_text import print_pareto  # with the reports' axes: few plans are drawn

            print_pareto(document)
    if document.chosen is None:
        raise typer.Exit(1)


def estimate(
    model: o.ModelArgument,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU, such as h200.")] = None,
    gpu_file: g.GpuFile = None,
    config: Annotated[
        str,
        typer.Option(
            "--config",
            help="tp=2,pp=1,weights=16bit,kv=16bit,pruning=none; what is left out: 1, the checkpoint's own "
            "weights, 16bit, none. With --profile experts=parallel, where that was measured.",
        ),
    ] = "tp=1",
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="What `iserve profile --json` printed: from it, not the roofline."),
    ] = None,
    batch: o.Batch = o.DEFAULT_WORKLOAD.batch,
    input_tokens: o.InputTokens = o.DEFAULT_WORKLOAD.input_tokens,
    output_tokens: o.OutputTokens = o.DEFAULT_WORKLOAD.output_tokens,
    text_only: o.TextOnly = False,
    images: o.Images = 0,
    image_tokens: o.ImageTokens = None,
    engine: o.EngineOption = "auto",
    cost: o.CostOption = o.DEFAULT_INTENT.cost_model,
    as_json: o.JsonOption = False,
) -> None:
    """Predict memory, TTFT, TPOT and cost of one configuration on GPUs that need not be here.

    Exit code 1 if no engine runs it or it does not fit.
    """
    from fingerprint.config import parse_config
    from iserve.cli.connection import registered_models
    from iserve.cli.render import print_estimate
    from iserve.planning.estimator_factory import read_profile
    from iserve.planning.offline import estimate_for_gpu
    from iserve.settings import load_settings

    device = g.one_gpu(gpu, gpu_file)
    with o.usage_errors("--config"):
        wanted = parse_config(config, engine=engine)
    workload = o.workload_of(batch, input_tokens, output_tokens)
    with o.usage_errors():
        use = ModelUse(text_only=text_only, images=images, image_tokens=image_tokens)
    registered = registered_models(model, load_settings())
    own_weights = "weights=" not in config
    document = estimate_for_gpu(
        model,
        device,
        wanted,
        workload,
        cost,
        registered=registered,
        own_weights=own_weights,
        use=use,
        profile=None if profile is None else read_profile(profile),
    )
    if not document.runnable:
        typer.echo(f"iserve: not runnable: {document.reason}", err=True)
    if as_json:
        o.print_json(document)
    else:
        print_estimate(document)
    if not document.runnable:
        raise typer.Exit(1)
