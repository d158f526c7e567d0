"""Plan of a joint choice: its candidate first, its forecast and capacity, or why the rate is not served. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fingerprint.capability import EngineCapabilities
from fingerprint.estimates import Estimator
from fingerprint.model_spec import ModelSpec
from iserve.planning.document import CapacityBound, JointPlanDocument
from iserve.planning.joint_choice import ExpectedModel, JointChoice, JointQuestion, expected_model
from iserve.planning.joint_promise import misses_too_many, promised_choice
from iserve.planning.launch_limits import largest_step
from iserve.planning.more_gpus import least_more_gpus, more_gpus_advice
from iserve.planning.pipeline import (
    Hardware,
    PlanOptions,
    datasheet_estimator,
    make_plan,
    plan_on,
    ranked_anywhere,
    space,
    with_more,
    with_traffic,
)
from iserve.planning.serving_capacity import ServingCapacity, kept_of
from planner.intent import LIMITED, IntentKind
from planner.plan import Limit, LimitKind, Nearest, Plan, Relaxation, Room, WhyNot

__all__ = ["ChosenPlan", "chosen_plan", "joint_capacity", "joint_document"]

_TIMES = (LimitKind.TTFT, LimitKind.TPOT, LimitKind.E2E)

ChosenPlan = tuple[Plan, JointChoice | None]  # a plan, and the joint choice that it is where it is one


def chosen_plan(
    spec: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    engines: Sequence[EngineCapabilities],
    options: PlanOptions,
    *,
    kept: ModelSpec | None = None,
) -> ChosenPlan:
    """Return the plan by ``options``, and the joint choice that it is where it is one.

    Without a joint choice it is that of ``make_plan``: for other intents, engines and policies, and where no place
    has room for a request of the longest kind or for all replicas.

    Args:
        kept: the model as the engine keeps it; None: ``spec``.

    Raises:
        ConfigError: as ``make_plan``.
    """
    estimator = with_traffic(estimator, spec, options)
    if not options.is_joint(engines, hardware.gpu):
        return make_plan(spec, hardware, estimator, engines, options), None
    plan = make_plan(spec, hardware, estimator, engines, options.of_one_batch)
    case = _Case(spec=spec, kept=kept or spec, estimator=estimator, engines=engines)
    asked = case.question(plan, hardware, options)
    choice, served = promised_choice(asked)
    plan = replace(plan, intent=options.intent)
    has_rate = options.intent.rate_per_s is not None
    if choice is None and asked.estimates and (has_rate or options.replicas > 1):
        again = replace(options, expect=0, expected_models=())
        plan = make_plan(case.kept, hardware, estimator, engines, again)
        return _with_gpus(plan, hardware, options, case), None
    if choice is None:  # the limits refuse it, whatever the rate and the number
        return (_with_gpus(plan, hardware, options, case) if has_rate else plan), None
    if choice.rate_per_s is not None and choice.forecast.utilisation > 1:
        return _with_gpus(_not_served(plan, choice), hardware, options, case), None
    chosen = next(one for one in plan.candidates if one.config == choice.config)
    rest = (one for one in plan.candidates if one is not chosen)
    later = max(options.expect - choice.neighbours - 1, len(options.expected_models)) - choice.unplaced
    return replace(
        plan,
        room=Room(later, len(hardware.snapshot.gpus)) if later > 0 else None,
        candidates=(chosen._replace(layout=choice.layout), *rest),
        served=served,
        passed_over=(),
        indistinguishable=(),
    ), choice


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """Model, estimator and engines of a plan, which go on as they are where hardware or limits change."""

    spec: ModelSpec
    kept: ModelSpec  # the model as the engine keeps it
    estimator: Estimator
    engines: Sequence[EngineCapabilities]

    def question(self, plan: Plan, hardware: Hardware, options: PlanOptions) -> JointQuestion:
        """Return the question which of the configurations that are feasible by ``plan`` go where."""
        return JointQuestion(
            estimates=[one.estimate for one in plan.candidates if one.feasible and one.estimate is not None],
            spec=self.kept,
            hardware=hardware,
            estimator=self.estimator,
            options=options,
            expected=_expected(hardware, self.engines, options),
        )

    def choice_on(self, hardware: Hardware, options: PlanOptions) -> JointChoice | None:
        """Return the choice, None: there is none that serves the rate and keeps the SLO."""
        plan = plan_on(hardware, self.spec, self.estimator, self.engines, options.of_one_batch)
        found, served = promised_choice(self.question(plan, hardware, options))
        if found is None or found.forecast.utilisation > 1:
            return None
        return None if served is not None and misses_too_many(served) else found


def _expected(
    hardware: Hardware, engines: Sequence[EngineCapabilities], options: PlanOptions
) -> list[ExpectedModel]:
    """Return the models that are to follow, by datasheets, each with the intent of this plan.

    One that no configuration runs on idle GPUs is left out.
    """
    found = []
    for one in options.expected_models:
        if one.spec is None:
            continue
        workload = replace(options.workload, images=0, tokens_per_image=0)
        traffic = replace(options.intent.traffic, variants=0)  # which are those of this plan's model
        kind = _without_limit(options.intent.kind)
        intent = replace(options.intent, slo=None, budget=None, kind=kind, traffic=traffic)
        theirs = replace(options, intent=replace(intent, rate_per_s=one.rate_per_s), workload=workload)
        estimator = with_traffic(datasheet_estimator(one.spec, hardware.gpu, engines), one.spec, options)
        candidates = space(
            one.spec, hardware.gpu, len(hardware.snapshot.gpus), estimator, engines, theirs.of_one_batch
        )
        ranked = ranked_anywhere(candidates, theirs.of_one_batch, hardware.gpu)
        estimates = [each.estimate for each in ranked.candidates if each.feasible and each.estimate is not None]
        model = expected_model(
            one.name, estimates, one.spec, estimator, theirs, gpu_bytes=hardware.gpu.memory_bytes
        )
        found += [] if model is None else [model]
    return found


def _without_limit(kind: IntentKind) -> IntentKind:
    return IntentKind.MIN_LATENCY if kind in LIMITED else kind


def joint_capacity(
    choice: JointChoice, spec: ModelSpec, options: PlanOptions, measured_step: int | None = None
) -> ServingCapacity:
    """Return what each worker of ``choice`` is started for.

    Args:
        measured_step: tokens of the largest step that the engine was measured with, as ``launch_limits`` has it.
    """
    usual = options.workload.input_tokens + options.workload.output_tokens
    served = replace(
        options.workload,
        batch=min(replica.requests_at_once for replica in choice.replicas),
        longest_tokens=choice.context_tokens if choice.context_tokens > usual else 0,
    )
    given = not (options.more_requests or options.longer_requests)
    return ServingCapacity(
        engine=choice.config.engine,
        workload=served,
        placements=choice.placements,
        bound=CapacityBound.GIVEN if given else CapacityBound.LOAD,
        kept=kept_of(spec, choice.config),
        step_tokens=largest_step(spec, choice.config, options.workload, served, measured_step),
        kv_tokens=tuple(replica.kv_tokens for replica in choice.replicas) if spec.keeps_tokens else (),
    )


def joint_document(choice: JointChoice) -> JointPlanDocument:
    """Return the document of ``choice``."""
    return JointPlanDocument(
        goal=choice.goal,
        rate_per_s=choice.rate_per_s,
        utilisations=choice.utilisations,
        neighbours=choice.neighbours,
        neighbour_rates=choice.neighbour_rates,
        kv_tokens=tuple(replica.kv_tokens for replica in choice.replicas),
        forecast=choice.forecast,
        rule=choice.rule,
        is_rule=choice.is_rule,
        service=choice.service,
    )


def _with_gpus(plan: Plan, hardware: Hardware, options: PlanOptions, case: _Case) -> Plan:
    """Return ``plan``, which nothing is feasible for, with advice that holds at the rate, and on more GPUs.

    Advice of one batch on one replica is left out where the rate is not served so.
    """

    def holds(advice: Relaxation) -> bool:
        slo = options.intent.slo
        if advice.limit not in _TIMES or slo is None or options.intent.rate_per_s is None:
            return True
        looser = replace(slo, **{f"{advice.limit}_s": advice.needed})
        intent = replace(options.intent, slo=looser)
        return case.choice_on(hardware, replace(options, intent=intent)) is not None

    rest = [one for one in plan.why_not.relaxations if one.limit is not LimitKind.GPUS and holds(one)]
    num_gpus = len(hardware.snapshot.gpus)
    enough = least_more_gpus(num_gpus, lambda more: case.choice_on(with_more(hardware, more), options))
    if enough is not None:
        rest.append(more_gpus_advice(num_gpus, enough[0], enough[1].config, None))
    return replace(plan, why_not=replace(plan.why_not, relaxations=tuple(rest)))


def _not_served(plan: Plan, choice: JointChoice) -> Plan:
    """Return ``plan`` with every candidate refused: not even the best plan serves the rate."""
    rate = choice.rate_per_s
    assert rate is not None, "asked with a rate only"
    highest = rate / choice.forecast.utilisation
    limit = Limit(LimitKind.RATE, rate, note="by the best plan of all replicas that fit")
    numbers = _HighestRate(highest)
    refused = tuple(
        one._replace(feasible=False, missed=(limit,), numbers=numbers) if one.feasible else one
        for one in plan.candidates
    )
    first = next(one for one in refused if one.config == choice.config)
    advice = [
        Relaxation(
            LimitKind.RATE,
            rate,
            highest,
            choice.config,
            None,
            f"--rate {_rounded_down(highest):g} would admit {choice.config}",
        )
    ]
    nearest = Nearest(choice.config, None, f"{choice.config}: {limit.violation(highest).text}")
    return replace(
        plan,
        candidates=(first, *(one for one in refused if one is not first)),
        chosen=None,
        why_not=WhyNot(nearest=nearest, relaxations=tuple(advice)),
        nearest_misses=(limit.violation(highest),),
        passed_over=(),
        indistinguishable=(),
    )


def _rounded_down(value: float) -> float:
    """Return ``value`` with three digits, and no more than it is."""
    rounded = float(f"{value:.3g}")
    step = 10 ** (math.floor(math.log10(value)) - 2)
    return rounded if rounded <= value else float(f"{rounded - step:.3g}")


@dataclass(frozen=True, slots=True)
class _HighestRate:
    """Numbers of candidates that miss the rate alone (implements ``planner.plan.Numbers``)."""

    requests_per_s: float

    def actual(self, row: int) -> tuple[float, ...]:
        return (self.requests_per_s,)

    def risk(self, row: int) -> float | None:
        return None

    def utilisation(self, row: int) -> float | None:
        return None

    def interval(self, row: int) -> tuple[float, float] | None:
        return None
