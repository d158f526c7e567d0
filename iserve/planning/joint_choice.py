"""Joint choice of configuration, replicas, KV room and GPUs of one deployment, by what will be seen under load.

What runs stays as it is and counts as neighbours (``placement.fleet``). Of each number of GPUs the best
configuration that keeps every limit by itself is an option. Pipelines where no narrower TP fits, and n-gram drafts
whose acceptance is known, are options where they are faster on as many GPUs. CPUs, engines with slots, and intents
that are not about load are left to the ranking of one batch (:mod:`planner.rank`) and a placement policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from fingerprint.cache_blocks import CacheRoom, cache_bytes
from fingerprint.config import DeploymentConfig, even_split
from fingerprint.engines import traits_of
from fingerprint.errors import InfeasibleError, NotMeasuredError
from fingerprint.estimates import Estimate, Estimator
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS
from fingerprint.model_spec import ModelSpec
from fingerprint.service_model import LARGEST_BATCH, ServiceModel, service_model
from iserve.planning.document import JointForecast
from iserve.planning.pipeline import Hardware, PlanOptions
from placement.fleet.load import UTILISATIONS, Loads
from placement.fleet.objective import Judged, held_gpus
from placement.fleet.running import RunningFleet, running_fleet
from placement.fleet.search import FleetChoice, choose
from placement.fleet.types import Fleet, FleetDeployment, FleetGoal
from placement.replicas import Replicas
from placement.types import ClusterSnapshot, Placement, StagePlacement
from planner.intent import MAX_REPLICAS, IntentKind

__all__ = [
    "ExpectedModel",
    "JointChoice",
    "JointQuestion",
    "JointReplica",
    "expected_model",
    "joint_choice",
    "limits_answers",
]

_USABLE_FRACTION = 0.93  # of a GPU's memory; a worker is promised 2% more than its estimate
_LONGEST_TOKENS = 32_768  # of the request for which there is room in any case, where no --context says
_SERVED_TOKENS = 131_072  # of one request, likewise, where the KV cache holds it
_PARTLY_EMPTY_TOKENS = 32  # of each request: two pages of vLLM
_MOST_GPUS = 32  # that are looked at
_UNKNOWN_FRACTION = 0.02  # of a GPU's memory: less that nothing is known of is the driver's own
_COMPARED_BATCHES = (1, 32, LARGEST_BATCH)  # of a pipeline with TP, and of steps with drafts with those without
_TIE = 1.02  # times the time of a pipeline or with drafts, up to which TP without is preferred
_BROKEN = 1e-9  # score of promises that a plan does not keep, above rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedModel:
    """Model that is still to be deployed: its options, one for each number of GPUs, and its rate where known."""

    name: str
    services: tuple[ServiceModel, ...]
    rate_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JointQuestion:
    """Question of one more deployment: which model, where, by which times, and as it is asked for.

    Attributes:
        estimates: of the configurations that keep every limit, the best first.
        services: service models that were made before, by configuration, for a caller that decides often; new
            ones are added.
        expected: models that are to be deployed next, for which the plan leaves the places that suit all best.
    """

    estimates: Sequence[Estimate]
    spec: ModelSpec
    hardware: Hardware
    estimator: Estimator
    options: PlanOptions
    services: dict[DeploymentConfig, ServiceModel] = field(default_factory=dict)
    expected: Sequence[ExpectedModel] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JointReplica:
    """Replica of a joint choice: its stages with the memory that they reserve, and its KV cache."""

    placement: Placement
    kv_tokens: int
    requests_at_once: int


@dataclass(frozen=True, kw_only=True, slots=True)
class JointChoice:
    """Joint choice for one deployment."""

    config: DeploymentConfig
    replicas: tuple[JointReplica, ...]
    goal: FleetGoal
    rate_per_s: float | None  # of all replicas; None: the prior's utilisations
    neighbours: int  # deployments that run
    neighbour_rates: int  # of those, with a known rate
    forecast: JointForecast
    rule: JointForecast  # of the plan of the rule, at the same loads
    service: ServiceModel
    context_tokens: int  # longest request that is taken
    unplaced: int  # deployments that are to follow and find no room

    @property
    def is_rule(self) -> bool:
        return self.rule == self.forecast

    @property
    def utilisations(self) -> tuple[float, ...]:
        """Utilisations of the prior; empty where the rate is known."""
        return () if self.rate_per_s is not None else UTILISATIONS

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(replica.placement for replica in self.replicas)

    @property
    def layout(self) -> Placement | Replicas:
        return self.placements[0] if len(self.replicas) == 1 else Replicas(self.placements)


def expected_model(
    name: str,
    estimates: Sequence[Estimate],
    spec: ModelSpec,
    estimator: Estimator,
    options: PlanOptions,
    *,
    gpu_bytes: int,
) -> ExpectedModel | None:
    """Return a model as a joint plan expects it, were it deployed with ``options``; None: it has no option.

    Args:
        estimates: of the configurations that keep every limit, the best first.
        gpu_bytes: memory of each GPU.
    """
    longest = options.workload.context_tokens

    def made(configs: Sequence[DeploymentConfig]) -> list[ServiceModel]:
        return [_service(config, spec, estimator, options, longest) for config in configs]

    plain, further = _by_kind(estimates, gpu_bytes)
    try:
        services = tuple(_worth_choosing(made(plain), made(further)))
    except NotMeasuredError:
        return None
    return ExpectedModel(name=name, services=services, rate_per_s=options.intent.rate_per_s) if services else None


def joint_choice(asked: JointQuestion, goal: FleetGoal | None = None) -> JointChoice | None:
    """Return the choice for one more deployment; None: no option fits there.

    Args:
        goal: None: that of the intent.
    """
    spec, options, made = asked.spec, asked.options, asked.services
    planned = options.workload.context_tokens
    tried = (min(spec.max_context_tokens, max(planned, _LONGEST_TOKENS)), planned)
    plain, further = _by_kind(asked.estimates, max(gpu.total_bytes for gpu in asked.hardware.snapshot.gpus))

    def services(configs: Sequence[DeploymentConfig], longest: int) -> list[ServiceModel]:
        for config in configs:
            if config not in made or made[config].longest_tokens != longest:
                made[config] = _service(config, spec, asked.estimator, options, longest)
        return [made[config] for config in configs]

    for longest in tried if options.longer_requests else (planned,):
        try:
            found = _worth_choosing(services(plain, longest), services(further, longest))
        except NotMeasuredError:
            return None
        choice = _chosen(asked, tuple(found), goal or _goal(options)) if found else None
        if choice is not None:
            return choice
    return None


def _by_kind(
    estimates: Sequence[Estimate], gpu_bytes: float
) -> tuple[list[DeploymentConfig], list[DeploymentConfig]]:
    """Return the best of each number of GPUs: of one stage without drafts, and of what else is worth a look.

    That is each number of draft tokens, and pipelines of narrower TP than the narrowest of one stage that an empty
    GPU of ``gpu_bytes`` holds: where that fits, replicas of it serve more.
    """
    of_one_stage: dict[int, list[Estimate]] = {0: []}
    for one in estimates:
        if one.config.pp == 1:
            of_one_stage.setdefault(one.config.draft_tokens, []).append(one)
    plain, *drafting = (_best_of_each_size(of_one_stage[tokens]) for tokens in sorted(of_one_stage))
    narrowest = next((one.config.tp for one in plain if _is_held_by(gpu_bytes, one)), math.inf)
    narrower = () if narrowest == 1 else estimates
    pipelines = _best_of_each_size(one for one in narrower if one.config.pp > 1 and one.config.tp < narrowest)
    further = [*chain.from_iterable(drafting), *(one for one in pipelines if _is_held_by(gpu_bytes, one))]
    return [one.config for one in plain], [one.config for one in further]


def _is_held_by(gpu_bytes: float, estimate: Estimate) -> bool:
    """Return whether an empty GPU of ``gpu_bytes`` holds the fullest stage."""
    memory = estimate.memory
    stages = memory.stages(even_split(memory.num_layers, memory.pp))
    return max(stage.total_bytes for stage in stages) * (1 + memory.relative_error) <= _USABLE_FRACTION * gpu_bytes


def _worth_choosing(plain: Sequence[ServiceModel], further: Sequence[ServiceModel]) -> list[ServiceModel]:
    """Return ``plain``, and each of ``further`` that is faster than those and than the ones of its size before."""
    found: list[ServiceModel] = []
    for one in further:
        rivals = [*plain, *(other for other in found if other.num_gpus == one.num_gpus)]
        if not any(_is_as_good(other, one) for other in rivals):
            found.append(one)
    return [*plain, *found]


def _is_as_good(plain: ServiceModel, further: ServiceModel) -> bool:
    """Return whether ``plain`` takes no more GPUs, and no more time alone and in a batch, within 2%."""
    return plain.num_gpus <= further.num_gpus and all(
        plain.request_s(batch) <= _TIE * further.request_s(batch) for batch in _COMPARED_BATCHES
    )


def _best_of_each_size(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Return one estimate for each number of GPUs, the first that was run, else the first."""
    found: dict[int, Estimate] = {}
    for estimate in estimates:
        size = estimate.config.num_gpus
        if size not in found or (estimate.is_measured and not found[size].is_measured):
            found[size] = estimate
    return [found[size] for size in sorted(found)]


