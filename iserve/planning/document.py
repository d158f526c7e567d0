"""The plan as it leaves iServe: the JSON of ``iserve plan --json`` and of the REST API."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fingerprint.config import DeploymentConfig, KvFormat, Workload, even_split
from fingerprint.estimates import Correction, Estimate, Quantity, Source
from fingerprint.measurements import Profile, Unreached
from iserve.planning.verdict import VerdictDocument
from iserve.planning.words import device_kind
from planner.costs import total_bytes
from planner.intent import Intent
from planner.moving_rate import Level, moving_rate
from planner.plan import PassedOver, Plan, Ranked, RefusedFor, Served, WhyNot

__all__ = [
    "BetterDocument",
    "CandidateDocument",
    "CapacityBound",
    "CapacityDocument",
    "ChangeDocument",
    "EstimateDocument",
    "ExpectedDocument",
    "NearestDocument",
    "PassedOverDocument",
    "PlanDocument",
    "ProfileDocument",
    "RelaxationDocument",
    "ServedDocument",
    "TogetherDocument",
    "WhyNotDocument",
    "estimate_document",
    "plan_document",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateDocument:
    memory_bytes_per_gpu: int  # of the fullest GPU
    memory_bytes_total: int
    cost: float | None  # per request, in the plan's cost_unit
    ttft_s: Quantity
    tpot_s: Quantity
    e2e_s: Quantity
    correction: Correction | None = None  # that `iserve verify` made, included in the figures
    rests_on: DeploymentConfig | None = None  # whose measured times these come from; None: datasheets alone


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateDocument:
    config: DeploymentConfig
    estimate: EstimateDocument | None
    objective: float | None  # in the plan's objective_unit
    feasible: bool
    reason: str | None  # why it is refused
    layers_per_stage: tuple[int, ...] | None = None  # where it fits
    conditions: tuple[
        str, ...
    ] = ()  # what running it takes in addition to the GPUs: an engine flow, a prepared checkpoint
    miss_probability: float | None = None  # of the SLO's tightest limit, with a rate
    utilisation: float | None = None  # with a rate
    slowdown: float = 1.0  # by what runs on its GPUs; in the cost, the objective and the limits, not in the times
    measured: bool = False  # this configuration was run; False: estimated from others, or from datasheets
    objective_low: float | None = None  # the 90% interval, where it is feasible
    objective_high: float | None = None
    refused_for: RefusedFor | None = None  # the kind of its first reason; None: it is feasible
    # What it is ranked by: the objective, with what other deployments lose by it where a latency counts that.
    ranked_by: float | None = None
    ranked_low: float | None = None  # the 90% interval of ``ranked_by``, where it is feasible
    ranked_high: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedOverDocument:
    """Feasible and better by its value than the chosen one, but not measured."""

    config: DeploymentConfig
    objective: float | None
    objective_low: float | None
    objective_high: float | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileDocument:
    """The profile behind a plan. ``unreached``: what its budget ended before, whose estimates are scaled from what
    was run, or have wider intervals."""

    created_at: str
    budget_s: float
    spent_s: float
    unreached: tuple[Unreached, ...] = ()

    @property
    def cut_short(self) -> bool:
        return bool(self.unreached)


@dataclass(frozen=True, kw_only=True, slots=True)
class BetterDocument:
    config: DeploymentConfig
    objective: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NearestDocument:
    config: DeploymentConfig
    objective: float | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RelaxationDocument:
    limit: str
    allowed: float
    needed: float
    config: DeploymentConfig
    objective: float | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeDocument:
    limit: str
    allowed: float
    needed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TogetherDocument:
    changes: tuple[ChangeDocument, ...]
    config: DeploymentConfig
    objective: float | None
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNotDocument:
    """``better``: refused candidates that rank above the chosen one; the rest only when nothing is feasible.

    Each of ``relax`` is enough alone. ``relax_together`` is what ``nearest`` takes where that is several limits at
    once, all of which it takes.
    """

    better: tuple[BetterDocument, ...]
    nearest: NearestDocument | None
    relax: tuple[RelaxationDocument, ...]
    relax_together: TogetherDocument | None = None  # also of plans stored before it was recorded

    @property
    def advice(self) -> tuple[str, ...]:
        """Every way out in words, those of one limit first."""
        together = () if self.relax_together is None else (self.relax_together.text,)
        return (*(relaxation.text for relaxation in self.relax), *together)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedDocument:
    quantile_s: float | None  # that the percentile of the requests do not exceed; None: too many wait without end
    limit_s: float | None
    miss_probability: float | None  # None without a limit


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedDocument:
    """Times of one replica under its share of the rate, the estimates' intervals taken into account."""

    rate_per_s: float
    percentile: float
    burstiness: float  # coefficient of variation of the gaps between arrivals
    input_cv: float
    output_cv: float
    utilisation: float
    highest_rate_per_s: float  # that keeps the SLO or, without one, is served
    miss_probability: float | None  # of the tightest limit; a request that misses any is at least as likely
    ttft: ExpectedDocument
    tpot: ExpectedDocument
    e2e: ExpectedDocument
    rate_levels: tuple[Level, ...] = ()  # between which the rate moves: shares of the requests, rate over its mean


