"""The one choice of a configuration: made alike for a plan, for a deploy and for what is exported. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from daemon.devices import Device
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, even_split
from fingerprint.delta.formats import DEFAULT_FORMAT
from fingerprint.engine_caches import with_engine_caches
from fingerprint.engines import traits_of
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator
from fingerprint.estimators.adapter_slots import loads_stop_steps, requests_within, variant_cost, variant_load_s
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.gpu_spec import GpuSpec
from fingerprint.load_columns import load_wait_at
from fingerprint.lora.slot_bytes import largest_delta_bytes, slot_bytes
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.service_model import LARGEST_BATCH
from fingerprint.variant_measurements import kind_of
from iserve.model_source import ModelSource
from iserve.planning.deployability import DeployableDocument
from iserve.planning.estimator_factory import step_tokens_of
from iserve.planning.joint_choice import JointChoice
from iserve.planning.joint_plan import ChosenPlan, chosen_plan, joint_capacity, joint_document
from iserve.planning.merge_advice import merge_advice_of_plan
from iserve.planning.pipeline import (
    JOINT,
    EngineChooser,
    Hardware,
    PlanOptions,
    alone_of,
    has_slots_by_steps,
    placements_of,
    slots_of,
    variant_load,
    winner_at,
    with_traffic,
)
from iserve.planning.plan_document import plan_document
from iserve.planning.runner_up import MOST_BATCH
from iserve.planning.serving_capacity import ServingCapacity, serving_capacity
from iserve.planning.verdict import verdict
from iserve.planning.words import engine_name, gib, measured_variants_words, rounded, slots_words
from iserve.planning.worker_launch import PlannedDeployment
from planner.adapter_slots import MOST_SLOTS
from planner.intent import MAX_REPLICAS
from planner.plan import LimitKind, Plan, RefusedFor, Relaxation

__all__ = ["planned_deployment", "too_few_slots", "with_rate_advice"]


def planned_deployment(
    source: ModelSource,
    hardware: Hardware,
    estimator: Estimator,
    table: EngineCapabilities,
    options: PlanOptions,
    *,
    devices: tuple[Device, ...],
    deployable_of: Callable[[DeploymentConfig, int], DeployableDocument],
    notes: tuple[str, ...] = (),
    profile: Profile | None = None,
    made: ChosenPlan | None = None,
) -> PlannedDeployment:
    """Rank every configuration of the engine with ``table``, and return the best with what it serves.

    A configuration that needs a checkpoint prepared beforehand is refused: iServe prepares none.

    Args:
        devices: of ``hardware``.
        deployable_of: judges the chosen configuration and its number of replicas.
        notes: reported with the plan.
        profile: behind ``estimator``; None: datasheets.
        made: of these arguments, by ``chosen_plan``; None: it was not asked yet.
    """
    spec, of_base = source.spec, estimator
    estimator = with_traffic(estimator, spec, options)
    kept = spec if profile is None else with_engine_caches(spec, profile.memory)
    of_traffic = (*_prefixes(spec, options, table.engine), *_drafts(spec, options, table.engine))
    plan, choice, options, of_choice = _chosen(spec, kept, hardware, estimator, table, options, made)
    best = None if plan.best is None else plan.best.config
    advice = merge_advice_of_plan(source.argument, spec, hardware.gpu, of_base, options, best)
    advised = () if advice is None else (advice.text,)
    of_slots = _slots(source, hardware.gpu, options, table, best, of_base, choice)
    capacity = _capacity(plan, choice, kept, hardware, estimator, options, profile)
    free_bytes: Mapping[str, int] = {gpu.device_id: gpu.free_bytes for gpu in hardware.snapshot.gpus}
    document = plan_document(
        plan,
        model=source.title,
        hardware=hardware.label,
        workload=options.workload,
        conditions_of=_conditions(spec, hardware, table, is_measured=profile is not None),
        notes=(*notes, *of_traffic, *of_choice, *of_slots, *advised, *_crowds(plan, choice, hardware)),
        replicas=options.replicas,
        alone=alone_of(estimator, best, options.workload) if profile and best else None,
        profile=profile,
        verdict=verdict(
            plan,
            model=source.title,
            hardware=hardware,
            estimator=estimator,
            options=options,
            deployable=None if best is None else deployable_of(best, options.replicas),
        ),
        capacity=None if capacity is None else capacity.document(free_bytes),
        joint=None if choice is None else joint_document(choice),
        merge_advice=advice,
    )
    return PlannedDeployment(document, plan.best, devices, free_bytes, capacity)


def _capacity(
    plan: Plan,
    choice: JointChoice | None,
    kept: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    options: PlanOptions,
    profile: Profile | None,
) -> ServingCapacity | None:
    """Return what each worker is started for; None: nothing is feasible."""
    measured_step = None if profile is None else step_tokens_of(profile)
    if choice is not None:
        return joint_capacity(choice, kept, options, measured_step)
    return serving_capacity(plan, kept, hardware, estimator, options, measured_step)


def _conditions(
    spec: ModelSpec, hardware: Hardware, table: EngineCapabilities, *, is_measured: bool
) -> Callable[[DeploymentConfig], tuple[str, ...]]:
    """Return a function: what a configuration needs next to GPUs; what runs a measured one is here."""
    if is_measured:
        return lambda config: table.conditions(spec, config, hardware.gpu)
    return lambda config: EngineChooser(spec, hardware.gpu, [table]).conditions(config)


def _chosen(
    spec: ModelSpec,
    kept: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    table: EngineCapabilities,
    options: PlanOptions,
    made: ChosenPlan | None,
) -> tuple[Plan, JointChoice | None, PlanOptions, tuple[str, ...]]:
    """Return the plan, its replicas where they were chosen together, the options with their number, and notes."""

    def with_slots(slots: int) -> ChosenPlan:
        asked = replace(options, adapter_slots=slots)
        return chosen_plan(spec, hardware, estimator, [table.unprepared()], asked, kept=kept)

    plan, choice = with_slots(options.adapter_slots) if made is None else made
    is_joint = options.is_joint([table], hardware.gpu)
    most = LARGEST_BATCH if options.more_requests and is_joint else options.workload.batch
    notes = too_few_slots(plan, options, most, with_slots)
    if choice is not None:
        options = replace(options, replicas=len(choice.replicas))
    elif not (plan.nearest_misses and is_joint):  # which has its own advice
        plan = with_rate_advice(plan, hardware, estimator, options)
        notes = (*notes, *(() if plan.best is None else _unused(options, table, hardware)))
    return plan, choice, options, notes


def too_few_slots(
    plan: Plan, options: PlanOptions, most: int, with_slots: Callable[[int], tuple[Plan, JointChoice | None]]
) -> tuple[str, ...]:
    """Return with how many slots a rate is served that is not with those that were asked for.

    Without a number asked for a plan has slots for as many requests as it is planned for.

    Args:
        most: requests that a replica of ``plan`` runs at once, whatever slots they find.
    """
    slots, load, nearest = options.adapter_slots, variant_load(options.intent.traffic), plan.why_not.nearest
    too_often = any(miss.limit is LimitKind.RATE for miss in plan.nearest_misses)
    if plan.best is not None or nearest is None or not (nearest.config.adapter_slots and slots and too_often):
        return ()
    within, more = requests_within(load.distinct, slots), slots
    while within is not None and within < most and more < min(MOST_SLOTS, load.variants):
        more = min(2 * more, MOST_SLOTS)
        if with_slots(more)[0].best is not None:
            return (
                f"not served with {slots} slot{'s' * (slots > 1)}: {rounded(within, 2)} requests run at once on "
                f"average, the rest waits for a slot; it is with --adapter-slots {more}",
            )
    return ()


def _unused(options: PlanOptions, table: EngineCapabilities, hardware: Hardware) -> tuple[str, ...]:
    """Return what of a joint plan this one, ranked by one batch, does not have."""
    if options.is_joint([table], hardware.gpu):
        return ("planned by one batch: no place has room for all of it under load",)
    if options.expected_models:
        return ("expected models are of use to a joint plan only (--policy joint); this one is none",)
    return ()


def _prefixes(spec: ModelSpec, options: PlanOptions, engine: str) -> tuple[str, ...]:
    """Return what is taken of the prefix cache, where a share of hits was given."""
    hits, name = options.intent.traffic.prefix_hits, engine_name(engine)
    if not hits:
        return ()
    if not traits_of(engine).caches_prefixes:
        return (f"{name} keeps no prefixes: every prompt is computed whole",)
    states = ", though states are kept for few places in a prompt" if spec.keeps_state else ""
    return (f"{hits:.0%} of the prompts' tokens are taken to be in {name}'s prefix cache{states}",)


def _drafts(spec: ModelSpec, options: PlanOptions, engine: str) -> tuple[str, ...]:
    """Return what is taken of n-gram drafts, where their acceptance was given."""
    acceptance = options.intent.traffic.draft_acceptance
    if not acceptance:
        return ()
    if not traits_of(engine).drafts_ngrams:
        return (f"n-gram drafts are planned on vLLM only: none on {engine_name(engine)}",)
    if spec.keeps_state:
        return ("n-gram drafts were not looked into for models that keep states: none are planned",)
    return (
        f"{acceptance:.0%} of n-gram drafts are taken to be accepted, each after those before it; the time of a "
        "step that verifies them is estimated, not measured",
    )


def _slots(
    source: ModelSource,
    gpu: GpuSpec,
    options: PlanOptions,
    table: EngineCapabilities,
    chosen: DeploymentConfig | None,
    of_base: Estimator,
    choice: JointChoice | None,
) -> tuple[str, ...]:
    """Return what a plan says of the slots of ``chosen``: their memory, and the share of variants that waits."""
    spec, need, traffic = source.spec, slots_of(options), options.intent.traffic
    if need is None or chosen is None or not table.adapters:
        return ()
    law = f"zipf:{traffic.variant_skew:g}" if traffic.variant_skew else "even"
    law += f", {traffic.base_share:.0%} of the requests for the base" * bool(traffic.base_share)
    one_slot = slot_bytes(spec, chosen, max(even_split(spec.num_layers, chosen.pp)))
    cost = variant_cost(of_base, spec, chosen)
    share = f"{need.without_slot[chosen.adapter_slots]:.0%} of the variants asked for at once"
    part = "half of what the weights leave" if chosen.has_delta_slots else "a tenth of a GPU"
    fewer = f"; {need.slots} take more than {part}" if chosen.adapter_slots < need.slots else ""
    if has_slots_by_steps(spec, gpu, of_base, [table.unprepared()], options):
        fewer = (
            f"; of the slots that {part} holds, so many decode most tokens a second, by the times of steps and "
            "the KV cache next to them"
        )
    return (
        f"{slots_words(chosen)}, {gib(one_slot)} of a device each, for {traffic.variants:,} "
        f"variant{'s' * (traffic.variants > 1)} ({law}): {share} wait for a slot{fewer}",
        _slot_times(source, options, chosen, cost),
        *_loads(spec, options, chosen, cost, choice),
    )


def _loads(
    spec: ModelSpec,
    options: PlanOptions,
    chosen: DeploymentConfig,
    cost: VariantCost | None,
    choice: JointChoice | None,
) -> tuple[str, ...]:
    """Return what requests wait for loads or, where loads stop their worker, which share of its time they take."""
    if cost is None:
        return ()
    variants, rate_per_s = options.intent.traffic.variants, options.intent.rate_per_s
    one_s = variant_load_s(cost, spec, chosen)
    missed = variant_load(options.intent.traffic).missed(chosen.loaded_adapters)
    if not loads_stop_steps(chosen):
        return (_loads_next_to_steps(options, chosen, one_s, missed),)
    first = min(variants, chosen.loaded_adapters)
    steady = "every variant stays loaded"
    if missed:
        of_time = ""
        if rate_per_s is not None:
            of_time = f", up to {missed * one_s * rate_per_s / options.replicas:.1%} of its time"
        steady = f"up to {missed:.1%} of the requests wait for a load that stops their worker{of_time}"
        if rate_per_s is not None and options.replicas > 1:
            together = variant_load(options.intent.traffic).missed(options.replicas * chosen.loaded_adapters)
            counted = "a share between the two"
            if choice is not None and not choice.service.spared_loads_s:
                counted = "all loads, as it does for every pipeline that fills its stages"
            found = f"{together:.1%} if each finds a slot where its variant is loaded"
            steady += f" ({found}; E2E at the rate counts {counted})"
    return (
        f"loads: {steady}; the first loads at a worker stop it for up to {rounded(first * one_s, 2)} s, "
        f"{rounded(one_s, 2)} s each (estimated)",
    )


def _loads_next_to_steps(options: PlanOptions, chosen: DeploymentConfig, one_s: float, missed: float) -> str:
    """Return what requests for variants that are not loaded wait, at the rate where there is one."""
    kinds = {"adapters": chosen.adapter_rank, "deltas": chosen.has_delta_slots or chosen.delta_mib}
    what = " and ".join(kind for kind, is_held in kinds.items() if is_held)
    said = f"{what} are loaded next to the steps, one at a time, each in {rounded(one_s, 2)} s (estimated): "
    waits = variant_load(options.intent.traffic).load_waits(chosen.adapter_slots, chosen.loaded_adapters, one_s)
    if waits is None:
        return f"{said}every variant stays loaded"
    said += f"up to {missed:.1%} of the requests need a load"
    if options.intent.rate_per_s is None:
        return f"{said}, and wait for earlier loads too"
    rate_per_s = options.intent.rate_per_s / options.replicas
    busy, (share, mean_s) = missed * one_s * rate_per_s, load_wait_at(waits, rate_per_s)
    waiting = f"{share:.1%} of the requests wait for one, {rounded(mean_s, 2)} s on average"
    if busy < 1:
        return f"{said}; loads take up to {busy:.0%} of the time, and {waiting}"
    return (
        f"{said}; loads would take up to {busy:.0%} of the time, which is more than there is, so that requests "
        f"for one variant share its load: {waiting}; more --adapter-slots keep more loaded"
    )


def _slot_times(
    source: ModelSource, options: PlanOptions, chosen: DeploymentConfig, cost: VariantCost | None
) -> str:
    """Return where the time that variants add is from."""
    if cost is None:
        kind = kind_of(chosen)
        what = "deltas" if kind is not None and kind.is_delta else "adapters"
        option = f"--delta-format {DEFAULT_FORMAT.name}" if what == "deltas" else f"--rank {chosen.adapter_rank}"
        batch = f" --batch {options.workload.batch}" * (options.workload.batch > 1)
        command = f"iserve profile {source.argument} --engine {chosen.engine}{batch} {option}"
        hint = f"; `{command}` measures it" * traits_of(chosen.engine).profiles_variants
        return f"the time that {what} add on {engine_name(chosen.engine)} is not known and left out{hint}"
    in_host = ""
    if chosen.has_delta_slots:
        loaded = gib(chosen.loaded_adapters * largest_delta_bytes(source.spec, chosen))
        in_host = (
            f"; loaded deltas lie in the host's memory as well, up to twice {loaded} for each worker, which is "
            "not planned"
        )
    if cost.measured is not None:
        return measured_variants_words(cost) + in_host
    if chosen.has_delta_slots:
        return f"the time that deltas add is estimated from kernels that were timed alone on an H200{in_host}"
    return (
        "the time that adapters add is estimated from what one model took on vLLM 0.33 and an H200"
        + "; steps of base and adapters together were not measured" * bool(options.intent.traffic.base_share)
    )


def _crowds(plan: Plan, choice: JointChoice | None, hardware: Hardware) -> tuple[str, ...]:
    """Return a warning where the plan makes a TP group share a GPU with two further workers or more."""
    if plan.best is None or plan.best.layout is None or hardware.gpu.is_cpu:
        return ()
    new = placements_of(plan.best.layout)
    there = [replica.placement for one in hardware.snapshot.deployments for replica in one.replicas]
    groups = [
        [(stage.node_id, device) for device in stage.device_ids]
        for placement in (*new, *there)
        for stage in placement.stages
    ]
    workers = Counter(gpu for group in groups for gpu in group)
    own = {
        (stage.node_id, device) for placement in new for stage in placement.stages for device in stage.device_ids
    }
    crowded = {gpu for group in groups if len(group) > 1 for gpu in group if workers[gpu] > 2} & own
    if not crowded:
        return ()
    names = ", ".join(
        f"GPU {gpu.gpu_index} of {gpu.node_id}"
        for gpu in hardware.snapshot.gpus
        if (gpu.node_id, gpu.device_id) in crowded
    )
    return (
        f"{names}: three workers or more share them; a tensor-parallel one may take 4 to 150 times as long while "
        "two further ones are busy (docs/gpu-sharing.md)"
        + ("" if choice is not None else f"; --policy {JOINT} avoids it where it can"),
    )


_MOST_TRIES = 8  # of replicas


def with_rate_advice(plan: Plan, hardware: Hardware, estimator: Estimator, options: PlanOptions) -> Plan:
    """Return ``plan`` with the smallest batch (a power of two) and the fewest replicas that would serve its rate.

    The plan stays as it is where something is feasible or no configuration fails by the rate. Advice to add GPUs
    stays last.
    """
    able = tuple(ranked for ranked in plan.candidates if ranked.refusal is None)
    if plan.best is not None or all(ranked.refused_for is not RefusedFor.RATE for ranked in able):
        return plan
    configs = tuple(ranked.config for ranked in able)

    def first(limit: LimitKind, now: int, tried: Iterable[int]) -> Iterator[Relaxation]:
        for number in tried:
            batch = number if limit is LimitKind.BATCH else options.workload.batch
            asked = replace(options, replicas=number) if limit is LimitKind.REPLICAS else options
            try:
                best = winner_at(hardware, estimator, asked, configs, batch, asked.intent.kind)
            except NotMeasuredError:
                return
            if best is not None:
                text = f"--{limit} {number} in place of {now} would admit {best.config}"
                yield Relaxation(limit, now, number, best.config, None, text)
                return

    batch, replicas = options.workload.batch, options.replicas
    most = min(len(hardware.snapshot.gpus), MAX_REPLICAS, replicas + _MOST_TRIES)
    powers = (1 << exponent for exponent in range(MOST_BATCH.bit_length()))
    found = (
        *first(LimitKind.BATCH, batch, (size for size in powers if size > batch)),
        *first(LimitKind.REPLICAS, replicas, range(replicas + 1, most + 1)),
    )
    told = plan.why_not.relaxations
    gpus = tuple(one for one in told if one.limit is LimitKind.GPUS)
    others = tuple(one for one in told if one.limit is not LimitKind.GPUS)
    return replace(plan, why_not=replace(plan.why_not, relaxations=(*others, *found, *gpus)))