def _service(
    config: DeploymentConfig, spec: ModelSpec, estimator: Estimator, options: PlanOptions, longest_tokens: int
) -> ServiceModel:
    served = max(longest_tokens, _SERVED_TOKENS) if options.longer_requests else longest_tokens
    largest = LARGEST_BATCH if options.more_requests else min(LARGEST_BATCH, options.workload.batch)
    if not options.more_requests:  # the batch that was given has room
        usual = options.workload.input_tokens + options.workload.output_tokens
        longest_tokens = max(longest_tokens, largest * usual)
    found = service_model(
        estimator,
        config,
        replace(options.workload, batch=1, longest_tokens=0),
        longest_tokens=longest_tokens,
        served_tokens=min(spec.max_context_tokens, served),
        largest_batch=largest,
    )
    pages_bytes = _pages_bytes(found, spec)
    return replace(found, fixed_bytes=found.fixed_bytes + pages_bytes, experts_read_by=spec.experts_read_by)


def _pages_bytes(option: ServiceModel, spec: ModelSpec) -> int:
    """Return what caches take for the largest batch beyond their tokens: pages that are partly empty.

    Of a model with states, which take room for every request, it is 0 unless the batch was given: as many run at
    once as have room.
    """
    if spec.keeps_state and option.longest_tokens < option.largest_batch * option.mean_tokens:
        return 0
    full = _cache_bytes(option, spec, option.largest_batch, option.longest_tokens)
    return max(0, math.ceil(full - option.longest_tokens * option.kv_bytes_per_token))


