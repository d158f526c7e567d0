"""``simulate``: a trace on a cluster that need not exist."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fingerprint.errors import ConfigError
from fingerprint.output_file import output_file
from iserve.api_types import PlanRequest
from iserve.cli import options as o
from iserve.cli import simulation_options as s
from iserve.cli.groups import checked, grouped
from iserve.cli.simulation_variants import VariantOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fingerprint.gpu_spec import GpuSpec
    from iserve.planning.pipeline import PlanOptions
    from iserve.simulation.baselines import Baseline, World
    from iserve.simulation.document import SimulationDocument, SimulationSetup
    from iserve.simulation.running import SimulatedModel
    from placement.routing import Router
    from placement.types import ClusterSnapshot
    from placement.variant_routing import VariantPolicy
    from planner.intent import Slo
    from traces.request import Request

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command(
        "simulate",
        epilog="Example: iserve simulate synthetic:azure-conv --gpus a6000:8 --models chat=./Llama-2-7b "
        "--intent min-gpu-hours --batch 16 --input-tokens 3000 --output-tokens 1000 --cap-lengths --replicas 1:4 "
        "--scale-to-zero 300; or iserve simulate synthetic:azure-conv --gpus h200:1 "
        "--models chat=./Llama-3.1-8B --variants 100 --rank 16 --popularity zipf:1 --cap-lengths",
    )(grouped(simulate))


def simulate(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or synthetic:NAME.")],
    *,
    cluster: s.ClusterOptions,
    decision: s.DecisionOptions,
    cluster_policy: s.ScalingOptions,
    serving: s.ServiceOptions,
    load: s.LoadOptions,
    variants: VariantOptions,
    request: PlanRequest,
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML page to this file, too.")] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Serve TRACE on a simulated cluster, with the real planner, placement, routing and batching. Starts nothing.

    Step times are the roofline's, or measured ones with --profile. One request at a time (fcfs) or continuous
    batching; models that share a GPU share its time. A replica serves as many and as long requests as one that
    `iserve deploy` starts; --batch and --context say it otherwise. What was deployed stays as it is, unless it is
    configured to scale, to scale to zero or to move. With --variants, requests are for LoRA adapters of the model,
    whose slots, loads and times it follows. What it takes for granted: docs/simulation.md.
    """
    from iserve.settings import load_settings
    from iserve.simulation.baselines import World, check_steerable, parse_planner
    from placement.routing import make_router

    options = checked(request, load_settings(), sees_load=True)
    options = replace(options, more_requests=options.more_requests and not serving.reject_late)
    judged, named = decision.slo(options.intent.slo), cluster.named_models()
    (gpu, snapshot), least = cluster.hardware(), cluster_policy.least
    with o.usage_errors():
        if request.expected_models:
            raise ConfigError(
                "a simulation deploys what --models names; leave out --expected-model, or say how many there will "
                "be with --expected-deployments"
            )
        variants.check(cluster, decision, serving)
        options, variant_policy = variants.planned(options, load.popularity), variants.policy()
        scenario = s.scenario_of(cluster, snapshot, serving, least, judged, variants=bool(variants.variants))
        steers = cluster_policy.policy(gpu, 0.0) is not None
        router, planner = make_router(serving.router), parse_planner(decision.planner)
        if steers:
            check_steerable(planner[0])
        requests = load.requests(trace, tuple(named), variants.variants, variants.base_share or 0.0)
        if report is not None:
            output_file(report)
    if not scenario.service.batches:  # GPUs are then shared without a loss (traces.simulator.scenario.Policies)
        options = replace(options, group_loss=1.0)
    models, times = _models(named, gpu, snapshot, options, request.engine, decision.profile or [])
    world = World(gpu, models, scenario)
    startup_s = _startup_s(models.values()) if cluster.startup is None else cluster.startup
    if load.cap_lengths:
        requests = _capped(requests, planner[0], world, least, of_variants=bool(variants.variants))
    setup = _setup(trace, world, planner[0], options, startup_s, times, serving=serving, scaling=cluster_policy)
    routers = (router, variant_policy)
    document = _run(setup, requests, world, planner, routers, named, judged, options, quiet=as_json)
    _show(document, report, as_json=as_json)


