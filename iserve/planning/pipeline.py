"""Pipeline from a model, hardware and a request to a plan: joins estimator, capability tables, planner, placement.

Starts nothing and measures nothing. Used by the command line (on GPUs that need not exist) and by the controller
(on the GPUs that are free now), so that both give the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError, NotMeasuredError
from fingerprint.estimates import Estimate, Estimator
from fingerprint.estimators.adapter_slots import WithAdapterSlots
from fingerprint.estimators.ngram_drafts import WithNgramDrafts
from fingerprint.estimators.prefix_hits import WithPrefixHits
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.variant_loads import MOST_REPLICAS, WithVariantLoads
from fingerprint.gpu_sharing import GROUP_LOSS
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from fingerprint.service_model import LARGEST_BATCH
from iserve.planning.delta_slots import chooses_by_steps, slots_by_steps
from iserve.planning.more_gpus import least_more_gpus, more_gpus_advice
from placement.fit import demand
from placement.placer_registry import FindsPlaces, check_placement, make_placer
from placement.policies import DEFAULT_LOAD_THRESHOLD, JOINT
from placement.replicas import ReplicaPlacer, Replicas
from placement.types import ClusterSnapshot, GpuState, Placement, Refusal
from planner.adapter_slots import MOST_SLOTS, AskedVariants, SlotNeed, VariantLoad, slot_need
from planner.costs import Prices
from planner.intent import CostModel, Intent, IntentKind, Traffic, check_replicas
from planner.plan import Candidate, Layout, NoRoom, Plan, Ranked
from planner.rank import best_of, rank
from planner.space import DRAFT_TOKENS, configuration_space, shape_refusal

__all__ = [
    "JOINT",
    "EngineChooser",
    "ExpectedSpec",
    "FitsOn",
    "Hardware",
    "PlanOptions",
    "alone_of",
    "check_context",
    "datasheet_estimator",
    "has_slots_by_steps",
    "hypothetical_hardware",
    "in_slots",
    "make_plan",
    "placements_of",
    "plan_on",
    "prices_of",
    "ranked_anywhere",
    "slots_for",
    "slots_of",
    "space",
    "variant_load",
    "winner_at",
    "with_more",
    "with_traffic",
]

MAX_EXPECTED = 100_000
_USUAL_REQUESTS = 32  # in flight, for which adapter slots are reserved where as many are served as memory holds
JOINT_KINDS = (IntentKind.MIN_LATENCY, IntentKind.LATENCY_SLO, IntentKind.MIN_COST, IntentKind.MIN_GPU_HOURS)


@dataclass(frozen=True, slots=True)
class ExpectedSpec:
    """Model of a deployment that is to follow; ``spec`` is None until the name was looked up."""

    name: str
    rate_per_s: float | None = None
    spec: ModelSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options of a plan: what is asked for, and for which requests.

    Raises:
        ConfigError: there is no such policy, or a number of replicas or adapter slots that cannot be.
    """

    intent: Intent = field(default_factory=Intent)
    workload: Workload = field(default_factory=Workload)
    policy: str = JOINT
    load_threshold: float = DEFAULT_LOAD_THRESHOLD
    replicas: int = 1  # of the configuration, each on devices of its own
    expect: int = 0  # deployments that the cluster is to hold in all, this one included; 0: no more than there are
    expected_models: tuple[ExpectedSpec, ...] = ()  # of deployments to follow, which a joint plan plans with
    more_requests: bool = False  # serve as many at once as memory holds, not only those that are planned for
    longer_requests: bool = False  # likewise
    more_replicas: bool = False  # as many as the load is worth, of a joint plan at a known load
    adapter_slots: int = 0  # of each worker, where there are variants; 0: as many as they need, within a bound
    group_loss: float = GROUP_LOSS  # of TP groups in crowds (fingerprint.gpu_sharing); 1 where nothing is lost

    def __post_init__(self) -> None:
        check_placement(self.policy)
        check_replicas(self.replicas)
        if not 0 <= self.expect <= MAX_EXPECTED:
            raise ConfigError(f"there may be 0 to {MAX_EXPECTED} deployments to expect, got {self.expect}")
        if not 0 <= self.adapter_slots <= MOST_SLOTS:
            raise ConfigError(f"a worker has 1 to {MOST_SLOTS} adapter slots, got {self.adapter_slots}")
        if self.expect and not self._is_about_load:
            raise ConfigError(
                f"{self.intent.kind} with placement policy {self.policy} leaves no room for later deployments; "
                f"leave out what is expected, or ask for min-latency with --policy {JOINT}"
            )

    @property
    def _is_about_load(self) -> bool:
        """True where configuration, replicas and GPUs are chosen together if engine and GPU allow it."""
        intent = self.intent
        is_of_load = intent.kind in JOINT_KINDS and intent.cost_model is not CostModel.MEMORY
        return self.policy == JOINT and is_of_load

    def is_joint(self, engines: Iterable[EngineCapabilities], gpu: GpuSpec) -> bool:
        """Return whether a plan on ``gpu`` with any of ``engines`` is by ``iserve.planning.joint_choice``."""
        slots = any(traits_of(table.engine).has_slots for table in engines)
        is_larger = self.workload.batch > LARGEST_BATCH and not self.more_requests
        return self._is_about_load and not gpu.is_cpu and not slots and not is_larger

    @property
    def of_one_batch(self) -> PlanOptions:
        """Options without the load: what each configuration does with one batch on one replica.

        An SLO refuses what misses it by its estimate; what may miss it is left to the forecast under load.
        """
        intent = replace(self.intent, rate_per_s=None, slo_by_value=True)
        return replace(self, intent=intent, replicas=1, expect=0, expected_models=())

    @property
    def replica_intent(self) -> Intent:
        """Intent of each replica.

        Requests are spread evenly, so that each replica gets its share of the rate; its arrivals are taken to be
        as irregular as the whole (sent to the replica with the fewest, they are more regular).
        """
        rate_per_s = self.intent.rate_per_s
        if rate_per_s is None or self.replicas == 1:
            return self.intent
        return replace(self.intent, rate_per_s=rate_per_s / self.replicas, replicas=self.replicas)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Devices of one kind, free or not."""

    label: str  # "8 x a6000"
    gpu: GpuSpec
    snapshot: ClusterSnapshot


def hypothetical_hardware(gpu: GpuSpec, count: int) -> Hardware:
    """``count`` idle GPUs of one node, as in ``--gpus a6000:8``."""
    gpus = tuple(
        GpuState(
            device_id=f"{gpu.name}:{index}",
            node_id="plan",
            gpu_index=index,
            total_bytes=gpu.memory_bytes,
            free_bytes=gpu.memory_bytes,
            kind=gpu.kind,
        )
        for index in range(count)
    )
    return Hardware(label=f"{count} x {gpu.name}", gpu=gpu, snapshot=ClusterSnapshot(gpus))


def datasheet_estimator(spec: ModelSpec, gpu: GpuSpec, engines: Sequence[EngineCapabilities]) -> RooflineEstimator:
    """Return the estimator of ``spec`` on GPUs not present, with each engine's own host time and kernels."""
    eager = frozenset(table.engine for table in engines if table.eager)
    kernels = frozenset(table.engine for table in engines if table.adapter_kernels)
    return _datasheet_estimator(spec, gpu, eager, kernels)


