"""Content of ``iserve report``, gathered: one plan per intent on the same hardware, and what was measured.

Joins planner and estimator to the values that ``iserve.report`` renders; starts nothing, measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.engine_caches import with_engine_caches
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.towers import WithTowers
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from iserve.planning.deployability import DeployableDocument
from iserve.planning.estimator_factory import step_tokens_of
from iserve.planning.joint_choice import JointChoice
from iserve.planning.joint_plan import chosen_plan, joint_capacity, joint_document
from iserve.planning.pipeline import EngineChooser, Hardware, PlanOptions
from iserve.planning.plan_document import plan_document
from iserve.planning.serving_capacity import serving_capacity
from iserve.planning.verdict import verdict
from iserve.planning.verdict_text import alike_words, note_lines, plan_lines, refused_words
from iserve.report.accuracy import AccuracyRecord
from iserve.report.full_model import whole_models
from iserve.report.latency_fit import time_panels
from iserve.report.sections import MOST_ROWS
from iserve.report.values import Configuration, RankedRow, Ranking, Report, Verdict
from planner.costs import COSTS, Prices, figures, objective_of
from planner.intent import LIMITED, Intent, IntentKind, Slo
from planner.plan import Plan, Ranked

__all__ = ["build_report", "find_profile"]

EXAMPLE_FACTOR = 1.5  # the example limits of latency-slo and cost-slo, over the best there is
_FIRST = Intent().kind  # what a plan optimises by default
_PLAIN = (_FIRST, *(kind for kind in IntentKind if kind not in (_FIRST, *LIMITED)))


def find_profile(
    profiles: Sequence[Profile], model: str, shape_hash: str | None, *, argument: str | None = None
) -> Profile:
    """Return the latest profile of that name, else of a model of that shape.

    Args:
        argument: names the model in a command, where its name alone does not.

    Raises:
        NotMeasuredError: there is none.
    """
    named = [p for p in profiles if p.model == model and shape_hash in (None, p.spec.shape_hash)]
    alike = [p for p in profiles if shape_hash is not None and p.spec.shape_hash == shape_hash]
    found = max(named or alike, key=lambda p: p.created_at, default=None)
    if found is None:
        raise NotMeasuredError(
            f"{model} has no profile here; run `iserve profile {argument or model}` first, or report on datasheet "
            "GPUs with --gpus NAME:COUNT"
        )
    return found


def build_report(
    model: str,
    spec: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    engines: Sequence[EngineCapabilities],
    options: PlanOptions,
    *,
    accuracy: AccuracyRecord | None = None,
    deployable_of: Callable[[DeploymentConfig], DeployableDocument] | None = None,
    notes: tuple[str, ...] = (),
) -> Report:
    """Return all intents planned on ``hardware``, with what the estimator's profile (if it has one) measured.

    Args:
        deployable_of: whether a configuration can be deployed here; None: nothing is said of it.
        notes: added to every plan.

    Raises:
        ConfigError: the workload is longer than the model's context, or there is no engine or device.
    """
    planner = _Planner(spec, hardware, estimator, engines, options, notes)
    plans = {kind: planner.plan(planner.intent(kind)) for kind in _PLAIN}
    base = plans[IntentKind.MIN_COST]
    candidates = [ranked for plan in plans.values() for ranked in plan.candidates]
    layouts = {r.config: r.layout.layers_per_stage for r in candidates if r.layout is not None}
    order = {ranked.config: index for index, ranked in enumerate(base.candidates)}
    report = Report(
        model=model,
        spec=spec,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=hardware.label,
        device=hardware.gpu,
        workload=options.workload,
        cost_model=str(options.intent.cost_model),
        cost_unit=COSTS[options.intent.cost_model].unit,
        configurations=tuple(_configuration(ranked, layouts.get(ranked.config)) for ranked in base.candidates),
        rankings=(),
        accuracy=accuracy,
    )
    report = _with_measurements(report, estimator)
    rankings = [
        _ranking(plan, order, limit, planner.verdict(model, plan, report.profile, deployable_of))
        for plan, limit in [*((plan, None) for plan in plans.values()), *planner.limited(plans)]
    ]
    return replace(report, rankings=tuple(rankings))


def _with_measurements(report: Report, estimator: Estimator) -> Report:
    """Return the report with what the estimator's profile measured, if it has one."""
    match estimator:
        case CorrectedEstimator():
            found = _with_measurements(report, estimator.base)
            return replace(found, warnings=estimator.warnings + found.warnings)
        case WithTowers():
            return _with_measurements(report, estimator.base)
        case FingerprintedEstimator(profile=profile):
            return replace(
                report,
                profile=profile,
                panels=time_panels(profile),
                layer_effects=estimator.layer_effects,
                warnings=estimator.memory.warnings,
            )
        case DepthTiedEstimator(profile=profile):
            whole = whole_models(estimator, report.workload)
            return replace(report, profile=profile, whole=whole, warnings=estimator.warnings)
        case _:
            return report


