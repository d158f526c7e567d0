"""What ``iserve report`` shows, gathered: one plan per intent on the same hardware, and what was measured.

Joins planner and estimator to the values that ``fingerprint.report`` renders; starts nothing, measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from fingerprint.capability import EngineCapabilities
from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import NotFoundError, NotMeasuredError
from fingerprint.estimates import Estimator
from fingerprint.estimators.corrected import CorrectedEstimator
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.l2 import LayerEffect
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.report import (
    AccuracyRecord,
    Configuration,
    RankedRow,
    Ranking,
    Report,
    TimePanel,
    WholeModel,
    time_panels,
    whole_models,
)
from iserve.planning.making import Hardware, PlanOptions, make_plan
from placement.policies import DEFAULT_LOAD_THRESHOLD
from planner.costs import COSTS, Prices, figures
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo
from planner.plan import Plan, Ranked

__all__ = ["ReportOptions", "build_report", "find_profile", "read_accuracy"]

EXAMPLE_FACTOR = 1.5  # the example limits of latency-slo and cost-slo, over the best there is
_MAX_ACCURACY_BYTES = 16 << 20
_OBJECTIVES = {
    IntentKind.MIN_LATENCY: "end-to-end latency",
    IntentKind.MIN_MEMORY: "memory over all GPUs",
    IntentKind.MIN_GPU_HOURS: "GPU time per request",
    IntentKind.MAX_THROUGHPUT: "throughput",
    IntentKind.MIN_ENERGY: "energy per request",
    IntentKind.COST_SLO: "end-to-end latency",
}
_PLAIN = tuple(kind for kind in IntentKind if kind not in {IntentKind.LATENCY_SLO, IntentKind.COST_SLO})


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """For which requests, at which cost, and where placement puts them."""

    workload: Workload = field(default_factory=Workload)
    cost_model: CostModel = CostModel.MEMORY_LATENCY
    quality: Quality = Quality.NEAR
    policy: str = "hybrid"
    load_threshold: float = DEFAULT_LOAD_THRESHOLD


def find_profile(profiles: Sequence[Profile], model: str, shape_hash: str | None) -> Profile:
    """The latest profile of that name, else of a model of that shape.

    Raises:
        NotMeasuredError: there is none.
    """
    named = [p for p in profiles if p.model == model and shape_hash in (None, p.spec.shape_hash)]
    alike = [p for p in profiles if shape_hash is not None and p.spec.shape_hash == shape_hash]
    found = max(named or alike, key=lambda p: p.created_at, default=None)
    if found is None:
        raise NotMeasuredError(
            f"{model} has no profile here; run `iserve profile {model}` first, or report on datasheet GPUs with "
            "--gpus NAME:COUNT"
        )
    return found


def read_accuracy(path: Path) -> AccuracyRecord:
    """The record that ``tests/bench/full_model_accuracy.py`` wrote.

    Raises:
        NotFoundError: it cannot be read, or is larger than any such record.
        BadInputError: it is something else.
    """
    try:
        if path.stat().st_size > _MAX_ACCURACY_BYTES:
            raise NotFoundError(f"{path} is larger than {_MAX_ACCURACY_BYTES >> 20} MiB, no record is")
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"cannot read {path}: {error.strerror}") from error
    return from_json(data, AccuracyRecord, what=str(path))


def build_report(
    model: str,
    spec: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    engines: Sequence[EngineCapabilities],
    options: ReportOptions,
    *,
    accuracy: AccuracyRecord | None = None,
) -> Report:
    """All intents planned on ``hardware``, with what the estimator's profile (if it has one) measured.

    Raises:
        ConfigError: the workload is longer than the model's context, or there is no engine or device.
    """
    planner = _Planner(spec, hardware, estimator, engines, options)
    plans: dict[IntentKind, Plan] = {
        kind: planner.plan(Intent(kind=kind, cost_model=options.cost_model, quality=options.quality))
        for kind in _PLAIN
    }
    limited = planner.limited(plans)
    base = plans[IntentKind.MIN_COST]
    candidates = [ranked for plan in plans.values() for ranked in plan.candidates]
    layouts = {r.config: r.layout.layers_per_stage for r in candidates if r.layout is not None}
    order = {ranked.config: index for index, ranked in enumerate(base.candidates)}
    rankings = [_ranking(plan, order, None) for plan in plans.values()]
    rankings += [_ranking(plan, order, limit) for plan, limit in limited]
    shown = _Measured.of(estimator, options.workload)
    return Report(
        model=model,
        spec=spec,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        hardware=hardware.label,
        device=hardware.gpu,
        workload=options.workload,
        cost_model=str(options.cost_model),
        cost_unit=COSTS[options.cost_model].unit,
        configurations=tuple(_configuration(ranked, layouts.get(ranked.config)) for ranked in base.candidates),
        rankings=tuple(rankings),
        profile=shown.profile,
        panels=shown.panels,
        layer_effects=shown.layer_effects,
        whole=shown.whole,
        warnings=shown.warnings,
        accuracy=accuracy,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """What an estimator has measured, as far as the page shows it; nothing of one that has not."""

    profile: Profile | None = None
    panels: tuple[TimePanel, ...] = ()
    layer_effects: tuple[LayerEffect, ...] = ()
    whole: tuple[WholeModel, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, estimator: Estimator, workload: Workload) -> _Measured:
        match estimator:
            case CorrectedEstimator():
                base = cls.of(estimator.base, workload)
                return replace(base, warnings=estimator.warnings + base.warnings)
            case FingerprintedEstimator(profile=profile):
                return cls(
                    profile=profile,
                    panels=time_panels(profile),
                    layer_effects=estimator.layer_effects,
                    warnings=estimator.memory.warnings,
                )
            case DepthTiedEstimator(profile=profile):
                return cls(
                    profile=profile,
                    whole=whole_models(estimator, workload),
                    warnings=estimator.warnings,
                )
            case _:
                return cls()


class _Planner:
    """Plans of one model on one hardware that differ in their intent only."""

    def __init__(
        self,
        spec: ModelSpec,
        hardware: Hardware,
        estimator: Estimator,
        engines: Sequence[EngineCapabilities],
        options: ReportOptions,
    ) -> None:
        self._spec, self._hardware, self._estimator = spec, hardware, estimator
        self._engines, self._options = engines, options

    def plan(self, intent: Intent) -> Plan:
        wish = PlanOptions(
            intent=intent,
            workload=self._options.workload,
            policy=self._options.policy,
            load_threshold=self._options.load_threshold,
        )
        return make_plan(self._spec, self._hardware, self._estimator, self._engines, wish)

    def limited(self, plans: dict[IntentKind, Plan]) -> list[tuple[Plan, str]]:
        """The two intents that need a limit, under an example that follows from the others' best."""
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
            intent = Intent(
                kind=IntentKind.LATENCY_SLO, cost_model=options.cost_model, quality=options.quality, slo=slo
            )
            found.append((self.plan(intent), text))
        if cheapest is not None and cheapest.estimate is not None and cheapest.cost:
            prices = Prices(usd_per_gpu_hour=self._hardware.gpu.price_usd_per_gpu_hour)
            (most,) = COSTS[options.cost_model].of(figures([cheapest.estimate]).at_high, prices).tolist()
            budget = _rounded(EXAMPLE_FACTOR * most)
            text = (
                f"Example limit: a budget of {budget:g} {COSTS[options.cost_model].unit} per request, "
                f"{EXAMPLE_FACTOR:g} times the upper end of the cheapest configuration; choose your own with "
                "--budget."
            )
            intent = Intent(
                kind=IntentKind.COST_SLO, cost_model=options.cost_model, quality=options.quality, budget=budget
            )
            found.append((self.plan(intent), text))
        return found


def _first(plan: Plan) -> Ranked | None:
    """The best feasible candidate, else the best that anything is predicted of."""
    known = (ranked for ranked in plan.candidates if ranked.estimate is not None and ranked.objective is not None)
    return plan.best or next(known, None)


def _rounded(value: float) -> float:
    """Upwards to three significant digits, so that what the limit came from stays inside it."""
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


def _ranking(plan: Plan, order: dict[DeploymentConfig, int], limit: str | None) -> Ranking:
    why = plan.why_not
    remarks = [
        f"{better.config} would be better ({better.objective:.4g} {plan.objective_unit}): {better.reason}"
        for better in why.better
    ]
    remarks += [] if why.nearest is None else [why.nearest.text]
    remarks += [relaxation.text for relaxation in why.relaxations[:3]]
    remarks += [] if why.together is None else [why.together.text]
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
    )


def _objective(plan: Plan) -> str:
    """What the intent optimises, in words; without words of its own it is the cost."""
    name = _OBJECTIVES.get(plan.intent.kind, f"the cost of a request ({plan.intent.cost_model})")
    return f"{name} in {plan.objective_unit}, {'more' if plan.maximize else 'less'} is better"
