"""Conversion of a plan to the document that leaves iServe."""

from __future__ import annotations

import math
from collections.abc import Callable

from fingerprint.config import DeploymentConfig, Workload, even_split
from fingerprint.estimates import Estimate
from fingerprint.measurements import Profile
from iserve.planning.document import (
    BetterDocument,
    CandidateDocument,
    CapacityDocument,
    ChangeDocument,
    CombinedRelaxationDocument,
    EstimateDocument,
    LatencyForecastDocument,
    LoadForecastDocument,
    NearestDocument,
    PassedOverDocument,
    PlanDocument,
    ProfileDocument,
    RelaxationDocument,
    WhyNotDocument,
)
from iserve.planning.notes import plan_notes
from iserve.planning.verdict import VerdictDocument
from iserve.planning.words import device_kind
from planner.costs import total_bytes
from planner.intent import Intent
from planner.plan import PassedOver, Plan, Ranked, Served, WhyNot
from planner.rate_profile import moving_rate

__all__ = ["estimate_document", "plan_document"]


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
        measured_config=estimate.rests_on,
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
    """Return the document of ``plan``; ``conditions_of`` is asked of configurations that can run at all."""
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
        notes=(*notes, *plan_notes(plan, profile, replicas, device_kind(hardware))),
        load_forecast=None if plan.served is None else _served(plan.served, plan.intent),
        replicas=replicas,
        single_request=None if alone is None else estimate_document(alone, cost=None),
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


def _served(served: Served, intent: Intent) -> LoadForecastDocument:
    times = {
        time.metric: LatencyForecastDocument(
            quantile_s=time.quantile_s if math.isfinite(time.quantile_s) else None,
            limit_s=time.limit_s,
            miss_probability=time.risk,
        )
        for time in served.times
    }
    return LoadForecastDocument(
        rate_per_s=served.rate_per_s,
        percentile=intent.percentile,
        burstiness=intent.traffic.burstiness,
        input_cv=intent.traffic.input_cv,
        output_cv=intent.traffic.output_cv,
        rate_levels=moving_rate(intent.traffic.relative_rates).levels if intent.traffic.relative_rates else (),
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
        relaxations=tuple(
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
        combined_relaxation=None
        if together is None
        else CombinedRelaxationDocument(
            changes=tuple(
                ChangeDocument(limit=str(c.limit), allowed=c.allowed, needed=c.needed) for c in together.changes
            ),
            config=together.config,
            objective=together.objective,
            text=together.text,
        ),
    )