def _setup(
    trace: str,
    world: World,
    planner: Baseline,
    options: PlanOptions,
    startup_s: float,
    times: tuple[str, ...],
    *,
    serving: s.ServiceOptions,
    scaling: s.ScalingOptions,
) -> SimulationSetup:
    """Return the parameters that the result is reported with.

    Args:
        times: of each model, where its step times are from.
    """
    from iserve.simulation.document import SimulationSetup

    gpu, scenario = world.gpu, world.scenario
    return SimulationSetup(
        trace=trace,
        hardware=f"{len(scenario.cluster.gpus)} x {gpu.name}",
        service=scenario.service,
        rejects_late=serving.reject_late,
        rejects_by_forecast=serving.forecast_late,
        planner=planner,
        placement=options.policy,
        startup_s=startup_s,
        usd_per_gpu_hour=gpu.price_usd_per_gpu_hour,
        cluster_policy=scaling.policy(gpu, startup_s),
        intent=options.intent,
        workload=options.workload,
        times=times,
    )


def _capped(
    requests: Iterable[Request], baseline: Baseline, world: World, replicas: int, *, of_variants: bool
) -> Iterator[Request]:
    """Cut requests to what their deployment serves; a variant's is that of the one model."""
    from iserve.simulation.baselines import served_contexts
    from traces.transforms import cap_lengths

    contexts = served_contexts(baseline, world, replicas)
    return cap_lengths(requests, context_tokens=next(iter(contexts.values())) if of_variants else contexts)


def _startup_s(models: Iterable[SimulatedModel]) -> float:
    """Return the longest start of the engines that models are served by first."""
    from fingerprint.engines import traits_of

    return max((traits_of(model.engines[0].engine).startup_s for model in models if model.engines), default=0.0)


def _run(
    setup: SimulationSetup,
    requests: Iterable[Request],
    world: World,
    planner: tuple[Baseline, Path | None],
    routers: tuple[Router, VariantPolicy],
    labels: dict[str, str],
    slo: Slo | None,
    options: PlanOptions,
    *,
    quiet: bool,
) -> SimulationDocument:
    """Decide what is deployed, and follow the requests.

    Args:
        planner: which decides, and its answers where they are recorded ones.
        routers: of requests of a base, and of its variants.
    """
    from iserve.cli.progress import StepDisplay
    from iserve.simulation.baselines import prepare
    from iserve.simulation.document import simulation_document
    from iserve.simulation.running import simulate_cluster

    (baseline, answers), (router, variant_policy) = planner, routers
    with StepDisplay(quiet=quiet) as display:
        display.show(f"{baseline} decides", None)
        decided, prepared = prepare(
            baseline, world, requests, slo=slo, router=router, answers=answers, labels=labels
        )
        result = simulate_cluster(
            prepared,
            decided.scenario,
            world.gpu,
            world.models,
            router=router,
            deployer=decided.deployer,
            cluster_policy=setup.cluster_policy,
            variant_policy=variant_policy,
            progress=lambda arrived, at_s: display.show(f"{arrived:,} requests, {at_s:,.0f} s simulated", None),
        )
    return simulation_document(
        setup,
        result,
        slo=slo,
        notes=(
            *decided.notes,
            *_served_by(baseline, options),
            *_adapter_times(world.models.values(), options),
            *(f"{model.name}: {caveat}" for model in world.models.values() for caveat in model.caveats),
        ),
        model_contexts={name: model.spec.max_context_tokens for name, model in world.models.items()},
    )


def _served_by(baseline: Baseline, options: PlanOptions) -> tuple[str, ...]:
    """Return what a baseline serves where the command leaves it open; iServe's deployments say so themselves."""
    from iserve.simulation.baselines import Baseline

    if baseline is Baseline.ISERVE or not options.longer_requests:
        return ()
    return (
        f"{baseline} serves requests of up to the planned {options.workload.context_tokens:,} tokens, iserve as "
        "long ones as memory holds; to compare them give --context and --batch",
    )