@lru_cache(maxsize=8)
def _datasheet_estimator(
    spec: ModelSpec, gpu: GpuSpec, eager: frozenset[str], adapter_kernels: frozenset[str]
) -> RooflineEstimator:
    """Return one estimator for one model: a plan, its verdict and its export ask for the same estimates."""
    return RooflineEstimator(spec, gpu, eager=eager, adapter_kernels=adapter_kernels)


def with_traffic(
    estimator: Estimator, spec: ModelSpec, options: PlanOptions, load: AskedVariants | None = None
) -> Estimator:
    """Return the estimator of the requests of ``options``, with adapters, cached prefixes and accepted drafts.

    One that is such already is returned as it is.

    Args:
        load: how often each variant is asked for, of replicas that share none; None: as ``options`` say.
    """
    traffic = options.intent.traffic
    if isinstance(estimator, WithPrefixHits | WithNgramDrafts | WithAdapterSlots | WithVariantLoads):
        return estimator
    most_replicas = MOST_REPLICAS if load is None else 1
    load = variant_load(traffic) if load is None else load
    if traffic.variants:
        estimator = WithAdapterSlots(estimator, spec, load.distinct, load.of_base)
    if traffic.draft_acceptance:
        estimator = WithNgramDrafts(estimator, traffic.draft_acceptance, vocab_size=spec.vocab_size)
    if traffic.prefix_hits:
        estimator = WithPrefixHits(estimator, traffic.prefix_hits)
    if not traffic.variants:
        return estimator
    return WithVariantLoads(estimator, spec, load.missed, load.load_waits, most_replicas)


