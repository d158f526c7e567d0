"""Taking of a profile: the formats and degrees that the engine runs and that may be wanted.

Only those are measured that can still change the decision that the profile is taken for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from daemon.profile_client import WorkerProfileTarget
from daemon.status import NodeStatus
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.depth_tied_plan import DepthTiedPlan, depth_tied_plan
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import (
    ConfigError,
    InfeasibleError,
    IserveError,
    NotMeasuredError,
    TooLittleTimeError,
    UnavailableError,
    UnmeasurableError,
    UnsupportedModelError,
)
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import Profile, key_of
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress, profile
from fingerprint.profile_plan import EngineSizes, ProfilePlan, Shards, default_plan
from fingerprint.variant_measurements import VariantKind, VariantMeasurement
from fingerprint.variant_profile import measure_variants, variant_plan
from fingerprint.variant_step_plan import step_plan
from fingerprint.variant_steps import measure_variant_steps
from iserve.controller.profiling_cuts import Fingerprints
from iserve.controller.profiling_devices import STEP_TOKENS, FittingPlan, fitting, quietest
from iserve.controller.profiling_gaps import with_failure, with_missing_points, with_part, with_what_had_no_room
from iserve.controller.profiling_scope import (
    lacking,
    refuse_without_experts,
    refuse_without_pattern,
    variants_budget_s,
    why_needless,
)
from iserve.model_source import ModelSource
from iserve.planning.estimator_factory import contradictions, profile_as
from iserve.planning.pipeline import PlanOptions
from placement.types import DeploymentState
from planner.intent import Quality, allows
from planner.space import shape_refusal

__all__ = ["Order", "consistent", "take"]

_DEGREES = ((1, 1), (2, 1), (1, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Order of one profile.

    Attributes:
        table: what the engine runs of checkpoints as they are.
        node: before any worker of this profile.
        serving: on the node, with their rates, where these are known.
        plan_options: measure what may serve it best; None: everything that may serve some request of that quality.
        known: holds on the node, with measurements left out that the request needs: these are added to it.
        shards: which degrees may be taken as one tensor-parallel rank alone.
        max_seconds: launches included, but for an engine in an environment of its own: there without its starts,
            and where it carries our step timer of all GPUs together. Variants get half as much again,
            twice that on a slow machine; with our step timer 30 s at most, and what warming up takes.
        variants: kind of the variants to measure as well; None: there are none.
        expert_parallel: measure what is measured at a TP degree above 1 with expert parallelism as well, in half
            as much time again.
    """

    source: ModelSource
    table: EngineCapabilities
    node: NodeStatus
    workload: Workload
    plan_options: PlanOptions | None
    quality: Quality
    shards: Shards
    max_seconds: float
    progress: Callable[[ProfileProgress], None]
    known: Profile | None = None
    serving: tuple[DeploymentState, ...] = ()
    variants: VariantKind | None = None
    expert_parallel: bool = False

    @property
    def spec(self) -> ModelSpec:
        """The part of the model that is measured: its text alone."""
        return self.source.spec.text_alone

    @property
    def variants_budget_s(self) -> float:
        return variants_budget_s(self.table, self.max_seconds)

    def as_served(self, measured: Profile) -> Profile:
        """Return ``measured`` as that of the model with the towers it is served with, which take memory."""
        return profile_as(self.source.spec, measured)


def take(order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints) -> Profile:
    """Measure; raises as ``Profiler.take``, and ConfigError: shards are wanted of an engine without step timer, or
    more requests at once than tokens fit a step of one with it."""
    if order.shards is Shards.ALWAYS and not order.table.step_timed:
        raise ConfigError(
            f"shards={order.shards} profiles one tensor-parallel rank alone, which takes an engine with our step "
            f"timer, and {order.table.engine} has none; take --engine vllm, or leave --shards out"
        )
    if order.table.own_environment:
        _refuse_more_than_a_step(order)
    if order.table.step_timed:
        refuse_without_pattern(order.spec, order.source.name)
    if order.expert_parallel:
        gpu = target.machine().device
        refuse_without_experts(order.spec, order.table, gpu, num_gpus=len(order.node.devices))
    measured = _with_expert_parallel(_of_base(order, target, fingerprints), order, target, fingerprints)
    return _with_variants(measured, order, target, fingerprints)


