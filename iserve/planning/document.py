"""The plan as it leaves iServe: the JSON of ``iserve plan --json`` and of the REST API."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, Workload, even_split
from fingerprint.estimates import Correction, Estimate, Quantity
from planner.costs import total_bytes
from planner.intent import Intent
from planner.moving_rate import Level, moving_rate
from planner.plan import Plan, Ranked, Served, WhyNot

__all__ = [
    "BetterDocument",
    "CandidateDocument",
    "ChangeDocument",
    "EstimateDocument",
    "ExpectedDocument",
    "NearestDocument",
    "PlanDocument",
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
    ] = ()  # what running it takes beside the GPUs: an engine flow, a prepared checkpoint
    miss_probability: float | None = None  # of the SLO's tightest limit, with a rate
    utilisation: float | None = None  # with a rate
    slowdown: float = 1.0  # by what runs on its GPUs; in the cost, the objective and the limits, not in the times


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
    relax_together: TogetherDocument | None = None  # also of plans stored before it was told

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
    """What the chosen configuration gives under the rate, the estimates' intervals taken into account."""

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
    replicas: int = 1  # of the chosen one; all figures, the rate among them, are of one
    alone: EstimateDocument | None = None  # of the chosen one, a request by itself; None: not told, or batch is 1


def estimate_document(
    estimate: Estimate, *, cost: float | None, layers_per_stage: tuple[int, ...] | None = None
) -> EstimateDocument:
    """``layers_per_stage``: the split of the placement; the even one where there is none."""
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
    )


def _no_conditions(config: DeploymentConfig) -> tuple[str, ...]:
    return ()


def _candidate(ranked: Ranked, conditions_of: Callable[[DeploymentConfig], tuple[str, ...]]) -> CandidateDocument:
    split = None if ranked.layout is None else ranked.layout.layers_per_stage
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
) -> PlanDocument:
    """The document of ``plan``; ``conditions_of`` is asked of what can run at all (``iserve.planning.making``)."""
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
        notes=(*notes, *_replicated(plan.intent, replicas), *_beside(plan)),
        served=None if plan.served is None else _served(plan.served, plan.intent),
        replicas=replicas,
        alone=None if alone is None else estimate_document(alone, cost=None),
    )


def _replicated(intent: Intent, replicas: int) -> tuple[str, ...]:
    """What the figures are of, where there are several replicas."""
    if replicas == 1:
        return ()
    share = f" at its share of the rate, {intent.rate_per_s:.4g} requests/s" if intent.rate_per_s else ""
    return (f"{replicas} replicas, each on devices of its own; all figures are of one{share}",)


def _beside(plan: Plan) -> tuple[str, ...]:
    """What the load of the GPUs has to do with the choice."""
    told = [] if plan.better_idle is None else [plan.better_idle.text]
    if plan.room is not None and plan.best is not None:
        told.append(plan.room.text(plan.best.config))
    if plan.best is not None and plan.best.slowdown > 1:
        told.append(
            f"its GPUs are busy: beside what runs there {plan.best.config} is {plan.best.slowdown:.3g} times as "
            "slow; its cost, objective and limits are judged so, TTFT, TPOT and E2E are listed as on idle GPUs"
        )
    return tuple(told)


def _served(served: Served, intent: Intent) -> ServedDocument:
    told = {
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
        ttft=told["ttft"],
        tpot=told["tpot"],
        e2e=told["e2e"],
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
