"""Which configuration serves an intent best: candidates in, an ordered plan out. Asks whether a candidate fits the
cluster by calling a function it is given, and knows no GPU.

Rules.

*   A candidate is refused by the first of: its own refusal (shape, engine, no estimate); the limits, all of them
    listed; memory.
*   TTFT, TPOT and E2E limits are judged on the upper end of the estimate's interval. With a rate, the wait at the
    intent's percentile is added to TTFT and E2E, from an FCFS M/D/1 queue with service time e2e / batch, also at
    the upper end. The budget and the objective are judged on the value itself.
*   Ties are broken by fewer GPUs, then less memory, then the order of configurations, so that the order in which
    candidates are listed never matters. The configurations of ``candidates`` are distinct.
*   ``fits`` is called at most once per candidate, best objective first, and only for candidates that nothing
    else refuses; when none of them fits, also for those that relaxing a limit could admit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from planner.costs import COSTS, Column, Cost, Figures, Objective, Prices, figures, objective_of
from planner.explain import WhatIf, explain
from planner.intent import Intent, Quality, quality_needed
from planner.plan import INTERVAL_NOTE, QUALITIES, Candidate, Layout, LimitKind, NoRoom, Plan, Ranked, Violation
from planner.queueing import MODEL_NAME, md1_wait_quantile

__all__ = ["Fits", "rank"]

Fits = Callable[[Estimate], Layout | NoRoom]

_NO_PRICES = Prices()
_NOT_USABLE = "its estimate is not a positive, finite number of seconds and bytes"


def rank(
    candidates: Sequence[Candidate],
    intent: Intent,
    *,
    fits: Fits,
    prices: Prices = _NO_PRICES,
    what_if: Sequence[WhatIf] = (),
) -> Plan:
    """Order ``candidates`` by ``intent`` and choose the best that keeps every limit and fits.

    Args:
        fits: where a candidate would go, or :class:`NoRoom`. Pure: one answer per estimate.
        prices: needed by the cost model ``dollars`` only.
        what_if: other clusters (such as "one more GPU") to ask when nothing is feasible.
    """
    objective, cost = objective_of(intent), COSTS[intent.cost_model]
    predicted = [c for c in candidates if c.estimate is not None]
    judged = _judge(predicted, intent, objective, cost, prices, fits)
    feasible = [ranked for ranked in judged if ranked.feasible]
    refused = [ranked for ranked in judged if not ranked.feasible]
    blank = [
        Ranked(c.config, None, None, None, False, c.refusal or "nothing is predicted of this configuration")
        for c in candidates
        if c.estimate is None
    ]
    blank.sort(key=lambda ranked: (ranked.config.num_gpus, ranked.config))
    ordered = (*feasible, *refused, *blank)
    return Plan(
        intent=intent,
        candidates=ordered,
        chosen=0 if feasible else None,
        objective_unit=objective.unit,
        maximize=objective.maximize,
        cost_unit=cost.unit,
        queueing=None if intent.rate_per_s is None else MODEL_NAME,
        why_not=explain(
            ordered, intent, fits=fits, what_if=what_if, maximize=objective.maximize, cost_unit=cost.unit
        ),
    )


def _judge(
    predicted: Sequence[Candidate], intent: Intent, objective: Objective, cost: Cost, prices: Prices, fits: Fits
) -> list[Ranked]:
    """Every candidate that has an estimate, with its figures and its verdict, best objective first."""
    seen = figures([c.estimate for c in predicted if c.estimate is not None])
    with np.errstate(all="ignore"):  # rows that cannot be used are refused here
        costs = np.where(seen.usable, cost.of(seen, prices), np.nan)
        objectives = np.where(seen.usable, objective.of(seen, prices), np.nan)
        violations = _violations(_checks(predicted, seen, costs, intent, cost.unit), len(predicted))
    usable, paid, values = seen.usable.tolist(), costs.tolist(), objectives.tolist()
    judged: list[Ranked] = []
    for row in _order(predicted, seen, -objectives if objective.maximize else objectives):
        config, estimate, refusal = predicted[row]
        value = None if values[row] != values[row] else values[row]
        spent = None if paid[row] != paid[row] else paid[row]
        if refusal is None and (value is None or (spent is None and intent.budget is not None)):
            refusal = (objective.unknown if value is None else cost.unknown) if usable[row] else _NOT_USABLE
        if refusal is None and value is not None and estimate is not None and not violations[row]:
            judged.append(_placed(config, estimate, value, spent, fits))
        else:
            judged.append(
                Ranked(config, estimate, value, spent, False, refusal, () if refusal else violations[row])
            )
    return judged


def _placed(
    config: DeploymentConfig, estimate: Estimate, objective: float, cost: float | None, fits: Fits
) -> Ranked:
    """The last verdict, memory, on a candidate that nothing else refuses."""
    answer = fits(estimate)
    if isinstance(answer, NoRoom):
        short = Violation(LimitKind.MEMORY, 0.0, float(answer.shortfall_bytes), answer.reason)
        return Ranked(config, estimate, objective, cost, False, None, (short,), None, answer)
    return Ranked(config, estimate, objective, cost, True, None, (), answer)


class _Check(NamedTuple):
    """One limit over all candidates."""

    limit: LimitKind
    allowed: float
    actual: Column
    missed: npt.NDArray[np.bool_]
    note: str


def _checks(
    predicted: Sequence[Candidate], seen: Figures, costs: Column, intent: Intent, cost_unit: str
) -> list[_Check]:
    """Every limit that ``intent`` sets, in the order in which reasons are told."""
    checks: list[_Check] = []

    def at_most(limit: LimitKind, allowed: float | None, actual: Column, note: str) -> None:
        if allowed is not None:
            checks.append(_Check(limit, allowed, actual, actual > allowed, note))

    if intent.quality is not Quality.ANY:
        steps = {quality: float(step) for step, quality in enumerate(QUALITIES)}
        needed = np.array([steps[quality_needed(c.config)] for c in predicted], dtype=np.float64)
        at_most(LimitKind.QUALITY, steps[intent.quality], needed, "")
    at_most(LimitKind.BUDGET, intent.budget, costs, cost_unit)
    wait_s, note = np.zeros_like(seen.e2e_s), INTERVAL_NOTE
    rate = intent.rate_per_s
    if rate is not None:
        wait_s = seen.service_s * md1_wait_quantile(seen.service_s * rate, intent.percentile)
        saturated = ~np.isfinite(wait_s)
        checks.append(_Check(LimitKind.RATE, rate, 1 / seen.service_s, saturated, ""))
        wait_s[saturated] = 0.0  # the rate is what is wrong then; say it once
        note = (
            f"(upper end of the 90% interval and p{intent.percentile:g} of the wait in an {MODEL_NAME} queue "
            f"at {rate:g} requests/s)"
        )
    if intent.slo is not None:
        at_most(LimitKind.TTFT, intent.slo.ttft_s, seen.ttft_high_s + wait_s, note)
        at_most(LimitKind.TPOT, intent.slo.tpot_s, seen.tpot_high_s, INTERVAL_NOTE)
        at_most(LimitKind.E2E, intent.slo.e2e_s, seen.e2e_high_s + wait_s, note)
    return checks


def _violations(checks: Sequence[_Check], num_rows: int) -> list[tuple[Violation, ...]]:
    """Per candidate, the limits it misses."""
    found: list[tuple[Violation, ...]] = [()] * num_rows
    for limit, allowed, actual, missed, note in checks:
        rows = np.flatnonzero(missed)
        shared: dict[float, tuple[Violation]] = {}  # thousands miss the quality in one and the same way
        for row, value in zip(rows.tolist(), actual[rows].tolist(), strict=True):
            one = shared.get(value)
            if one is None:
                one = shared[value] = (Violation(limit, allowed, value, note),)
            found[row] = found[row] + one if found[row] else one
    return found


def _order(predicted: Sequence[Candidate], seen: Figures, ascending: Column) -> list[int]:
    """Rows by objective, then fewer GPUs, less memory, and the order of configurations; unknown ones last."""
    keys = (seen.total_bytes, seen.num_gpus, ascending)  # lexsort: the last key counts most, and NaN sorts last
    by_figures = np.lexsort(keys)
    tied = np.ones(max(len(predicted) - 1, 0), dtype=np.bool_)
    for key in keys:
        left, right = key[by_figures[:-1]], key[by_figures[1:]]
        tied &= (left == right) | (np.isnan(left) & np.isnan(right))
    order: list[int] = by_figures.tolist()
    start = 0
    for end in (*np.flatnonzero(~tied).tolist(), len(order) - 1):
        if end > start:
            order[start : end + 1] = sorted(order[start : end + 1], key=lambda row: predicted[row].config)
        start = end + 1
    return order