def _chosen(asked: JointQuestion, services: tuple[ServiceModel, ...], goal: FleetGoal) -> JointChoice | None:
    """Return the best plan with one option for each of ``services``; the fastest, where no plan keeps the SLO."""
    options, hardware, expected = asked.options, asked.hardware, asked.expected
    first = 1 + len(expected)
    running = running_fleet(_near(hardware.snapshot), usable_fraction=_USABLE_FRACTION, first=first)
    in_all = max(options.expect, first + len(running.deployments)) if expected else options.expect
    new = FleetDeployment(
        name="",
        options=services,
        limit_s=None if goal is FleetGoal.LATENCY else _limit_s(options, services[0]),
        least_replicas=1 if options.more_replicas else options.replicas,
        most_replicas=_most_replicas(options, is_told=in_all > 0),
    )
    named = (FleetDeployment(name=one.name, options=one.services) for one in expected)
    fleet = Fleet(
        deployments=(new, *named, *running.deployments),
        gpus=running.gpus,
        expected=in_all,
        group_loss=options.group_loss,
    )
    least = fleet.least(0).num_gpus
    if in_all:
        needed = sum(fleet.least(number).num_gpus for number in range(first))
        fleet = replace(fleet, reserved=_reserved(running, in_all - len(fleet.deployments), needed))
    else:
        fleet = replace(fleet, loaded_gpus=min(len(running.gpus), least + len(_of_running(running))))
    rate = options.intent.rate_per_s
    rates = (rate, *(one.rate_per_s for one in expected), *running.rates_per_s)
    try:
        choice = choose(fleet, goal, rates, burstiness=options.intent.traffic.burstiness)
    except InfeasibleError:
        if not in_all:
            return None
        return _chosen(replace(asked, options=replace(options, expect=0), expected=()), services, goal)
    if len(choice.chosen.plan.of(0)) < new.least_replicas:
        return None
    is_broken, is_overloaded = choice.chosen.score[0] > _BROKEN, rate is not None and _is_overloaded(choice)
    if goal is not FleetGoal.LATENCY and is_broken and (new.limit_s is not None or is_overloaded):
        return _chosen(asked, services, FleetGoal.LATENCY)
    if is_overloaded:
        choice = replace(choice, chosen=choice.fullest)
    return _as_choice(choice, fleet, goal, rate, running.rates_per_s, asked.spec, options)