def slots_of(options: PlanOptions) -> SlotNeed | None:
    """Return the adapter slots that the variants of ``options`` need; None: there are none."""
    traffic = options.intent.traffic
    if not traffic.variants:
        return None
    return slots_for(variant_load(traffic), options)


def slots_for(load: AskedVariants, options: PlanOptions) -> SlotNeed:
    """Return the adapter slots that variants need which are asked for as ``load`` says."""
    traffic = options.intent.traffic
    return slot_need(
        load,
        traffic.variant_rank,
        _requests(options),
        options.adapter_slots,
        delta_mib=traffic.delta_mib,
        delta_format=traffic.delta_format,
    )


def _requests(options: PlanOptions) -> int:
    """Return the requests in flight for which slots are reserved."""
    return _USUAL_REQUESTS if options.more_requests else options.workload.batch


def in_slots(config: DeploymentConfig, need: SlotNeed) -> DeploymentConfig:
    """Return ``config`` with the slots of ``need``."""
    return replace(
        config,
        adapter_slots=need.slots,
        adapter_rank=need.rank,
        delta_mib=need.delta_mib,
        delta_format=need.delta_format,
    )


def variant_load(traffic: Traffic) -> VariantLoad:
    """Return the variants that requests ask for, and how often."""
    return VariantLoad(traffic.variants, traffic.variant_skew, traffic.base_share)


def make_plan(
    spec: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    engines: Sequence[EngineCapabilities],
    options: PlanOptions,
) -> Plan:
    """Rank the whole configuration space of ``spec`` on ``hardware``, each placed by a policy.

    Of a joint plan that is where it starts (``iserve.planning.joint_plan``).

    Where nothing is feasible, more GPUs are planned for as well (``least_more_gpus``), with all that fits there.

    Args:
        engines: tables to choose from, in order of preference; a configuration goes to the first that runs it.

    Raises:
        ConfigError: the workload is longer than the model's context, or there is no engine or device.
    """
    check_context(spec, options.workload)
    if not engines:
        raise ConfigError("there is no engine to plan for")
    plan = plan_on(hardware, spec, estimator, engines, options)
    if plan.best is not None or hardware.gpu.is_cpu:  # no share is added to a CPU
        return plan

    def best_with(more: int) -> Ranked | None:
        return plan_on(with_more(hardware, more), spec, estimator, engines, options).best

    if (found := least_more_gpus(len(hardware.snapshot.gpus), best_with)) is None:
        return plan
    more, best = found
    advice = more_gpus_advice(len(hardware.snapshot.gpus), more, best.config, best.objective)
    return replace(plan, why_not=replace(plan.why_not, relaxations=(*plan.why_not.relaxations, advice)))


def plan_on(
    hardware: Hardware,
    spec: ModelSpec,
    estimator: Estimator,
    engines: Sequence[EngineCapabilities],
    options: PlanOptions,
) -> Plan:
    """Return ``make_plan`` without advice on more GPUs."""
    candidates = space(spec, hardware.gpu, len(hardware.snapshot.gpus), estimator, engines, options)
    fits = FitsOn(hardware, options)
    return rank(candidates, options.replica_intent, fits=fits, prices=prices_of(hardware.gpu))