class CapacityBound(StrEnum):
    """Reason why a worker is started for no more requests, or no longer ones."""

    GIVEN = "given"  # both sizes were given
    INTENT = "intent"  # min-memory
    RATE = "rate"  # requests at once are those that the rate was judged with
    MEMORY = "memory"
    NOT_MEASURED = "not-measured"  # nothing was measured that tells the memory of more
    LARGEST = "largest"  # the most that workers are started for


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityDocument:
    """Limits of each worker of the chosen configuration, and the memory that they take."""

    requests_at_once: int
    context_tokens: int  # of one request, prompt and answer together
    kv_tokens: int  # of the KV cache, over all requests
    memory_bytes_per_gpu: int  # promised on the fullest GPU
    bound: CapacityBound | None = None  # None: of a plan stored before it was recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDocument:
    model: str
    intent: str
    hardware: str
    workload: Workload
    objective_unit: str
    cost_unit: str
    queueing: str | None  # the model of waiting that was used, with a rate
    candidates: tuple[CandidateDocument, ...]
    chosen: int | None
    why_not: WhyNotDocument
    notes: tuple[str, ...] = ()  # on the plan as a whole: engines passed over, profiles that are not used
    served: ServedDocument | None = None  # what the chosen one gives under the rate
    replicas: int = 1  # of the chosen one; figures are of one, the verdict's rates and the rates of advice of all
    alone: EstimateDocument | None = (
        None  # of the chosen one, a request by itself; None: not estimated, or batch is 1
    )
    passed_over: tuple[PassedOverDocument, ...] = ()  # better by their values, and not measured; best first
    indistinguishable: tuple[
        int, ...
    ] = ()  # indices of candidates whose ranked_low..ranked_high overlap the chosen one's
    profile: ProfileDocument | None = None  # None: nothing was measured
    verdict: VerdictDocument | None = None  # None: of a plan stored before verdicts were made
    capacity: CapacityDocument | None = None  # of each worker of the chosen one; the figures are of ``workload``


def estimate_document(
    estimate: Estimate, *, cost: float | None, layers_per_stage: tuple[int, ...] | None = None
) -> EstimateDocument:
    """Return the document of an estimate; ``layers_per_stage``: the placement's split, else the even one."""
    memory = estimate.memory
    split = layers_per_stage or even_split(memory.num_layers, memory.pp)
    return EstimateDocument(
        memory_bytes_per_gpu=memory.per_gpu_bytes(split),
        memory_bytes_total=total_bytes(memory),
        cost=cost,
        ttft_s=estimate.ttft_s,
        tpot_s=estimate.tpot_s,
        e2e_s=estimate.e2e_s,
        correction=estimate.correction,
        rests_on=estimate.rests_on,
    )


def _no_conditions(config: DeploymentConfig) -> tuple[str, ...]:
    return ()