def _of_base(order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints) -> Profile:
    if order.known is not None and order.plan_options is not None:
        return _with_what_lacks(order.known, order.plan_options, order, target, fingerprints)
    if order.table.step_timed:
        return _take_depth_tied(order, target, fingerprints)
    return _take_unrepeated(order, target, fingerprints)


def _with_variants(
    measured: Profile, order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints
) -> Profile:
    """Return ``measured`` with the order's variants, measured now unless it has their kind.

    A failure that may be gone the next time is a note alone: the next deploy with such variants tries again. So it
    does after a first lack of time: other work may have slowed the machine, and compiled kernels are kept. After a
    second try in a row only more time, or a profile that is asked for, is worth the starts of engines. What cannot
    be measured is kept as such at once, as what the engine refuses: no deploy tries it again.
    """
    kind, budget_s = order.variants, order.variants_budget_s
    known = tuple(one for one in measured.variants if one.kind != kind or one.is_final(budget_s))
    if kind is None or kind in {one.kind for one in known}:
        return measured
    failed = f"{kind} were not measured: "
    notes = tuple(note for note in measured.notes if not note.startswith(failed))  # of an earlier try
    measure = _measured_by_steps if order.table.step_timed else _measured_by_bursts
    begun_s = time.monotonic()
    try:
        found = measure(kind, order, target, fingerprints)
    except UnmeasurableError as error:
        found = VariantMeasurement.failed(kind, str(error), time.monotonic() - begun_s)
    except IserveError as error:
        if not isinstance(error, TooLittleTimeError) or notes == measured.notes:
            return replace(measured, variants=known, notes=(*notes, f"{failed}{error}"))
        failure = f"{error} (tried twice; `iserve profile` tries again)"
        found = VariantMeasurement.failed(kind, failure, time.monotonic() - begun_s, budget_s)
    if found.failure:
        notes = (*notes, f"{failed}{found.failure}")
    return replace(measured, variants=(*known, found), notes=notes)


def _measured_by_bursts(
    kind: VariantKind, order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints
) -> VariantMeasurement:
    return measure_variants(
        order.spec,
        lambda: target.open(tp=1, pp=1),
        fingerprints,
        fingerprints.variant,
        variant_plan(order.spec, order.workload, kind, budget_s=order.variants_budget_s),
        forget=fingerprints.forget_variants,
        progress=order.progress,
    )


def _measured_by_steps(
    kind: VariantKind, order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints
) -> VariantMeasurement:
    return measure_variant_steps(
        order.spec,
        lambda: target.open(tp=1, pp=1, delta_format=kind.delta_format),
        fingerprints,
        fingerprints.variant,
        step_plan(
            order.spec,
            order.workload,
            kind,
            budget_s=order.variants_budget_s,
            step_tokens=STEP_TOKENS,
        ),
        forget=fingerprints.forget_variants,
        progress=order.progress,
    )


def _refuse_more_than_a_step(order: Order) -> None:
    """Raise ConfigError if one token of each sequence does not fit a step: the engine would not start."""
    if order.workload.batch > STEP_TOKENS:
        raise ConfigError(
            f"batch={order.workload.batch:,} is more than the {STEP_TOKENS:,} tokens of one step that "
            f"{order.table.engine} is started with, and each sequence decodes one in every step; lower --batch"
        )


def _take_unrepeated(order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints) -> Profile:
    """Measure fingerprints as they are, on an engine that does not carry our step timer.

    One that starts anew with each load is started as large as a deployment of the workload would be, since its
    memory follows from that; any other loads a fingerprint in a moment, and its launches count.

    Raises:
        NotMeasuredError: as :func:`consistent`.
    """
    spec, own, started = order.spec, order.table.own_environment, time.monotonic()
    device = target.machine().device  # launches the worker that the first degree then uses
    launch_s = 0.0 if own else time.monotonic() - started
    weights, degrees = _formats_and_degrees(spec, order, device)
    left_s = order.max_seconds if own else max(1.0, order.max_seconds - launch_s)
    plan = default_plan(spec, order.workload, weights=weights, degrees=degrees, budget_s=left_s)
    plan = replace(plan, sizes=_engine_sizes(spec, order.workload, plan) if own else None)
    measure = partial(profile, order.source.name, spec, target, fingerprints, progress=order.progress)
    measured = consistent(measure(plan, launch_s=launch_s), plan, measure)
    return replace(measured, budget_s=order.max_seconds, spent_s=measured.spent_s + launch_s)