def _is_overloaded(choice: FleetChoice) -> bool:
    """Return whether the chosen plan does not serve the mean rate."""
    return choice.utilisation(choice.chosen) > 1


def _as_choice(
    choice: FleetChoice,
    fleet: Fleet,
    goal: FleetGoal,
    rate_per_s: float | None,
    neighbour_rates: Sequence[float | None],
    spec: ModelSpec,
    options: PlanOptions,
) -> JointChoice:
    chosen = choice.chosen
    rows = [row for row, replica in enumerate(chosen.plan.replicas) if replica.deployment == 0]
    service = fleet.option(chosen.plan.replicas[rows[0]])
    replicas = tuple(_replica(fleet, chosen, row, spec) for row in rows)
    context = options.workload.context_tokens
    if options.longer_requests:
        most = min(spec.max_context_tokens, _SERVED_TOKENS)
        kept = most if not spec.keeps_tokens else min(replica.kv_tokens for replica in replicas)
        context = max(context, min(most, kept))
    return JointChoice(
        config=service.config,
        replicas=replicas,
        goal=goal,
        rate_per_s=rate_per_s,
        neighbours=len(neighbour_rates),
        neighbour_rates=sum(rate is not None for rate in neighbour_rates),
        forecast=_forecast(fleet, chosen, choice.loads),
        rule=_forecast(fleet, choice.rule, choice.loads),
        service=service,
        context_tokens=context,
        unplaced=chosen.room.unplaced,
    )


def _most_replicas(options: PlanOptions, *, is_told: bool) -> int:
    """Return the largest number of replicas: as given, else any where the rate or all deployments are known.

    Args:
        is_told: the deployments that the cluster is to hold are known.
    """
    if not options.more_replicas:
        return options.replicas
    is_known = options.intent.rate_per_s is not None
    if not is_known and options.intent.kind is IntentKind.MIN_GPU_HOURS:
        return 1
    return MAX_REPLICAS if is_known or is_told else 1


def _goal(options: PlanOptions) -> FleetGoal:
    """Return the goal: of an SLO it is cost, with the SLO as the promise."""
    match options.intent.kind:
        case IntentKind.MIN_GPU_HOURS:
            return FleetGoal.GPUS
        case IntentKind.MIN_COST | IntentKind.LATENCY_SLO:
            return FleetGoal.COST
        case _:
            return FleetGoal.LATENCY


def limits_answers(options: PlanOptions) -> bool:
    """Return whether the SLO limits more than the first token, of which a forecast has no time of its own."""
    slo = options.intent.slo
    return slo is not None and (slo.e2e_s is not None or slo.tpot_s is not None)


def _limit_s(options: PlanOptions, service: ServiceModel) -> float | None:
    """Return the end-to-end time within which a mean request keeps the SLO; None: no SLO limits its answer."""
    slo = options.intent.slo
    if slo is None or not limits_answers(options):
        return None
    first_s = slo.ttft_s or 2 * service.prompt_s
    by_steps = math.inf if slo.tpot_s is None else first_s + (service.output_tokens - 1) * slo.tpot_s
    return min(slo.e2e_s or math.inf, by_steps)


def _near(snapshot: ClusterSnapshot) -> ClusterSnapshot:
    """Return the nodes with the most free memory, up to ``_MOST_GPUS`` GPUs of a large cluster."""
    if len(snapshot.gpus) <= _MOST_GPUS:
        return snapshot
    free, sizes = Counter[str](), Counter[str]()
    for gpu in snapshot.gpus:
        free[gpu.node_id] += gpu.free_bytes
        sizes[gpu.node_id] += 1
    kept, num = set[str](), 0
    for node in sorted(free, key=lambda node: (-free[node], node)):
        if num and num + sizes[node] > _MOST_GPUS:
            break
        kept.add(node)
        num += sizes[node]
    return replace(snapshot, gpus=tuple(gpu for gpu in snapshot.gpus if gpu.node_id in kept))


