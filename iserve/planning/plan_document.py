"""Conversion of a plan to the document that leaves iServe."""

from __future__ import annotations

from collections.abc import Callable

from fingerprint.config import DeploymentConfig, Workload, even_split
from fingerprint.estimates import Estimate
from fingerprint.measurements import Profile
from iserve.api_documents import MergeAdviceDocument
from iserve.planning.document import (
    CandidateDocument,
    CapacityDocument,
    EstimateDocument,
    JointPlanDocument,
    PlanDocument,
    ProfileDocument,
)
from iserve.planning.notes import plan_notes
from iserve.planning.verdict import VerdictDocument
from planner.costs import total_bytes
from planner.plan import Plan, Ranked

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
        measured_config=estimate.measured_config,
        most_at_once=estimate.most_at_once,
        one_load=estimate.one_load,
    )


def _no_conditions(config: DeploymentConfig) -> tuple[str, ...]:
    return ()


def _candidate(ranked: Ranked, conditions_of: Callable[[DeploymentConfig], tuple[str, ...]]) -> CandidateDocument:
    split = None if ranked.layout is None else ranked.layout.layers_per_stage
    low, high = ranked.interval or (None, None)
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
        measured=ranked.is_measured,
        objective_low=low,
        objective_high=high,
        refused_for=ranked.refused_for,
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
    joint: JointPlanDocument | None = None,
    merge_advice: MergeAdviceDocument | None = None,
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
        why_not=plan.why_not,
        notes=(*notes, *plan_notes(plan, profile, replicas)),
        load_forecast=plan.served,
        replicas=replicas,
        single_request=None if alone is None else estimate_document(alone, cost=None),
        passed_over=plan.passed_over,
        indistinguishable=plan.indistinguishable,
        profile=None if profile is None else _profile(profile),
        verdict=verdict,
        capacity=capacity,
        joint=joint,
        merge_advice=merge_advice,
    )


def _profile(profile: Profile) -> ProfileDocument:
    return ProfileDocument(
        created_at=profile.created_at,
        budget_s=profile.budget_s,
        spent_s=profile.spent_s,
        unreached=profile.unreached,
    )
