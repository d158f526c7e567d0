"""The one choice of a configuration: made alike for a plan, for a deploy and for what is exported. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from daemon.devices import Device
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.engine_caches import with_engine_caches
from fingerprint.estimates import Estimator
from fingerprint.measurements import Profile
from iserve.model_source import ModelSource
from iserve.planning.deployability import DeployableDocument
from iserve.planning.pipeline import EngineChooser, Hardware, PlanOptions, alone_of, make_plan
from iserve.planning.plan_document import plan_document
from iserve.planning.rate_advice import with_rate_advice
from iserve.planning.serving_capacity import serving_capacity
from iserve.planning.verdict import verdict
from iserve.planning.worker_launch import PlannedDeployment

__all__ = ["planned_deployment"]


def planned_deployment(
    source: ModelSource,
    hardware: Hardware,
    estimator: Estimator,
    table: EngineCapabilities,
    options: PlanOptions,
    *,
    devices: tuple[Device, ...],
    deployable_of: Callable[[DeploymentConfig], DeployableDocument],
    notes: tuple[str, ...] = (),
    profile: Profile | None = None,
) -> PlannedDeployment:
    """Rank every configuration of the engine with ``table``, and return the best with what it serves.

    A configuration that needs a checkpoint prepared beforehand is refused: iServe prepares none.

    Args:
        devices: of ``hardware``.
        deployable_of: judges the chosen configuration.
        notes: reported with the plan.
        profile: behind ``estimator``; None: datasheets.
    """
    spec = source.spec
    plan = make_plan(spec, hardware, estimator, [table.unprepared()], options)
    plan = with_rate_advice(plan, hardware, estimator, options)
    kept = spec if profile is None else with_engine_caches(spec, profile.memory)
    capacity = serving_capacity(plan, kept, hardware, estimator, options)

    def conditions_of(config: DeploymentConfig) -> tuple[str, ...]:
        if profile is not None:  # what runs ``config`` is here and was measured
            return table.conditions(spec, config, hardware.gpu)
        return EngineChooser(spec, hardware.gpu, [table]).conditions(config)

    free_bytes: Mapping[str, int] = {gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus}
    best = None if plan.best is None else plan.best.config
    document = plan_document(
        plan,
        model=source.name,
        hardware=hardware.label,
        workload=options.workload,
        conditions_of=conditions_of,
        notes=notes,
        replicas=options.replicas,
        alone=alone_of(estimator, best, options.workload) if profile and best else None,
        profile=profile,
        verdict=verdict(
            plan,
            model=source.name,
            hardware=hardware,
            estimator=estimator,
            options=options,
            deployable=None if best is None else deployable_of(best),
        ),
        capacity=None if capacity is None else capacity.document(free_bytes),
    )
    return PlannedDeployment(document, plan.best, devices, free_bytes, capacity)