def _candidate(ranked: Ranked, conditions_of: Callable[[DeploymentConfig], tuple[str, ...]]) -> CandidateDocument:
    split = None if ranked.layout is None else ranked.layout.layers_per_stage
    low, high = ranked.interval or (None, None)
    ranked_low, ranked_high = ranked.weight_interval or (None, None)
    return CandidateDocument(
        config=ranked.config,
        estimate=None
        if ranked.estimate is None
        else estimate_document(ranked.estimate, cost=ranked.cost, layers_per_stage=split),
        objective=ranked.objective,
        feasible=ranked.feasible,
        reason=ranked.reason,
        layers_per_stage=split,
        conditions=() if ranked.refusal is not None else conditions_of(ranked.config),
        miss_probability=ranked.risk,
        utilisation=ranked.utilisation,
        slowdown=ranked.slowdown,
        measured=ranked.is_measured,
        objective_low=low,
        objective_high=high,
        refused_for=ranked.refused_for,
        ranked_by=ranked.weight,
        ranked_low=ranked_low,
        ranked_high=ranked_high,
    )


def plan_document(
    plan: Plan,
    *,
    model: str,
    hardware: str,
    workload: Workload,
    conditions_of: Callable[[DeploymentConfig], tuple[str, ...]] = _no_conditions,
    notes: tuple[str, ...] = (),
    replicas: int = 1,
    alone: Estimate | None = None,
    profile: Profile | None = None,
    verdict: VerdictDocument | None = None,
    capacity: CapacityDocument | None = None,
) -> PlanDocument:
    """Return the document of ``plan``; ``conditions_of`` is asked of what can run at all
    (``iserve.planning.making``).
    """
    return PlanDocument(
        model=model,
        intent=str(plan.intent.kind),
        hardware=hardware,
        workload=workload,
        objective_unit=plan.objective_unit,
        cost_unit=plan.cost_unit,
        queueing=plan.queueing,
        candidates=tuple(_candidate(ranked, conditions_of) for ranked in plan.candidates),
        chosen=plan.chosen,
        why_not=_why_not(plan.why_not),
        notes=(
            *notes,
            *_cut_short(profile),
            *_at_one_length(plan, profile),
            *_less_sure(plan),
            *_replicated(plan.intent, replicas),
            *_beside(plan, device_kind(hardware)),
        ),
        served=None if plan.served is None else _served(plan.served, plan.intent),
        replicas=replicas,
        alone=None if alone is None else estimate_document(alone, cost=None),
        passed_over=tuple(map(_passed_over, plan.passed_over)),
        indistinguishable=plan.indistinguishable,
        profile=None if profile is None else _profile(profile),
        verdict=verdict,
        capacity=capacity,
    )


def _passed_over(one: PassedOver) -> PassedOverDocument:
    low, high = one.ranked.interval or (None, None)
    return PassedOverDocument(
        config=one.ranked.config,
        objective=one.ranked.objective,
        objective_low=low,
        objective_high=high,
        reason=one.reason,
    )


def _profile(profile: Profile) -> ProfileDocument:
    return ProfileDocument(
        created_at=profile.created_at,
        budget_s=profile.budget_s,
        spent_s=profile.spent_s,
        unreached=profile.unreached,
    )


def _cut_short(profile: Profile | None) -> tuple[str, ...]:
    """Return what the profile did not reach, and what measures it."""
    if profile is None or not profile.unreached:
        return ()
    run = {(point.tp, point.pp, point.weights, point.kv) for point in profile.timing}
    gaps = [gap.config for gap in profile.unreached]
    partly = [config for config in gaps if (config.tp, config.pp, config.weights, config.kv) in run]
    never = [config for config in gaps if config not in partly]
    parts = [
        f"{', '.join(map(_named, configs))} {how}"
        for configs, how in (
            (never, "not measured"),
            (partly, "measured at some points only, or fewer times than planned"),
        )
        if configs
    ]
    return (
        f"the profile was cut short, its budget of {profile.budget_s:g} s ended first: {', and '.join(parts)}; "
        "`iserve profile` with more --max-seconds measures the rest",
    )


