"""``simulate``: a trace on a cluster that need not exist."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fingerprint.errors import ConfigError
from iserve.cli import options as o
from placement.routing import DEFAULT_ROUTER
from planner.intent import parse_slo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fingerprint.gpu_spec import GpuSpec
    from fingerprint.measurements import Profile
    from iserve.planning import PlanOptions
    from iserve.simulation import SimulatedModel
    from traces.request import Request
    from traces.simulator.scenario import Action, Service

__all__ = ["register"]

_GIB = 2**30


def register(app: typer.Typer) -> None:
    app.command(
        "simulate",
        epilog="Example: iserve simulate synthetic:azure-conv --gpus a6000:8 --models chat=./Llama-2-7b "
        "--batch 16 --input-tokens 3000 --output-tokens 1000 --cap-lengths",
    )(o.takes_wish(simulate))


def simulate(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or synthetic:NAME.")],
    *,
    gpus: Annotated[str, typer.Option("--gpus", help="The cluster, such as a6000:8. Needs no GPU.")],
    models: Annotated[
        str, typer.Option("--models", help="[NAME=]MODEL,...: what is deployed, under which names requests call.")
    ],
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", help="GPUs of one node.")] = 8,
    deploy_every: Annotated[
        float, typer.Option("--deploy-every", help="Seconds from one model's deployment to the next.")
    ] = 0.0,
    replicas: Annotated[int, typer.Option("--replicas", help="Of every model.")] = 1,
    planner: Annotated[
        str,
        typer.Option(
            "--planner",
            help="Who decides what is deployed: iserve, max-tp, max-pp, rule, fsdp-offload, alpaserve, "
            "alpaserve-all or aiconfigurator:ANSWERS.json (docs/baselines.md).",
        ),
    ] = "iserve",
    startup: Annotated[float, typer.Option("--startup", help="Seconds until a deployed worker serves.")] = 0.0,
    overhead: Annotated[
        float, typer.Option("--overhead", help="Seconds of each request beside its steps, such as HTTP.")
    ] = 0.0,
    service: Annotated[
        str,
        typer.Option(
            "--service",
            metavar="<fcfs|continuous|stepped>",  # the simulator's names; importing them takes numpy
            help="fcfs: one request at a time; continuous; stepped: the same, slowly.",
        ),
    ] = "continuous",
    router: Annotated[
        str, typer.Option("--router", help="Of replicas: least-outstanding, round-robin or busiest.")
    ] = DEFAULT_ROUTER,
    popularity: Annotated[
        str | None,
        typer.Option(
            "--popularity", help="Assign requests to models: uniform, zipf[:ALPHA], ... (traces/popularity)."
        ),
    ] = None,
    cap_lengths: Annotated[
        bool, typer.Option("--cap-lengths", help="Cut requests to what deployments are planned for.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", help="Stop after so many requests.", min=1)] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option("--fail", help="NODE:AT[:BACK]: node0 fails at AT, is back at BACK seconds."),
    ] = None,
    harvest: Annotated[
        list[str] | None,
        typer.Option("--harvest", help="AT:SECONDS:GIB: a profile of so much work and spare memory."),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            "--profile", help="What `iserve profile --json` printed: step times from it, not the roofline."
        ),
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option("--max-waiting", help="Of one deployment; more are refused. Else they wait.")
    ] = None,
    most_waiting: Annotated[
        int,
        typer.Option(
            "--most-waiting", help="Of one deployment: beyond, it is overloaded and the simulation stops."
        ),
    ] = 10_000,
    judge: Annotated[
        str | None, typer.Option("--judge", help="The SLO that requests are judged by; else that of --slo.")
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", help="Of the trace; else it is recognised.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of synthetic traces and --popularity.", min=0)] = 0,
    wish: o.Wish,
    as_json: o.JsonOption = False,
) -> None:
    """Serve TRACE on a simulated cluster, with the real planner, placement, routing and batching. Starts nothing.

    Step times are the roofline's, or measured ones with --profile. One request at a time (fcfs) or continuous
    batching; models that share a GPU share its time. What it takes for granted: docs/simulation.md.
    """
    from fingerprint.codec import to_json
    from iserve.baselines import World, parse_planner, prepare
    from iserve.cli.progress import StepDisplay
    from iserve.cli.simulation_text import print_simulation
    from iserve.settings import load_settings
    from iserve.simulation import idle_cluster, simulate_cluster
    from iserve.simulation_document import simulation_document
    from placement.routing import make_router
    from traces.simulator.scenario import Scenario

    options = wish.checked(load_settings())
    with o.usage_errors("--judge"):
        judged = options.intent.slo if judge is None else parse_slo(judge)
    with o.usage_errors("--gpus"):
        gpu, count = _one_kind(gpus)
    named = _named_models(models)
    with o.usage_errors():
        scenario = Scenario(
            cluster=idle_cluster(gpu, count, per_node=gpus_per_node),
            actions=(
                *_deploys(tuple(named), deploy_every, replicas),
                *_faults(fail or []),
                *_harvests(harvest or []),
            ),
            service=_service(service),
            startup_s=startup,
            overhead_s=overhead,
            max_waiting=max_waiting,
            most_waiting=most_waiting,
        )
        chosen_router = make_router(router)
        baseline, answers = parse_planner(planner)
        requests = _requests(
            trace, trace_format, tuple(named), popularity, options if cap_lengths else None, limit, seed
        )
    prepared, times = _models(named, gpu, options, wish.engine, [_read_profile(path) for path in profile or []])
    with StepDisplay(quiet=as_json) as display:
        display.show(f"{baseline} decides", None)
        decided, requests = prepare(
            baseline,
            World(gpu, prepared, scenario),
            requests,
            slo=judged,
            router=chosen_router,
            answers=answers,
            labels=named,
        )
        result = simulate_cluster(
            requests,
            decided.scenario,
            gpu,
            prepared,
            router=chosen_router,
            deployer=decided.deployer,
            progress=lambda arrived, at_s: display.show(f"{arrived:,} requests, {at_s:,.0f} s simulated", None),
        )
    document = simulation_document(
        result,
        trace=trace,
        hardware=f"{count} x {gpu.name}",
        service=scenario.service,
        workload=options.workload,
        times=times,
        slo=judged,
        planner=baseline,
        notes=decided.notes,
    )
    if as_json:
        typer.echo(to_json(document, indent=2).decode())
    else:
        print_simulation(document)


def _service(name: str) -> Service:
    from traces.simulator.scenario import Service

    try:
        return Service(name)
    except ValueError:
        raise ConfigError(f"--service is one of {', '.join(Service)}, got {name!r}") from None


def _one_kind(gpus: str) -> tuple[GpuSpec, int]:
    from fingerprint.gpus import parse_gpus

    if "," in gpus:
        raise ConfigError(
            f"{gpus!r} has GPUs of several kinds; a plan is for one kind: simulate each kind by itself, with the "
            "models that go there"
        )
    return parse_gpus(gpus)


def _named_models(text: str) -> dict[str, str]:
    """Deployment name to MODEL. A model without a name has its own last part."""
    named: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, separator, model = part.partition("=")
        if not separator:
            name, model = Path(part).name, part
        if not name or not model or name in named:
            raise typer.BadParameter(f"{part!r}: every model needs a name of its own", param_hint="'--models'")
        named[name] = model
    if not named:
        raise typer.BadParameter("names no model", param_hint="'--models'")
    return named


def _deploys(names: tuple[str, ...], every_s: float, replicas: int) -> list[Action]:
    from traces.simulator.scenario import Deploy

    return [
        Deploy(at_s=every_s * number, name=name, model=name, replicas=replicas)
        for number, name in enumerate(names)
    ]


def _faults(texts: list[str]) -> Iterator[Action]:
    from traces.simulator.scenario import NodeFails, NodeReturns

    for text in texts:
        node, *times = text.split(":")
        values = _numbers(times, text, "--fail", "NODE:AT[:BACK]", (1, 2))
        yield NodeFails(at_s=values[0], node_id=node)
        if len(values) == 2:
            if values[1] <= values[0]:
                raise ConfigError(f"--fail {text}: a node is back after it failed")
            yield NodeReturns(at_s=values[1], node_id=node)


def _harvests(texts: list[str]) -> Iterator[Action]:
    from traces.simulator.scenario import Profile

    for number, text in enumerate(texts, start=1):
        at_s, work_s, gib = _numbers(text.split(":"), text, "--harvest", "AT:SECONDS:GIB", (3,))
        yield Profile(at_s=at_s, name=f"profile {number}", memory_bytes=int(gib * _GIB), work_s=work_s)


def _numbers(parts: list[str], text: str, option: str, form: str, counts: tuple[int, ...]) -> list[float]:
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if len(values) not in counts or not all(abs(value) < float("inf") for value in values):
        raise ConfigError(f"{option} is {form}, in seconds, got {text!r}")
    return values


def _requests(
    trace: str,
    trace_format: str | None,
    names: tuple[str, ...],
    popularity: str | None,
    cap_to: PlanOptions | None,
    limit: int | None,
    seed: int,
) -> Iterator[Request]:
    """The trace, with models assigned where it is asked for or where there is one model only."""
    from itertools import islice

    from traces.popularity import popularity_named
    from traces.sources import requests_of
    from traces.transforms import assign_models
    from traces.transforms import cap_lengths as cap

    requests: Iterator[Request] = requests_of(trace, format=trace_format, seed=seed)
    if popularity is not None:
        requests = assign_models(requests, names, popularity_named(popularity), seed=seed)
    else:
        requests = _told_models(requests, names)
    if cap_to is not None:
        requests = cap(requests, context_tokens=cap_to.workload.context_tokens)
    return requests if limit is None else islice(requests, limit)


def _told_models(requests: Iterator[Request], names: tuple[str, ...]) -> Iterator[Request]:
    """A request that names no model is for the only one there is."""
    from dataclasses import replace

    for request in requests:
        if request.model:
            yield request
        elif len(names) == 1:
            yield replace(request, model=names[0])
        else:
            raise ConfigError(
                f"the trace names no models and {len(names)} are deployed; say how requests are spread over them: "
                "--popularity uniform"
            )


def _read_profile(path: Path) -> Profile:
    from fingerprint.codec import from_json
    from fingerprint.errors import NotFoundError
    from fingerprint.measurements import Profile

    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"the profile {path} cannot be read: {error.strerror or error}") from error
    return from_json(data, Profile, what=str(path))


def _models(
    named: dict[str, str], gpu: GpuSpec, options: PlanOptions, engine: str, profiles: list[Profile]
) -> tuple[dict[str, SimulatedModel], tuple[str, ...]]:
    """Every model as the planner needs it, and a sentence on where its times are from."""
    from iserve.cli.live import registered_models
    from iserve.model_source import resolve
    from iserve.settings import load_settings
    from iserve.simulation import measured_model, roofline_model

    settings = load_settings()
    prepared, times = {}, []
    for name, model in named.items():
        source = resolve(model, registered_models(model, settings), need_weights=False)
        profile = next((p for p in profiles if p.spec.shape_hash == source.spec.shape_hash), None)
        if profile is None:
            prepared[name] = roofline_model(name, source.spec, gpu, options, engine)
            times.append(f"{name}: roofline")
        else:
            prepared[name] = measured_model(name, profile, gpu, options)
            times.append(f"{name}: profile of {profile.model} on {profile.engine}, {profile.created_at}")
    return prepared, tuple(times)
