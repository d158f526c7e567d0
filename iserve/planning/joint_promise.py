"""Joint choice under a known rate with its promise: the share of requests forecast to miss the SLO. Pure."""

from __future__ import annotations

from dataclasses import fields, replace

from fingerprint.config import Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimate, Estimator
from iserve.planning.joint_choice import JointChoice, JointQuestion, joint_choice, limits_answers
from iserve.planning.pipeline import PlanOptions, alone_of
from placement.fleet.types import FleetGoal
from planner.attainment import Attainment
from planner.constraints import told_of
from planner.costs import figures
from planner.intent import Slo
from planner.plan import LoadForecast

__all__ = ["misses_too_many", "promised_choice"]

# Shares of a limit that the mean request keeps, where too many of all requests would miss the whole one.
_TIGHTER = (0.7, 0.5, 0.35, 0.25)


def promised_choice(asked: JointQuestion) -> tuple[JointChoice | None, LoadForecast | None]:
    """Return the joint choice and its times at the rate; None for these without a rate, or where it is not served.

    Where more requests are forecast to miss the SLO than its percentile allows, it is the choice for
    tighter limits, the least tight by which the asked ones are kept, else the fastest.
    """
    estimator, options = asked.estimator, asked.options
    choice = joint_choice(asked)
    if choice is None or choice.rate_per_s is None or choice.forecast.utilisation > 1:
        return choice, None
    promise = _promise(choice, choice.rate_per_s, estimator, options)
    if choice.goal is not FleetGoal.LATENCY and misses_too_many(promise):
        if (kept := _kept_by_tighter_limits(asked, choice.rate_per_s)) is not None:
            return kept
        faster = joint_choice(asked, FleetGoal.LATENCY)
        if faster is not None:
            return faster, _promise(faster, choice.rate_per_s, estimator, options)
    return choice, promise


def _kept_by_tighter_limits(asked: JointQuestion, rate_per_s: float) -> tuple[JointChoice, LoadForecast] | None:
    """Return the choice for tighter limits, the least tight by which the asked ones are kept, and its times.

    None: the asked ones are kept by none.
    """
    if not limits_answers(asked.options):
        return None
    for share in _TIGHTER:
        choice = joint_choice(_with_tighter_limits(asked, share))
        if choice is None or choice.forecast.utilisation > 1:
            continue
        promise = _promise(choice, rate_per_s, asked.estimator, asked.options)
        if not misses_too_many(promise):
            return choice, promise
    return None


def _with_tighter_limits(asked: JointQuestion, share: float) -> JointQuestion:
    """Return the question with ``share`` of each limit."""
    intent = asked.options.intent
    assert intent.slo is not None
    limits = {each.name: getattr(intent.slo, each.name) for each in fields(intent.slo)}
    slo = Slo(**{name: None if limit_s is None else share * limit_s for name, limit_s in limits.items()})
    return replace(asked, options=replace(asked.options, intent=replace(intent, slo=slo)))


def _promise(choice: JointChoice, rate_per_s: float, estimator: Estimator, options: PlanOptions) -> LoadForecast:
    """Return the times of one replica at its share of the rate, slowed by its neighbours.

    They are those of the service model that was chosen by; the intervals are the estimate's at the largest batch,
    of powers of two, that the KV cache holds and of which times are known.
    """
    number = len(choice.replicas)
    intent = replace(options.intent, rate_per_s=rate_per_s / number, replicas=number)
    held = min(choice.service.batch_of(replica.kv_tokens) for replica in choice.replicas)
    full = _largest_estimate(estimator, choice, options.workload, int(held))
    alone = alone_of(estimator, choice.config, full.workload) or full
    slowdown = choice.forecast.slowdown
    service = choice.service.slowed(slowdown, slowdown)
    served = Attainment.of_service(service, held, figures([full]), alone, intent.traffic, number)
    return told_of(served, 0, intent)


def misses_too_many(promise: LoadForecast) -> bool:
    """Return whether more requests are forecast to miss the SLO than its percentile allows."""
    return promise.miss_probability is not None and promise.miss_probability > 1 - promise.percentile / 100


def _largest_estimate(estimator: Estimator, choice: JointChoice, workload: Workload, most: int) -> Estimate:
    batch = 1 << (max(1, most).bit_length() - 1)
    while True:
        try:
            return estimator.estimate(choice.config, replace(workload, batch=batch, longest_tokens=0))
        except NotMeasuredError:
            if batch == 1:
                raise
            batch //= 2