def _reserved(running: RunningFleet, later: int, least: int) -> frozenset[int]:
    """Return idle GPUs, the last ones, for deployments still expected, where the new one can spare them."""
    idle = sorted(set(range(len(running.gpus))) - _held(running))
    spare = max(0, min(later, len(idle) - least))
    return frozenset(idle[len(idle) - spare :])


def _of_running(running: RunningFleet) -> set[int]:
    """Return the GPUs that hold a replica of what runs."""
    return {gpu for deployment in running.deployments for replica in deployment.fixed for gpu in replica.gpus}


def _held(running: RunningFleet) -> set[int]:
    """Return the GPUs that hold a replica of what runs, or memory of which nothing is known."""
    full = {
        number
        for number, gpu in enumerate(running.gpus)
        if gpu.usable_bytes < (_USABLE_FRACTION - _UNKNOWN_FRACTION) * gpu.total_bytes
    }
    return _of_running(running) | full


def _replica(fleet: Fleet, judged: Judged, row: int, spec: ModelSpec) -> JointReplica:
    replica, tokens = judged.plan.replicas[row], judged.room.kv_tokens[row]
    option, first = fleet.option(replica), fleet.gpus[replica.gpus[0]]
    at_once, kv_tokens = _launch_sizes(option, tokens, spec)
    tp, layers = option.config.tp, even_split(spec.num_layers, option.config.pp)
    stages = tuple(
        StagePlacement(
            node_id=first.node_id,
            device_ids=tuple(fleet.gpus[number].device_id for number in group),
            first_layer=sum(layers[:index]),
            num_layers=layers[index],
            bytes_per_gpu=option.bytes_per_gpu(tokens),
        )
        for index, group in enumerate(replica.gpus[at : at + tp] for at in range(0, len(replica.gpus), tp))
    )
    return JointReplica(placement=Placement(stages), kv_tokens=kv_tokens, requests_at_once=at_once)


def _launch_sizes(option: ServiceModel, tokens: float, spec: ModelSpec) -> tuple[int, int]:
    """Return the requests at once and the KV cache that an engine is started with, in memory for ``tokens``.

    Fewer run at once where states or windows would leave no room for a request of the longest kind.
    """
    at_once = max(1, int(option.batch_of(tokens))) if spec.keeps_state else option.largest_batch
    budget_bytes = option.bytes_per_gpu(tokens) - option.fixed_bytes + _pages_bytes(option, spec)
    while at_once > 1 and _cache_bytes(option, spec, at_once, option.longest_tokens) > budget_bytes:
        at_once //= 2
    low, high = option.longest_tokens, max(option.longest_tokens, int(tokens))
    while low < high:
        middle = (low + high + 1) // 2
        if _cache_bytes(option, spec, at_once, middle) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return at_once, low


def _cache_bytes(option: ServiceModel, spec: ModelSpec, at_once: int, kv_tokens: int) -> float:
    """Return what a GPU takes for the caches of ``at_once`` requests that have ``kv_tokens`` together."""
    if not traits_of(option.config.engine).has_grouped_blocks:
        return (kv_tokens + at_once * _PARTLY_EMPTY_TOKENS) * option.kv_bytes_per_token
    room = CacheRoom(sequences=at_once, kv_tokens=kv_tokens, step_tokens=DEFAULT_MAX_BATCHED_TOKENS)
    return cache_bytes(spec, option.config, even_split(spec.num_layers, option.config.pp), room)


def _forecast(fleet: Fleet, judged: Judged, loads: Loads) -> JointForecast:
    """Return what ``judged`` forecasts of the first deployment."""
    rows = [row for row, replica in enumerate(judged.plan.replicas) if replica.deployment == 0]
    option = fleet.option(judged.plan.replicas[rows[0]]) if rows else fleet.least(0)
    weights = loads.of_mean_rates
    e2e_s, used, slowed = math.inf, 0.0, 1.0
    if rows:
        e2e_s = float(weights @ judged.forecast.e2e_s[:, 0])
        used = float(weights @ judged.forecast.utilisation[:, rows].max(axis=1))
        slowed = float(weights @ judged.forecast.slowdown[:, rows].max(axis=1))
    return JointForecast(
        config=option.config,
        replicas=len(rows),
        e2e_s=e2e_s if math.isfinite(e2e_s) else None,
        utilisation=used,
        slowdown=slowed,
        gpus_held=held_gpus(fleet, loads, judged, of=0),
    )
