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
    else refuses; when none of them fits, also for those that a relaxed limit could admit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat
from fingerprint.estimates import Estimate
from planner.costs import COSTS, Cost, Figures, Objective, Prices, figures, objective_of
from planner.explain import WhatIf, explain
from planner.intent import Intent, quality_needed
from planner.plan import QUALITIES, Candidate, Layout, LimitKind, NoRoom, Plan, Ranked, Violation
from planner.queueing import MODEL_NAME, md1_wait_quantile

__all__ = ["Fits", "rank"]

Fits = Callable[[Estimate], Layout | NoRoom]

_NO_PRICES = Prices()


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
    known = [_usable_figures(candidate) for candidate in candidates]
    judge = _Judge(intent, objective, cost, prices)
    waits = _waits_s(known, intent)
    rows = [
        judge.row(candidate, seen, wait_s)
        for candidate, seen, wait_s in zip(candidates, known, waits, strict=True)
    ]
    rows.sort(key=itemgetter(0))
    feasible: list[Ranked] = []
    refused: list[Ranked] = []
    for _, ranked in rows:
        settled = _place(ranked, fits) if ranked.refusal is None and not ranked.violations else ranked
        (feasible if settled.feasible else refused).append(settled)
    ordered = (*feasible, *refused)
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


def _usable_figures(candidate: Candidate) -> Figures | str:
    """The figures of a candidate, or why there are none that can be compared."""
    if candidate.estimate is None:
        return "nothing is predicted of this configuration"
    seen = figures(candidate.estimate)
    if not (0 < seen.e2e_s <= seen.e2e_high_s < math.inf and seen.ttft_high_s >= 0 and seen.tpot_high_s >= 0):
        return f"the estimate is not usable: e2e {seen.e2e_s} s, at most {seen.e2e_high_s} s"
    return seen


def _waits_s(known: Sequence[Figures | str], intent: Intent) -> list[float]:
    """Seconds a request waits at the intent's percentile; infinite where the queue has no end."""
    if intent.rate_per_s is None:
        return [0.0] * len(known)
    service_s = np.array([0.0 if isinstance(seen, str) else seen.service_s for seen in known], dtype=np.float64)
    waits: list[float] = (service_s * md1_wait_quantile(service_s * intent.rate_per_s, intent.percentile)).tolist()
    return waits


def _place(ranked: Ranked, fits: Fits) -> Ranked:
    assert ranked.estimate is not None, "only candidates with an estimate get this far"
    answer = fits(ranked.estimate)
    if isinstance(answer, NoRoom):
        missing = Violation(LimitKind.MEMORY, 0.0, float(answer.shortfall_bytes), answer.reason)
        return ranked._replace(violations=(missing,), no_room=answer)
    return ranked._replace(feasible=True, layout=answer)


_SortKey = tuple[bool, float, int, int, int, int, str, str, str, str]


class _Judge:
    """The intent's limits, unpacked once for all candidates."""

    def __init__(self, intent: Intent, objective: Objective, cost: Cost, prices: Prices) -> None:
        self._objective, self._cost, self._prices = objective, cost, prices
        self._sign = -1.0 if objective.maximize else 1.0
        self._rate_per_s, self._budget, self._slo = intent.rate_per_s, intent.budget, intent.slo
        self._quality = QUALITIES.index(intent.quality)
        self._quality_of = {
            (weights, kv, pruning): QUALITIES.index(
                quality_needed(DeploymentConfig(weights=weights, kv=kv, pruning=pruning))
            )
            for weights in WeightFormat
            for kv in KvFormat
            for pruning in Pruning
        }
        self._tpot_note = "(upper end of the 90% interval)"
        self._note = self._tpot_note
        if self._rate_per_s is not None:
            self._note = (
                f"(upper end of the 90% interval and p{intent.percentile:g} of the wait in an {MODEL_NAME} queue "
                f"at {self._rate_per_s:g} requests/s)"
            )

    def row(self, candidate: Candidate, seen: Figures | str, wait_s: float) -> tuple[_SortKey, Ranked]:
        """A candidate with all but its memory judged, and its sort key."""
        config, estimate, refusal = candidate
        order = (config.tp, config.pp, config.weights, config.kv, config.pruning, config.engine)
        if isinstance(seen, str):
            ranked = Ranked(config, estimate, None, None, False, refusal or seen)
            return (True, 0.0, config.tp * config.pp, 0, *order), ranked
        objective = self._objective.of(seen, self._prices)
        cost = self._cost.of(seen, self._prices)
        violations: tuple[Violation, ...] = ()
        if refusal is None:
            if objective is None:
                refusal = self._objective.unknown
            elif cost is None and self._budget is not None:
                refusal = self._cost.unknown
            else:
                violations = self._violations(config, seen, cost, wait_s)
        ranked = Ranked(config, estimate, objective, cost, False, refusal, violations)
        value = 0.0 if objective is None else self._sign * objective
        return (objective is None, value, seen.num_gpus, seen.total_bytes, *order), ranked

    def _violations(
        self, config: DeploymentConfig, seen: Figures, cost: float | None, wait_s: float
    ) -> tuple[Violation, ...]:
        found: list[Violation] = []
        quality = self._quality_of[config.weights, config.kv, config.pruning]
        if quality > self._quality:
            found.append(Violation(LimitKind.QUALITY, self._quality, quality))
        if self._budget is not None and cost is not None and cost > self._budget:
            found.append(Violation(LimitKind.BUDGET, self._budget, cost, self._cost.unit))
        if self._rate_per_s is not None and wait_s == math.inf:
            found.append(Violation(LimitKind.RATE, self._rate_per_s, 1 / seen.service_s))
            wait_s = 0.0
        slo = self._slo
        if slo is not None:
            if slo.ttft_s is not None and seen.ttft_high_s + wait_s > slo.ttft_s:
                found.append(Violation(LimitKind.TTFT, slo.ttft_s, seen.ttft_high_s + wait_s, self._note))
            if slo.tpot_s is not None and seen.tpot_high_s > slo.tpot_s:
                found.append(Violation(LimitKind.TPOT, slo.tpot_s, seen.tpot_high_s, self._tpot_note))
            if slo.e2e_s is not None and seen.e2e_high_s + wait_s > slo.e2e_s:
                found.append(Violation(LimitKind.E2E, slo.e2e_s, seen.e2e_high_s + wait_s, self._note))
        return tuple(found)