def _at_one_length(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """Return why configurations that were run have scaled times: at one prompt length only, as a profile runs
    split models, they do not tell what a longer context costs."""
    lengths: dict[tuple[object, ...], set[int]] = {}
    for point in () if profile is None else profile.timing:
        lengths.setdefault((point.tp, point.pp, point.weights, point.kv), set()).add(point.input_tokens)
    named: dict[str, int] = {}
    for estimate in (ranked.estimate for ranked in plan.candidates):
        if estimate is None or Source.SCALED not in (estimate.ttft_s.source, estimate.tpot_s.source):
            continue
        config = estimate.config
        run_at = lengths.get((config.tp, config.pp, config.weights, config.kv), set())
        if estimate.rests_on == config and len(run_at) == 1:
            named[_named(config)] = min(run_at)
    at = {tokens: [name for name in named if named[name] == tokens] for tokens in sorted(set(named.values()))}
    return tuple(
        f"{', '.join(names)}: run at one prompt length only ({tokens} tokens), so that times at other context "
        "lengths are scaled from there (s)"
        for tokens, names in at.items()
    )


def _named(config: DeploymentConfig) -> str:
    """Return the name of ``config`` that a profile's notes use."""
    kv = "" if config.kv is KvFormat.BITS16 else f" kv={config.kv}"
    return f"tp={config.tp} pp={config.pp} {config.weights}{kv}"


def _less_sure(plan: Plan) -> tuple[str, ...]:
    """Return what is better than the chosen one by its estimate, and was not measured."""
    if not plan.passed_over:
        return ()
    first, more = plan.passed_over[0].reason, len(plan.passed_over) - 1
    return (
        first
        if not more
        else f"{first}; passed over likewise: {more} more that {'was' if more == 1 else 'were'} not measured",
    )


def _replicated(intent: Intent, replicas: int) -> tuple[str, ...]:
    """Return what the figures are of, where there are several replicas."""
    if replicas == 1:
        return ()
    share = f" at its share of the rate, {intent.rate_per_s:.4g} requests/s" if intent.rate_per_s else ""
    return (f"{replicas} replicas, each on devices of its own; the table's figures are of one{share}",)


def _beside(plan: Plan, device: str) -> tuple[str, ...]:
    """Return what the load of the devices, GPUs or CPU devices, has to do with the choice."""
    notes = [] if plan.better_idle is None else [plan.better_idle.text]
    if plan.room is not None and plan.best is not None:
        notes.append(plan.room.text(plan.best.config))
    if plan.best is not None and plan.best.slowdown > 1:
        times = f"{plan.best.slowdown:.3g} times as slow"
        notes.append(
            f"its {device}s are busy: with what runs there now {plan.best.config} is {times}; its cost, objective "
            f"and limits are judged so, TTFT, TPOT and E2E are listed as on idle {device}s"
        )
    return tuple(notes)


def _served(served: Served, intent: Intent) -> ServedDocument:
    times = {
        time.metric: ExpectedDocument(
            quantile_s=time.quantile_s if math.isfinite(time.quantile_s) else None,
            limit_s=time.limit_s,
            miss_probability=time.risk,
        )
        for time in served.times
    }
    return ServedDocument(
        rate_per_s=served.rate_per_s,
        percentile=intent.percentile,
        burstiness=intent.traffic.burstiness,
        input_cv=intent.traffic.input_cv,
        output_cv=intent.traffic.output_cv,
        rate_levels=moving_rate(intent.traffic.rates).levels if intent.traffic.rates else (),
        utilisation=served.utilisation,
        highest_rate_per_s=served.highest_rate_per_s,
        miss_probability=served.risk,
        ttft=times["ttft"],
        tpot=times["tpot"],
        e2e=times["e2e"],
    )


def _why_not(why: WhyNot) -> WhyNotDocument:
    nearest, together = why.nearest, why.together
    return WhyNotDocument(
        better=tuple(BetterDocument(config=b.config, objective=b.objective, reason=b.reason) for b in why.better),
        nearest=None
        if nearest is None
        else NearestDocument(config=nearest.config, objective=nearest.objective, text=nearest.text),
        relax=tuple(
            RelaxationDocument(
                limit=str(r.limit),
                allowed=r.allowed,
                needed=r.needed,
                config=r.config,
                objective=r.objective,
                text=r.text,
            )
            for r in why.relaxations
        ),
        relax_together=None
        if together is None
        else TogetherDocument(
            changes=tuple(
                ChangeDocument(limit=str(c.limit), allowed=c.allowed, needed=c.needed) for c in together.changes
            ),
            config=together.config,
            objective=together.objective,
            text=together.text,
        ),
    )