def _adapter_times(models: Iterable[SimulatedModel], options: PlanOptions) -> tuple[str, ...]:
    """Return where the times of adapters are from."""
    from fingerprint.config import DeploymentConfig
    from fingerprint.engines import traits_of
    from fingerprint.estimators.adapter_slots import loads_stop_steps, variant_cost
    from iserve.planning.pipeline import in_slots, slots_of
    from iserve.planning.words import engine_name, measured_variants_words

    need = slots_of(options)
    if need is None:
        return ()
    configs = {
        table.engine: in_slots(DeploymentConfig(engine=table.engine), need)
        for model in models
        for table in model.engines
    }
    costs = {
        table.engine: variant_cost(model.estimator, model.spec, configs[table.engine])
        for model in models
        for table in model.engines
    }
    unknown = [engine_name(engine) for engine, cost in costs.items() if cost is None]
    if measured := [cost for cost in costs.values() if cost is not None and cost.measured is not None]:
        several = any(traits_of(engine).loads_stop_steps for engine in costs)
        loads = "a load delays the requests for its variant alone"
        if any(loads_stop_steps(config) for config in configs.values()):
            loads = "a load stops its worker"
        elif several:
            loads = f"on one GPU {loads}, on several it stops their worker"
        return (f"{measured_variants_words(measured[0])}; {loads}",)
    if unknown:
        return (f"what adapters and their loads take on {' and '.join(unknown)} is not known and left out",)
    if delta_mib := options.intent.traffic.delta_mib:
        return (
            f"what deltas of {delta_mib:,} MiB take is estimated: steps and prompts from kernels that were timed "
            "alone on an H200 (docs/decisions/0047-delta-kernels.md), a load from adapters on vLLM; on one GPU a "
            "load delays the requests for its delta alone, on several it stops their worker",
        )
    rank = options.intent.traffic.variant_rank
    return (
        f"what adapters of rank {rank} and their loads take is estimated from one model on vLLM 0.33 and an H200 "
        "(docs/variants.md); a load stops its worker",
    )


def _show(document: SimulationDocument, report: Path | None, *, as_json: bool) -> None:
    from iserve.cli.report import show_document
    from iserve.cli.simulation_text import print_simulation
    from iserve.report.simulation import render_simulation

    show_document(document, report, render_simulation, print_simulation, as_json=as_json)


def _of_adapters(options: PlanOptions) -> PlanOptions:
    """Return ``options`` without deltas, by which an engine is chosen that serves adapters."""
    traffic = replace(options.intent.traffic, delta_mib=0)
    return replace(options, intent=replace(options.intent, traffic=traffic))


def _models(
    named: dict[str, str],
    gpu: GpuSpec,
    snapshot: ClusterSnapshot,
    options: PlanOptions,
    engine: str,
    profile_files: list[Path],
) -> tuple[dict[str, SimulatedModel], tuple[str, ...]]:
    """Return every model as a deploy on the largest node plans it, and where its times are from."""
    from iserve.cli.connection import registered_models
    from iserve.model_source import resolve
    from iserve.planning.estimator_factory import is_profile_of, profile_as, read_profile
    from iserve.planning.offline import engine_for_gpus
    from iserve.planning.pipeline import check_context, with_traffic
    from iserve.settings import load_settings
    from iserve.simulation.delta_choice import with_delta_slots
    from iserve.simulation.running import measured_model, roofline_model

    settings, profiles = load_settings(), [read_profile(path) for path in profile_files]
    count = max(Counter(one.node_id for one in snapshot.gpus).values())
    prepared, times = {}, []
    for name, folder in named.items():
        source = resolve(folder, registered_models(folder, settings), need_weights=False)
        try:
            check_context(source.spec, options.workload)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        profile = next((p for p in profiles if is_profile_of(p, source.spec)), None)
        if profile is None:
            choice = engine_for_gpus(source.spec, gpu, count, _of_adapters(options), engine)
            model = roofline_model(name, source.spec, gpu, options, choice.engine)
            times.append(f"{name}: roofline")
        else:
            model = measured_model(name, profile_as(source.spec, profile), gpu, options)
            times.append(f"{name}: profile of {profile.model} on {profile.engine}, {profile.created_at}")
        estimator = with_traffic(model.estimator, source.spec, options)
        assumes = options.intent.traffic.delta_mib > 0
        engines = tuple(replace(table.unprepared(), assumes_deltas=assumes) for table in model.engines)
        prepared[name] = with_delta_slots(replace(model, estimator=estimator, engines=engines), gpu)
    return prepared, tuple(times)