class _Planner:
    """Plans of one model on one hardware that differ in their intent only."""

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        estimator: Estimator,
        engines: Sequence[EngineCapabilities],
        options: PlanOptions,
        notes: tuple[str, ...],
    ) -> None:
        self._spec, self._hardware, self._estimator = spec, hardware, estimator
        self._engines, self._options, self._notes = engines, options, notes
        self._choices: dict[Intent, JointChoice | None] = {}

    def intent(self, kind: IntentKind, *, slo: Slo | None = None, budget: float | None = None) -> Intent:
        return replace(self._options.intent, kind=kind, slo=slo, budget=budget)

    def plan(self, intent: Intent) -> Plan:
        options = replace(self._options, intent=intent)
        plan, self._choices[intent] = chosen_plan(
            self._spec, self._hardware, self._estimator, self._engines, options
        )
        return plan

    def verdict(
        self,
        model: str,
        plan: Plan,
        profile: Profile | None,
        deployable_of: Callable[[DeploymentConfig], DeployableDocument] | None,
    ) -> Verdict:
        """Return the words of a plan that was made here."""
        there = None if deployable_of is None or plan.best is None else deployable_of(plan.best.config)
        choice = self._choices.get(plan.intent)
        replicas = self._options.replicas if choice is None else len(choice.replicas)
        plan_options = replace(self._options, intent=plan.intent, replicas=replicas)
        found = verdict(
            plan,
            model=model,
            hardware=self._hardware,
            estimator=self._estimator,
            options=plan_options,
            deployable=there,
        )
        spec = self._spec if profile is None else with_engine_caches(self._spec, profile.memory)
        measured_step = None if profile is None else step_tokens_of(profile)
        capacity = (
            serving_capacity(plan, spec, self._hardware, self._estimator, plan_options, measured_step)
            if choice is None
            else joint_capacity(choice, spec, plan_options, measured_step)
        )
        free_bytes = {gpu.device_id: gpu.free_bytes for gpu in self._hardware.snapshot.gpus}
        document = plan_document(
            plan,
            model=model,
            hardware=self._hardware.label,
            workload=self._options.workload,
            conditions_of=EngineChooser(self._spec, self._hardware.gpu, self._engines).conditions,
            notes=self._notes,
            profile=profile,
            verdict=found,
            capacity=None if capacity is None else capacity.document(free_bytes),
            joint=None if choice is None else joint_document(choice),
            replicas=replicas,
        )
        shown = min(MOST_ROWS, sum(candidate.feasible for candidate in document.candidates))
        alike = [alike_words(document, shown)] if document.indistinguishable else []
        notes = [("" if number else "Notes", note) for number, note in enumerate([*alike, *note_lines(document)])]
        return Verdict(
            sentence=found.sentence, lines=(*plan_lines(document), *notes), refused=refused_words(found)
        )

    def limited(self, plans: dict[IntentKind, Plan]) -> list[tuple[Plan, str]]:
        """Return plans of the two intents that need a limit, under an example that follows from the best of the
        rest.
        """
        options, found = self._options, []
        fastest, cheapest = _first(plans[IntentKind.MIN_LATENCY]), _first(plans[IntentKind.MIN_COST])
        if fastest is not None and fastest.estimate is not None:
            slo = Slo(
                ttft_s=_rounded(EXAMPLE_FACTOR * fastest.estimate.ttft_s.high),
                tpot_s=_rounded(EXAMPLE_FACTOR * fastest.estimate.tpot_s.high),
            )
            text = (
                f"Example limit: ttft={slo.ttft_s:g},tpot={slo.tpot_s:g} (seconds), {EXAMPLE_FACTOR:g} times the "
                "upper ends of the fastest configuration; choose your own with --slo."
            )
            found.append((self.plan(self.intent(IntentKind.LATENCY_SLO, slo=slo)), text))
        if cheapest is not None and cheapest.estimate is not None and cheapest.cost:
            prices = Prices(usd_per_gpu_hour=self._hardware.gpu.price_usd_per_gpu_hour)
            (most,) = COSTS[options.intent.cost_model].of(figures([cheapest.estimate]).at_high, prices).tolist()
            budget = _rounded(EXAMPLE_FACTOR * most)
            text = (
                f"Example limit: a budget of {budget:g} {COSTS[options.intent.cost_model].unit} per request, "
                f"{EXAMPLE_FACTOR:g} times the upper end of the cheapest configuration; choose your own with "
                "--budget."
            )
            found.append((self.plan(self.intent(IntentKind.COST_SLO, budget=budget)), text))
        return found


def _first(plan: Plan) -> Ranked | None:
    """Return the best feasible candidate, else the best that anything is predicted of."""
    known = (ranked for ranked in plan.candidates if ranked.estimate is not None and ranked.objective is not None)
    return plan.best or next(known, None)


def _rounded(value: float) -> float:
    """Round up to three significant digits, so that what the limit was made from stays inside it."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / step) * step:.6g}")


def _configuration(ranked: Ranked, layers_per_stage: tuple[int, ...] | None) -> Configuration:
    return Configuration(
        config=ranked.config,
        estimate=ranked.estimate,
        layers_per_stage=layers_per_stage,
        cost=ranked.cost,
        feasible=ranked.feasible,
        reason=ranked.reason,
    )


def _ranking(plan: Plan, order: dict[DeploymentConfig, int], limit: str | None, said: Verdict) -> Ranking:
    remarks = [
        f"{better.config} would be better ({better.objective:.4g} {plan.objective_unit}): {better.reason}"
        for better in plan.why_not.better
    ]
    return Ranking(
        intent=str(plan.intent.kind),
        limit=limit,
        objective=_objective(plan),
        rows=tuple(
            RankedRow(
                configuration=order[ranked.config],
                objective=ranked.objective,
                feasible=ranked.feasible,
                reason=ranked.reason,
            )
            for ranked in plan.candidates
        ),
        remarks=tuple(remarks),
        verdict=said,
    )


def _objective(plan: Plan) -> str:
    """Return what the intent optimises, in words."""
    name = objective_of(plan.intent).words
    return f"{name} in {plan.objective_unit}, {'more' if plan.maximize else 'less'} is better"