def space(
    spec: ModelSpec,
    gpu: GpuSpec,
    num_gpus: int,
    estimator: Estimator,
    engines: Sequence[EngineCapabilities],
    options: PlanOptions,
) -> list[Candidate]:
    """Return the configuration space of ``spec`` on ``num_gpus`` GPUs, estimated."""
    chooser = EngineChooser(spec, gpu, engines)
    candidates, of_base = list[Candidate](), estimator
    estimator = with_traffic(estimator, spec, options)
    drafts = DRAFT_TOKENS if options.intent.traffic.draft_acceptance else ()
    slots = slots_of(options)
    if slots is not None:
        load, requests = variant_load(options.intent.traffic), _requests(options)
        slots = slots_by_steps(slots, load, spec, gpu, of_base, chooser.name, options.workload, requests)

    def is_measured(config: DeploymentConfig) -> bool:
        """Return whether expert parallelism is known of ``config``: nothing is scaled or taken from datasheets."""
        if chooser.refusal(config) is not None:
            return False
        try:
            estimator.estimate(config, options.workload)
        except NotMeasuredError:
            return False
        return True

    found = configuration_space(
        spec, gpu, num_gpus, chooser.name, drafts=drafts, slots=slots, expert_parallel=is_measured
    )
    for config in found:
        refusal = shape_refusal(spec, config, num_gpus)
        estimate = estimator.estimate(config, options.workload) if refusal is None else None
        alone = _alone(estimator, config, options) if estimate is not None else None
        candidates.append(Candidate(config, estimate, refusal or chooser.refusal(config), alone))
    return candidates


def has_slots_by_steps(
    spec: ModelSpec,
    gpu: GpuSpec,
    estimator: Estimator,
    engines: Sequence[EngineCapabilities],
    options: PlanOptions,
) -> bool:
    """Return whether the law of steps chose the slots of the configurations of :func:`space`."""
    need, chooser = slots_of(options), EngineChooser(spec, gpu, engines)
    return need is not None and chooses_by_steps(need, spec, gpu, estimator, chooser.name, options.workload)


def winner_at(
    hardware: Hardware,
    estimator: Estimator,
    options: PlanOptions,
    configs: Sequence[DeploymentConfig],
    batch: int,
    kind: IntentKind,
) -> Ranked | None:
    """Return the one of ``configs`` that is chosen at another ``batch`` or intent, all else equal; None: none is.

    Raises:
        NotMeasuredError: nothing is predicted there.
    """
    there = replace(
        options, workload=replace(options.workload, batch=batch), intent=replace(options.intent, kind=kind)
    )
    candidates = [
        Candidate(config, estimator.estimate(config, there.workload), None, _alone(estimator, config, there))
        for config in configs
    ]
    fits = FitsOn(hardware, there)
    return best_of(candidates, there.replica_intent, fits=fits, prices=prices_of(hardware.gpu))


def prices_of(gpu: GpuSpec) -> Prices:
    return Prices(usd_per_gpu_hour=gpu.price_usd_per_gpu_hour)


@dataclass(frozen=True, slots=True)
class _Everywhere:
    layers_per_stage: tuple[int, ...] = ()


def ranked_anywhere(candidates: Sequence[Candidate], options: PlanOptions, gpu: GpuSpec) -> Plan:
    """Return the plan of ``candidates`` as if all had room, on idle GPUs."""
    return rank(candidates, options.replica_intent, fits=lambda _: _Everywhere(), prices=prices_of(gpu))


def _alone(estimator: Estimator, config: DeploymentConfig, options: PlanOptions) -> Estimate | None:
    """Return what one request takes by itself, which matters where requests arrive at a rate."""
    return None if options.intent.rate_per_s is None else alone_of(estimator, config, options.workload)


def alone_of(estimator: Estimator, config: DeploymentConfig, work: Workload) -> Estimate | None:
    """Return what one request of ``work`` takes by itself; None where that is not known, or the work itself."""
    if work.batch == 1:
        return None
    try:
        return estimator.estimate(config, replace(work, batch=1))
    except NotMeasuredError:
        return None