def _engine_sizes(spec: ModelSpec, workload: Workload, plan: ProfilePlan) -> EngineSizes:
    """Return sizes that hold ``workload`` and every point of ``plan``; the sequences together hold a step."""
    bursts = [(b, n + plan.outputs_of(b, n)[1]) for b in plan.batches for n in plan.input_tokens]
    max_batch = max(workload.batch, *plan.batches)
    longest = max(workload.context_tokens, -(-STEP_TOKENS // max_batch), *(tokens for _, tokens in bursts))
    context = min(spec.max_context_tokens, longest)
    return EngineSizes(
        max_batch=max_batch,
        max_context_tokens=context,
        max_batched_tokens=min(STEP_TOKENS, max_batch * context),
        kv_tokens=max(b * tokens for b, tokens in bursts),
    )


def consistent(measured: Profile, plan: ProfilePlan, measure: Callable[[ProfilePlan], Profile]) -> Profile:
    """Return ``measured`` without contradictions (two layers faster than one).

    A contradiction is measured once more, in as much time as it had, and left out where it occurs again. Nothing
    is extrapolated from it.

    Raises:
        NotMeasuredError: nothing else is left.
    """
    wrong = contradictions(measured)
    if not wrong:
        return measured
    degrees = tuple(degree for degree in plan.degrees if degree in {(key.tp, key.pp) for key in wrong})
    weights = tuple(w for w in plan.weights if w in {key.weights for key in wrong})
    share = len(degrees) * len(weights) / (len(plan.degrees) * len(plan.weights))
    notes = [f"{key}: {why}; measured again" for key, why in wrong.items()]
    timing = [point for point in measured.timing if point.key not in wrong]
    unreached = [gap for gap in measured.unreached if key_of(gap.config) not in wrong]
    spent_s, second = measured.spent_s, None
    try:
        second = measure(replace(plan, degrees=degrees, weights=weights, budget_s=share * plan.budget_s))
    except IserveError as error:
        notes.append(f"it could not be measured again: {error}")
    if second is not None:
        spent_s += second.spent_s
        timing += [point for point in second.timing if point.key in wrong]
        notes += [f"{key} left out: no time for it" for key in wrong if key not in {point.key for point in timing}]
        unreached += [gap for gap in second.unreached if key_of(gap.config) in wrong]
    still = contradictions(replace(measured, timing=tuple(timing)))
    notes += [f"{key} is unusable, measured twice: {why}" for key, why in still.items()]
    timing = [point for point in timing if point.key not in still]
    if not timing:
        raise NotMeasuredError(
            f"{measured.model} cannot be estimated: {'; '.join(notes)}; profile it when it is quiet"
        )
    return replace(
        measured,
        timing=tuple(timing),
        spent_s=spent_s,
        complete=measured.complete and second is not None and second.complete and not still,
        notes=(*measured.notes, *notes),
        unreached=tuple(unreached),
    )


def _take_depth_tied(order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints) -> Profile:
    """Take a profile in which every forward is repeated to the model's depth.

    A format takes two engine starts of its own, so formats that the requested quality does not allow are left out,
    and so is what cannot become the best any more.
    """
    device = target.machine().device
    weights, degrees = _formats_and_degrees(order.spec, order, device)
    allowed = tuple(w for w in weights if allows(order.quality, DeploymentConfig(weights=w)))
    plan = _depth_tied_plan(order, allowed, degrees, order.max_seconds)
    skipped = [
        DeploymentConfig(tp=tp, pp=pp, weights=w, engine=order.table.engine)
        for w in weights
        if w not in allowed
        for tp, pp in degrees
    ]
    measured = _measured(order, device, plan, target, fingerprints, skipped)
    left_out = (
        f"{w} not measured: quality={order.quality} does not allow it" for w in weights if w not in allowed
    )
    return replace(measured, notes=(*measured.notes, *left_out), skipped=tuple(skipped))


def _with_what_lacks(
    known: Profile,
    plan_options: PlanOptions,
    order: Order,
    target: WorkerProfileTarget,
    fingerprints: Fingerprints,
) -> Profile:
    """Return ``known`` with what it lacks for ``plan_options``."""

    def wanted(known: Profile) -> Sequence[DeploymentConfig]:
        return lacking(order.as_served(known), order.node, order.table, plan_options, order.serving)

    return _added(known, wanted, order.max_seconds, order, target, fingerprints)


def _with_expert_parallel(
    measured: Profile, order: Order, target: WorkerProfileTarget, fingerprints: Fingerprints
) -> Profile:
    """Return ``measured`` with the same with expert parallelism, where the order has it measured."""
    if not order.expert_parallel:
        return measured

    def wanted(known: Profile) -> Sequence[DeploymentConfig]:
        split = {point.key for point in known.timing if point.tp > 1}
        twins = {replace(key, expert_parallel=True) for key in split} - split
        return [key.config(known.engine) for key in sorted(twins)]

    found = _added(measured, wanted, order.max_seconds / 2, order, target, fingerprints)
    tried = {point.key.config(found.engine) for point in found.timing}.union(gap.config for gap in found.unreached)
    if found is not measured or any(one.expert_parallel for one in tried):
        return found
    note = "expert parallelism was not measured: it takes free GPUs, and a measurement on them without it"
    return replace(found, notes=(*found.notes, note))


def _added(
    known: Profile,
    wanted: Callable[[Profile], Sequence[DeploymentConfig]],
    budget_s: float,
    order: Order,
    target: WorkerProfileTarget,
    fingerprints: Fingerprints,
) -> Profile:
    """Return ``known`` with what is ``wanted`` in addition.

    It stays good for what it holds: what there is no room for now is not added, nor what the daemon is away for,
    and what fails is not tried again. A lack of time may be gone once: twice in a row, it is a failure.
    """
    given_s, tried = known.spent_s + budget_s, set[DeploymentConfig]()
    while known.spent_s < given_s:
        config = next((one for one in wanted(known) if one not in tried), None)
        if config is None:
            break
        tried.add(config)
        degrees = ((config.tp, config.pp),)
        plan = _depth_tied_plan(order, (config.weights,), degrees, given_s - known.spent_s, like=known)
        plan = replace(plan, expert_parallel=config.expert_parallel)
        plan = with_missing_points(plan, known, config)
        whole = any((point.key, point.shard) == (key_of(config), False) for point in known.timing)
        part_order = replace(order, shards=Shards.NEVER) if whole else order  # one rank tells less than is there
        try:
            part = _measured(part_order, known.machine.device, plan, target, fingerprints, [])
        except (InfeasibleError, UnavailableError):  # no room now, or no daemon
            return known
        except IserveError as error:
            too_little = f"{config} was given too little time: "
            if isinstance(error, TooLittleTimeError) and not any(n.startswith(too_little) for n in known.notes):
                return replace(known, notes=(*known.notes, f"{too_little}{error}"))
            known = with_failure(known, config, plan, error)
            continue
        known = with_part(known, config, part)
    return known


def _depth_tied_plan(
    order: Order,
    weights: tuple[WeightFormat, ...],
    degrees: tuple[tuple[int, int], ...],
    budget_s: float,
    *,
    like: Profile | None = None,
) -> DepthTiedPlan:
    """Args: like: the engine is started for as many sequences as it was there, if for more than are asked for."""
    started_for = 0 if like is None else max((point.max_batch for point in like.memory), default=0)
    plan = depth_tied_plan(
        order.spec,
        order.workload,
        max_batch=max(order.workload.batch, started_for),
        weights=weights,
        degrees=degrees,
        budget_s=budget_s,
    )
    # So long that the sequences together hold a step: an engine's largest step is no larger than that.
    longest = min(order.spec.max_context_tokens, -(-STEP_TOKENS // plan.max_batch))
    context = max(plan.max_context_tokens, longest)
    return replace(plan, max_batched_tokens=min(STEP_TOKENS, plan.max_batch * context), max_context_tokens=context)


def _measured(
    order: Order,
    device: GpuSpec,
    plan: DepthTiedPlan,
    target: WorkerProfileTarget,
    fingerprints: Fingerprints,
    skipped: list[DeploymentConfig],
) -> Profile:
    """Measure what of ``plan`` there is room for; what turns out needless on the way is added to ``skipped``."""
    spec = order.spec
    fits = fitting(plan, spec, device, quietest(order.node.devices))
    alone = _ranks_alone(order, device, fits)
    wanted = (*fits.plan.degrees, *alone)
    if not wanted:
        raise InfeasibleError("; ".join(why for _, why in fits.too_full))

    def needless(config: DeploymentConfig, so_far: Profile) -> str | None:
        if order.plan_options is None:
            return None
        why = why_needless(
            config, order.as_served(so_far), order.node, order.table, order.plan_options, order.serving
        )
        if why is not None:
            skipped.append(config)
        return why

    found = depth_tied_profile(
        order.source.name,
        spec,
        target,
        fingerprints,
        replace(fits.plan, degrees=wanted),
        num_gpus=max((tp * pp for tp, pp in fits.plan.degrees), default=1),
        progress=order.progress,
        needless=needless,
    )
    no_gpus = (
        f"tp={tp} pp={pp} {'not run whole' if (tp, pp) in alone else 'left out'}: {why}"
        for (tp, pp), why in fits.too_full
    )
    measured = replace(found, notes=(*found.notes, *fits.notes, *no_gpus))
    known = {point.key.config(found.engine) for point in found.timing}.union(
        skipped, (gap.config for gap in found.unreached)
    )
    full = (key.config(found.engine) for (tp, pp), _ in fits.too_full for key in plan.keys(tp, pp))
    wanted_still = [config for config in full if config not in known and needless(config, found) is None]
    return with_what_had_no_room(measured, plan, fits, wanted_still)


def _ranks_alone(order: Order, gpu: GpuSpec, fits: FittingPlan) -> tuple[tuple[int, int], ...]:
    """Return which of the degrees without enough GPUs are taken as one rank alone."""
    if order.shards is Shards.NEVER:
        return ()
    given, name = order.spec.as_given, order.table.engine
    full = [degree for degree, _ in fits.too_full]
    missing = [degree for degree in _DEGREES if degree[0] * degree[1] > len(order.node.devices)]
    wanted = full + (missing if order.shards is Shards.ALWAYS else [])
    return tuple(
        (tp, pp)
        for tp, pp in wanted
        if pp == 1 and _runs(order, DeploymentConfig(tp=tp, weights=given, engine=name), gpu, num_gpus=tp)
    )


def _formats_and_degrees(
    spec: ModelSpec, order: Order, gpu: GpuSpec
) -> tuple[tuple[WeightFormat, ...], tuple[tuple[int, int], ...]]:
    """Return what the engine runs of the model on the node's devices.

    Raises UnsupportedModelError: nothing at all.
    """
    table, name = order.table, order.table.engine

    def runs(config: DeploymentConfig) -> bool:
        return _runs(order, config, gpu, num_gpus=len(order.node.devices))

    weights = tuple(w for w in WeightFormat if runs(DeploymentConfig(weights=w, engine=name)))
    given = DeploymentConfig(weights=spec.as_given, engine=name)
    degrees = tuple((tp, pp) for tp, pp in _DEGREES if runs(replace(given, tp=tp, pp=pp)))
    if not weights or not degrees:
        reason = table.refusal(spec, given, gpu)
        raise UnsupportedModelError(f"{name} cannot run this model here: {reason}")
    return weights, degrees


def _runs(order: Order, config: DeploymentConfig, gpu: GpuSpec, *, num_gpus: int) -> bool:
    spec = order.spec
    return shape_refusal(spec, config, num_gpus) is None and order.table.refusal(spec, config, gpu) is None
