"""Plans and estimates for GPUs that need not be here, from a config.json and a datasheet or a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from daemon.devices import Device
from daemon.engine_options import NO_OPTIONS, EngineOptions
from daemon.engines.registry import capabilities_for, get_engine
from fingerprint.capability import PLANNED_ONLY, EngineCapabilities
from fingerprint.checkpoint import Checkpoint
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError, InfeasibleError
from fingerprint.estimates import Estimate, Estimator, MemoryEstimate
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.model_use import AS_IT_IS, ModelUse
from fingerprint.profile_checks import caveats
from iserve.api_types import check_name
from iserve.model_source import ModelSource, resolve
from iserve.planning.deployability import DeployableDocument, deployable, gpus_here
from iserve.planning.deployment_choice import planned_deployment
from iserve.planning.document import CacheSizesDocument, EstimateDocument, PlanDocument
from iserve.planning.engine_choice import EngineChoice, by_preference, engine_choices_for_gpus, first_feasible
from iserve.planning.estimator_factory import check_taken_on, estimator_for, is_profile_of, profile_as
from iserve.planning.joint_plan import ChosenPlan, chosen_plan
from iserve.planning.model_use import (
    check_code,
    check_use,
    use_notes,
    used,
    with_expected_specs,
    with_images,
)
from iserve.planning.pipeline import (
    EngineChooser,
    FitsOn,
    PlanOptions,
    check_context,
    datasheet_estimator,
    hypothetical_hardware,
)
from iserve.planning.plan_document import estimate_document
from iserve.planning.serving_capacity import kept_of
from iserve.planning.verdict import VerdictDocument, figures_of
from iserve.planning.words import spoken
from iserve.planning.worker_launch import LaunchDocument, PlannedDeployment
from placement.types import Placement
from planner.costs import COSTS, Prices, figures
from planner.intent import CostModel
from planner.plan import NoRoom
from planner.space import shape_refusal

__all__ = ["OneEstimateDocument", "engine_for_gpus", "estimate_for_gpu", "launch_for_gpus", "plan_for_gpus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OneEstimateDocument:
    """``iserve estimate --json``."""

    model: str
    gpu: str
    config: DeploymentConfig
    workload: Workload
    estimate: EstimateDocument
    cost_unit: str
    memory: MemoryEstimate
    runnable: bool
    reason: str | None  # why no engine runs it, or why it does not fit
    conditions: tuple[str, ...] = ()  # what running it takes in addition to the GPUs, where an engine does
    verdict: VerdictDocument | None = None
    cache_sizes: CacheSizesDocument | None = None
    """Cache sizes of the model."""
    notes: tuple[str, ...] = ()
    """Caveats of the profile that the estimate is from."""


def plan_for_gpus(
    model: str,
    gpu: GpuSpec,
    count: int,
    options: PlanOptions,
    engine: str,
    *,
    registered: Mapping[str, Path] | None = None,
    use: ModelUse = AS_IT_IS,
) -> PlanDocument:
    """Plan a deploy on ``count`` idle ``gpu``, by the roofline.

    Raises:
        UnsupportedModelError: no engine serves the model there.
    """
    source = used(resolve(model, registered or {}, need_weights=False), use)
    return _planned(source, gpu, count, _looked_up(options, source, registered), engine).document


def _looked_up(options: PlanOptions, source: ModelSource, registered: Mapping[str, Path] | None) -> PlanOptions:
    def spec_of(name: str) -> ModelSpec:
        return resolve(name, registered or {}, need_weights=False).spec

    options = replace(options, workload=with_images(options.workload, source))
    return with_expected_specs(options, spec_of)


def launch_for_gpus(
    model: str,
    gpu: GpuSpec,
    count: int,
    options: PlanOptions,
    engine: str,
    *,
    name: str | None = None,
    registered: Mapping[str, Path] | None = None,
    engine_options: EngineOptions = NO_OPTIONS,
) -> LaunchDocument:
    """Return what a deploy of the plan of :func:`plan_for_gpus` would start.

    Raises:
        InfeasibleError: it would be refused, or no worker is ever started on such GPUs.
        UnsupportedModelError: no engine serves the model there.
        CheckpointError: weights that are here are damaged; where there are none they are not asked for.
    """
    if gpu.vendor in PLANNED_ONLY:
        raise InfeasibleError(
            f"{PLANNED_ONLY[gpu.vendor]}; `iserve plan --gpus {gpu.name}:{count}` compares it with other GPUs"
        )
    source = used(resolve(model, registered or {}, need_weights=False), engine_options.use)
    if source.has_weights:
        Checkpoint.open(source.directory)
    options = _looked_up(options, source, registered)
    planned = _planned(source, gpu, count, options, engine)
    if planned.best is not None:
        chosen = get_engine(planned.best.config.engine)
        chosen.check_options(engine_options)
        check_code(source, chosen.capabilities())
    return planned.launch(check_name(name or source.name), source, options.workload, None, engine_options)


def engine_for_gpus(spec: ModelSpec, gpu: GpuSpec, count: int, options: PlanOptions, engine: str) -> EngineChoice:
    """Return the engine that :func:`plan_for_gpus` plans on. Raises as that."""
    return _engine_and_plan(spec, gpu, count, options, engine)[0]


def _engine_and_plan(
    spec: ModelSpec, gpu: GpuSpec, count: int, options: PlanOptions, engine: str
) -> tuple[EngineChoice, ChosenPlan | None]:
    """Return the engine and, where it took a plan on it to choose, that plan."""
    tables, made = capabilities_for(engine), dict[str, ChosenPlan]()
    hardware, by_name = hypothetical_hardware(gpu, count), {table.engine: table for table in tables}

    def is_feasible(name: str) -> bool:
        table = by_name[name]
        estimator = datasheet_estimator(spec, gpu, [table])
        made[name] = chosen_plan(spec, hardware, estimator, [table.unprepared()], options)
        return made[name][0].best is not None

    choices = engine_choices_for_gpus(engine, spec, gpu, tables, options.intent.quality)
    choice = first_feasible(choices, is_feasible)
    return choice, made.get(choice.engine)


def _planned(
    source: ModelSource, gpu: GpuSpec, count: int, options: PlanOptions, engine: str
) -> PlannedDeployment:
    """Choose as a deploy there would if every engine were installed. Raises as :func:`plan_for_gpus`."""
    choice, made = _engine_and_plan(source.spec, gpu, count, options, engine)
    planned = _planned_on(choice, source, gpu, count, options, made)
    if planned.best is not None:
        return planned
    tables = capabilities_for(engine)
    refused = (table.architecture_refusal(source.spec) for table in tables if table.engine == choice.engine)
    notes = [reason for reason in refused if reason is not None]
    notes += _if_prepared(source.spec, gpu, count, options, tables)
    return replace(planned, document=replace(planned.document, notes=(*planned.document.notes, *notes)))


def _if_prepared(
    spec: ModelSpec, gpu: GpuSpec, count: int, options: PlanOptions, tables: Sequence[EngineCapabilities]
) -> list[str]:
    """Return what another checkpoint of the model, one prepared beforehand, would admit."""
    engines = by_preference(tables, gpu)
    hardware, estimator = hypothetical_hardware(gpu, count), datasheet_estimator(spec, gpu, engines)
    best = chosen_plan(spec, hardware, estimator, engines, options)[0].best
    if best is None:
        return []
    (table,) = (table for table in engines if table.engine == best.config.engine)
    needs = [note.text for note in table.notes if note.needs_another(spec, best.config, gpu)]
    return [f"{best.config} on {table.engine} would do: {text}" for text in needs]


def _planned_on(
    choice: EngineChoice,
    source: ModelSource,
    gpu: GpuSpec,
    count: int,
    options: PlanOptions,
    made: ChosenPlan | None,
) -> PlannedDeployment:
    """Choose on the engine of ``choice``, of which ``made`` is the plan where there is one already."""
    hardware, table = hypothetical_hardware(gpu, count), get_engine(choice.engine).capabilities()
    get_engine(choice.engine).check_options(EngineOptions(use=source.use))
    check_use(source, table)
    notes = (*choice.passed_over, *use_notes(source, options.workload, table))
    devices = tuple(
        Device(
            device_id=state.device_id,
            index=state.gpu_index,
            kind="cpu" if gpu.is_cpu else "cuda",
            name=gpu.name,
            total_bytes=state.total_bytes,
        )
        for state in hardware.snapshot.gpus
    )

    def deployable_of(config: DeploymentConfig, replicas: int) -> DeployableDocument:
        return deployable(
            source.spec, config, gpu, [table], gpus_here(), replicas=replicas, has_weights=source.has_weights
        )

    return planned_deployment(
        source,
        hardware,
        datasheet_estimator(source.spec, gpu, [table]),
        table,
        options,
        devices=devices,
        deployable_of=deployable_of,
        notes=notes,
        made=made,
    )


def estimate_for_gpu(
    model: str,
    gpu: GpuSpec,
    config: DeploymentConfig,
    workload: Workload,
    cost: CostModel,
    *,
    registered: Mapping[str, Path] | None = None,
    own_weights: bool = False,
    use: ModelUse = AS_IT_IS,
    profile: Profile | None = None,
) -> OneEstimateDocument:
    """Estimate one configuration on as many idle ``gpu`` of one node as it takes.

    Args:
        own_weights: in the checkpoint's own format, whatever ``config`` names.
        profile: of the model on ``gpu``, which the estimate is from; None: the roofline.

    Raises:
        ConfigError: more stages than layers, a workload longer than the model's context, or the profile of another
            model or device.
        NotMeasuredError: the profile is of another engine, or nothing says what the configuration takes.
    """
    source = used(resolve(model, registered or {}, need_weights=False), use)
    workload = with_images(workload, source)
    check_context(source.spec, workload)
    asked = profile.engine if profile is not None and config.engine == "auto" else config.engine
    engines = by_preference(capabilities_for(asked), gpu)
    chooser = EngineChooser(source.spec, gpu, engines)
    if own_weights:
        config = replace(config, weights=source.spec.as_given)
    settled = replace(config, engine=chooser.name(config))
    table = next(one for one in engines if one.engine == settled.engine)
    get_engine(settled.engine).check_options(EngineOptions(use=use))
    check_use(source, table)
    estimate = _estimator_of(source, gpu, engines, profile).estimate(settled, workload)
    price = float(COSTS[cost].of(figures([estimate]), Prices(usd_per_gpu_hour=gpu.price_usd_per_gpu_hour))[0])
    refusal = shape_refusal(source.spec, settled, settled.num_gpus) or chooser.refusal(settled)
    place = None if refusal else FitsOn(hypothetical_hardware(gpu, settled.num_gpus), PlanOptions())(estimate)
    reason = place.reason if isinstance(place, NoRoom) else refusal
    return OneEstimateDocument(
        model=source.name,
        gpu=gpu.name,
        config=settled,
        workload=workload,
        estimate=estimate_document(
            estimate,
            cost=None if math.isnan(price) else price,
            layers_per_stage=place.layers_per_stage if isinstance(place, Placement) else None,
        ),
        cost_unit=COSTS[cost].unit,
        memory=estimate.memory,
        runnable=reason is None,
        reason=reason,
        conditions=() if refusal else (*use_notes(source, workload, table), *chooser.conditions(settled)),
        verdict=_verdict_of_one(source, gpu, settled, estimate, engines, reason),
        cache_sizes=kept_of(source.spec, settled),
        notes=() if profile is None else caveats(profile),
    )


def _estimator_of(
    source: ModelSource, gpu: GpuSpec, engines: Sequence[EngineCapabilities], profile: Profile | None
) -> Estimator:
    """Return the roofline or, of a profile, what estimates with it."""
    if profile is None:
        return datasheet_estimator(source.spec, gpu, engines)
    if not is_profile_of(profile, source.spec):
        raise ConfigError(f"the profile of {profile.model} is of a model with other layers than {source.name}")
    check_taken_on(profile, gpu)
    return estimator_for(profile_as(source.spec, profile))


def _verdict_of_one(
    source: ModelSource,
    gpu: GpuSpec,
    config: DeploymentConfig,
    estimate: Estimate,
    engines: Sequence[EngineCapabilities],
    reason: str | None,
) -> VerdictDocument:
    """Return the verdict on the only configuration that was asked for; ``reason``: why it cannot run."""
    said = spoken(source.name, config, gpu=gpu.name, num_gpus=config.num_gpus)
    there = DeployableDocument(here=False)
    if reason is None:
        there = deployable(source.spec, config, gpu, engines, gpus_here(), has_weights=source.has_weights)
    return VerdictDocument(
        sentence=said if reason is None else f"{said}, cannot run: {reason}",
        figures=figures_of(estimate, gpu),
        runner_up=None,
        deployable=there,
        refusals=(),
    )