def check_context(spec: ModelSpec, workload: Workload) -> None:
    """Raise ConfigError if the workload is longer than the model's context."""
    if workload.longest_tokens > spec.max_context_tokens:
        raise ConfigError(
            f"requests of {workload.longest_tokens} tokens are longer than the model's context of "
            f"{spec.max_context_tokens}; lower --context"
        )
    if workload.context_tokens > spec.max_context_tokens:
        raise ConfigError(
            f"{workload.input_words} input and {workload.output_tokens} output tokens are "
            f"{workload.context_tokens} together, the model's context is {spec.max_context_tokens}; "
            f"lower --input-tokens or --output-tokens{' or --images' * (workload.images > 0)}"
        )


class EngineChooser:
    """Choice of the engine for a configuration, what that takes, and what every engine says when none runs it."""

    def __init__(self, spec: ModelSpec, gpu: GpuSpec, engines: Sequence[EngineCapabilities]) -> None:
        self._spec, self._gpu, self._engines = spec, gpu, engines

    def name(self, config: DeploymentConfig) -> str:
        able = (e.engine for e in self._engines if e.refusal(self._spec, config, self._gpu) is None)
        return next(able, self._engines[0].engine)

    def refusal(self, config: DeploymentConfig) -> str | None:
        reasons = [engine.refusal(self._spec, config, self._gpu) for engine in self._engines]
        if any(reason is None for reason in reasons):
            return None
        return "; ".join(dict.fromkeys(str(reason) for reason in reasons))

    def conditions(self, config: DeploymentConfig) -> tuple[str, ...]:
        """Return what running ``config`` takes on the engine it names, and whether it was run there."""
        table = next(engine for engine in self._engines if engine.engine == config.engine)
        unseen = table.unseen(self._spec, config, self._gpu)
        return (*table.conditions(self._spec, config, self._gpu), *(() if unseen is None else (unseen,)))


def placements_of(layout: Layout) -> tuple[Placement, ...]:
    """Return one placement for each replica."""
    if isinstance(layout, Replicas):
        return layout.placements
    assert isinstance(layout, Placement), "every place is one of placement's"
    return (layout,)


class FitsOn:
    """Answers of a placement policy on one snapshot: where an estimate's replicas go, at the upper end of the
    memory's interval (``planner.rank.Fits``)."""

    def __init__(self, hardware: Hardware, options: PlanOptions) -> None:
        def placer_on(snapshot: ClusterSnapshot) -> FindsPlaces:
            threshold, link_group_size = options.load_threshold, hardware.gpu.link_group_size
            return make_placer(options.policy, snapshot, threshold=threshold, link_group_size=link_group_size)

        snapshot, replicas = hardware.snapshot, options.replicas
        self._largest_bytes = max((gpu.total_bytes for gpu in snapshot.gpus), default=0)
        self._placer = placer_on(snapshot) if replicas == 1 else ReplicaPlacer(snapshot, replicas, placer_on)

    def __call__(self, estimate: Estimate) -> Placement | Replicas | NoRoom:
        needed = demand(estimate.memory)
        answer = self._placer.fit(needed)
        if isinstance(answer, Refusal):
            too_large = needed.total_bytes > needed.pp * self._largest_bytes
            return NoRoom(answer.reason, answer.shortfall_bytes, answer.missing_gpus, answer.device, too_large)
        return answer


def with_more(hardware: Hardware, count: int) -> Hardware:
    """Return the same hardware and ``count`` more idle devices of the largest size there is, on the first node."""
    gpus = hardware.snapshot.gpus
    largest = max(gpus, key=lambda gpu: gpu.total_bytes)
    last = max(gpu.gpu_index for gpu in gpus)
    more = tuple(
        GpuState(
            device_id=f"what-if:{i}",
            node_id=largest.node_id,
            gpu_index=last + 1 + i,
            total_bytes=largest.total_bytes,
            free_bytes=largest.total_bytes,
        )
        for i in range(count)
    )
    return Hardware(label=hardware.label, gpu=hardware.gpu, snapshot=ClusterSnapshot(gpus + more))
