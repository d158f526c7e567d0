"""Plans and estimates for GPUs that need not be here, from a config.json and a datasheet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from daemon.devices import Device
from daemon.engines.registry import capabilities_for
from fingerprint.checkpoint import Checkpoint
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import MemoryEstimate
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpu_spec import GpuSpec
from iserve.api_types import check_name
from iserve.model_source import resolve
from iserve.planning.document import EstimateDocument, PlanDocument, estimate_document, plan_document
from iserve.planning.engine_choice import by_preference, choose_engine
from iserve.planning.launching import LaunchDocument, PlannedDeployment
from iserve.planning.making import (
    EngineChooser,
    FitsOn,
    PlanOptions,
    check_context,
    hypothetical_hardware,
    make_plan,
)
from placement.types import Placement
from planner.costs import COSTS, Prices, figures
from planner.intent import CostModel
from planner.plan import NoRoom
from planner.space import shape_refusal

__all__ = ["OneEstimateDocument", "estimate_for_gpu", "launch_for_gpus", "plan_for_gpus"]


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
    conditions: tuple[str, ...] = ()  # what running it takes beside the GPUs, where an engine does


def plan_for_gpus(
    model: str,
    gpu: GpuSpec,
    count: int,
    options: PlanOptions,
    engine: str,
    *,
    registered: Mapping[str, Path] | None = None,
) -> PlanDocument:
    """A plan on ``count`` idle ``gpu``, by the roofline."""
    source = resolve(model, registered or {}, need_weights=False)
    hardware = hypothetical_hardware(gpu, count)
    estimator = RooflineEstimator(source.spec, gpu)
    engines = by_preference(capabilities_for(engine), gpu)
    plan = make_plan(source.spec, hardware, estimator, engines, options)
    return plan_document(
        plan,
        model=source.name,
        hardware=hardware.label,
        workload=options.workload,
        conditions_of=EngineChooser(source.spec, gpu, engines).conditions,
        replicas=options.replicas,
    )


def launch_for_gpus(
    model: str,
    gpu: GpuSpec,
    count: int,
    options: PlanOptions,
    engine: str,
    *,
    name: str | None = None,
    registered: Mapping[str, Path] | None = None,
) -> LaunchDocument:
    """What a deploy on ``count`` idle ``gpu`` would start if every engine were installed there, by the roofline.

    Raises:
        InfeasibleError: it would be refused.
        UnsupportedModelError: no engine serves the model there.
        CheckpointError: weights that are here are damaged; where there are none they are not asked for.
    """
    source = resolve(model, registered or {}, need_weights=False)
    if source.has_weights:
        Checkpoint.open(source.directory)
    tables = [replace(table, unavailable=None) for table in capabilities_for(engine)]
    notes: tuple[str, ...] = ()
    if engine == "auto":
        on_gpus = gpu.compute_capability is not None
        choice = choose_engine(source.spec, gpu, tables, options.intent.quality, on_gpus=on_gpus)
        tables, notes = [t for t in tables if t.engine == choice.engine], choice.passed_over
    table = tables[0].unprepared()  # only 16-bit checkpoints are taken in
    hardware = hypothetical_hardware(gpu, count)
    plan = make_plan(source.spec, hardware, RooflineEstimator(source.spec, gpu), [table], options)
    document = plan_document(
        plan,
        model=source.name,
        hardware=hardware.label,
        workload=options.workload,
        notes=notes,
        replicas=options.replicas,
    )
    kind = "cpu" if gpu.compute_capability is None else "cuda"
    devices = tuple(
        Device(
            device_id=state.device_id,
            index=state.gpu_index,
            kind=kind,
            name=gpu.name,
            total_bytes=state.total_bytes,
        )
        for state in hardware.snapshot.gpus
    )
    free_bytes = {state.device_id: state.free_bytes for state in hardware.snapshot.gpus}
    planned = PlannedDeployment(document, plan.best, devices, free_bytes)
    return planned.launch(check_name(name or source.name), source, options.workload, None)


def estimate_for_gpu(
    model: str,
    gpu: GpuSpec,
    config: DeploymentConfig,
    workload: Workload,
    cost: CostModel,
    *,
    registered: Mapping[str, Path] | None = None,
    own_weights: bool = False,
) -> OneEstimateDocument:
    """One configuration on as many idle ``gpu`` of one node as it takes, by the roofline.

    Args:
        own_weights: in the checkpoint's own format, whatever ``config`` names.

    Raises:
        ConfigError: more stages than layers, or a workload longer than the model's context.
    """
    source = resolve(model, registered or {}, need_weights=False)
    check_context(source.spec, workload)
    chooser = EngineChooser(source.spec, gpu, by_preference(capabilities_for(config.engine), gpu))
    if own_weights:
        config = replace(config, weights=source.spec.as_given)
    settled = replace(config, engine=chooser.name(config))
    estimate = RooflineEstimator(source.spec, gpu).estimate(settled, workload)
    prices = Prices(usd_per_gpu_hour=gpu.price_usd_per_gpu_hour)
    price = float(COSTS[cost].of(figures([estimate]), prices)[0])
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
        conditions=() if refusal else chooser.conditions(settled),
    )
