"""Scope of a profile: what it need not hold for a request, what one for another request lacks, what has none."""

from __future__ import annotations

from collections.abc import Sequence

from daemon.status import NodeStatus
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.depth_tied_cuts import tied_depths
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError, NotMeasuredError, UnsupportedModelError
from fingerprint.estimates import Estimator
from fingerprint.estimators.fingerprinted import nearest
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.variant_measurements import VariantKind, kind_of
from fingerprint.variant_step_plan import BUDGET_S
from iserve.controller.profiling_gaps import fillable
from iserve.controller.snapshot import hardware_of
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.pipeline import EngineChooser, FitsOn, Hardware, PlanOptions, in_slots, slots_of, with_traffic
from placement.types import DeploymentState
from planner.costs import Prices
from planner.intent import allows
from planner.space import configuration_space, shape_refusal
from planner.worth import cannot_become_best

__all__ = [
    "cannot_change_plan",
    "kind_to_measure",
    "lacking",
    "measures_variants",
    "refuse_without_experts",
    "refuse_without_pattern",
    "variants_budget_s",
    "why_needless",
]


def why_needless(
    config: DeploymentConfig,
    so_far: Profile,
    node: NodeStatus,
    table: EngineCapabilities,
    plan_options: PlanOptions,
    serving: tuple[DeploymentState, ...] = (),
) -> str | None:
    """Return why measuring ``config`` in addition to ``so_far`` cannot change the plan; None: it may.

    Args:
        serving: on ``node``, with their rates, where these are known.
    """
    if not allows(plan_options.intent.quality, config):
        return f"quality={plan_options.intent.quality} does not allow it"
    measured = {point.key.config(so_far.engine) for point in so_far.timing} - {config}
    hardware = hardware_of(node, so_far.machine.device, serving)
    try:
        return cannot_change_plan(
            config, sorted(measured), so_far.spec, hardware, estimator_for(so_far), table, plan_options
        )
    except NotMeasuredError:  # too little of the first was measured to compare with
        return None


def lacking(
    profile: Profile,
    node: NodeStatus,
    table: EngineCapabilities,
    plan_options: PlanOptions,
    serving: tuple[DeploymentState, ...] = (),
) -> tuple[DeploymentConfig, ...]:
    """Return what was left out of ``profile`` and may be needed by this request.

    That is what was needless for its own request, and what lacked memory then and has room on ``node`` now.

    Args:
        table: what the engine runs of checkpoints as they are.
        serving: on ``node``, with their rates, where these are known.
    """
    left_out = dict.fromkeys((*profile.skipped, *fillable(profile, node.devices)))
    return tuple(c for c in left_out if why_needless(c, profile, node, table, plan_options, serving) is None)


def kind_to_measure(table: EngineCapabilities, spec: ModelSpec, plan_options: PlanOptions) -> VariantKind | None:
    """Return the kind of variants of ``spec`` that ``plan_options`` want measured.

    None: none, or the engine measures none or has no such slots, so that it will be refused.
    """
    need = slots_of(plan_options)
    if need is None or not measures_variants(table):
        return None
    config = in_slots(DeploymentConfig(engine=table.engine), need)
    return kind_of(config) if table.slots_refusal(spec, config) is None else None


def measures_variants(table: EngineCapabilities) -> bool:
    """Return whether the engine's profiling worker measures variants: elsewhere than in our process, by the step
    timer alone.
    """
    return traits_of(table.engine).profiles_variants and (table.step_timed or not table.own_environment)


def variants_budget_s(table: EngineCapabilities, max_seconds: float) -> float:
    """Return the seconds in which a profile of ``max_seconds`` measures variants."""
    return min(BUDGET_S, max_seconds / 2) if table.step_timed else max_seconds / 2


def cannot_change_plan(
    config: DeploymentConfig,
    measured: Sequence[DeploymentConfig],
    spec: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    table: EngineCapabilities,
    options: PlanOptions,
) -> str | None:
    """Return why no measurement of ``config`` changes the plan on ``hardware``; None when one may.

    A configuration that is not measured is estimated from the nearest one that is, so measuring one tells more of
    all those to which it would be the nearest: all of them are asked.

    Args:
        estimator: by what was measured, which is ``measured``.
        table: what the one engine runs.

    Raises:
        NotMeasuredError: there is no estimate yet.
    """
    num_gpus, estimator = len(hardware.snapshot.gpus), with_traffic(estimator, spec, options)
    chooser = EngineChooser(spec, hardware.gpu, [table])
    runs = [
        other
        for other in configuration_space(spec, hardware.gpu, num_gpus, chooser.name)
        if shape_refusal(spec, other, num_gpus) is None and chooser.refusal(other) is None
    ]
    told = [other for other in runs if nearest(other, [*measured, config]) == config]
    if not told:
        return "nothing that runs here would be estimated from it"
    return cannot_become_best(
        [estimator.estimate(other, options.workload) for other in told],
        [estimator.estimate(other, options.workload) for other in measured],
        options.replica_intent,
        fits=FitsOn(hardware, options),
        prices=Prices(usd_per_gpu_hour=hardware.gpu.price_usd_per_gpu_hour),
    )


def refuse_without_experts(spec: ModelSpec, table: EngineCapabilities, gpu: GpuSpec, *, num_gpus: int) -> None:
    """Raise ConfigError if expert parallelism of ``spec`` cannot be measured on so many of ``gpu``."""
    config = DeploymentConfig(tp=2, weights=spec.as_given, engine=table.engine, expert_parallel=True)
    reason = shape_refusal(spec, config, num_gpus) or table.refusal(spec, config, gpu)
    if reason is None and not table.step_timed:
        reason = f"it takes an engine with our step timer, and {table.engine} has none"
    if reason is not None:
        raise ConfigError(f"expert parallelism cannot be measured: {reason}; leave --expert-parallel out")


def refuse_without_pattern(spec: ModelSpec, name: str) -> None:
    """Refuse repeats of a model without a pattern: only a pattern has the whole model's mix of layers.

    Raises:
        UnsupportedModelError: it does not.
    """
    if spec.several_kinds and not tied_depths(spec, 1):
        kinds = ", ".join(
            f"{kind.count} "
            + (f"with {kind.shape.mixer} " if kind.shape else "")
            + ("look back " + (f"{kind.window:,} tokens" if kind.window else "to the beginning"))
            for kind in spec.kinds
        )
        raise UnsupportedModelError(
            f"the {spec.num_layers} layers of {name} are of {len(spec.kinds)} kinds "
            f"({kinds}) in no order that repeats, and an engine with our step timer measures a pattern that does; "
            "--engine torch measures each kind, `iserve plan` with --gpus estimates the model from datasheets"
        )
