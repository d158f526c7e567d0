"""Which configuration serves an intent best: candidates in, an ordered plan out. Asks whether a candidate fits the
cluster by calling a function it is given, and knows no GPU.

Rules.

*   A candidate is refused by the first of: its own refusal (shape, engine, no estimate); the limits, all of them
    listed; memory.
*   The limits are judged as :mod:`planner.limits` says; the objective on the value itself.
*   Ties are broken by fewer GPUs, then less memory, then the order of configurations, so that the order in which
    candidates are listed never matters. The configurations of ``candidates`` are distinct.
*   ``fits`` is called at most once per candidate, best objective first, and only for candidates that nothing
    else refuses; when none of them fits, also for those that relaxing a limit could admit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.estimates import Estimate
from planner.attainment import Attainment, paces
from planner.costs import COSTS, Column, Cost, Figures, Objective, Prices, figures, objective_of
from planner.explain import better, what_it_takes
from planner.intent import Intent
from planner.limits import Check, Verdicts, checks_as_asked, limits_missed, told_of
from planner.plan import Candidate, Layout, Limit, LimitKind, NoRoom, Plan, Ranked, WhyNot
from planner.queueing import MODEL_NAME

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
) -> Plan:
    """Order ``candidates`` by ``intent`` and choose the best that keeps every limit and fits.

    Args:
        fits: where a candidate would go, or :class:`NoRoom`. Pure: one answer per estimate.
        prices: needed by the cost model ``dollars`` only.
    """
    objective, cost = objective_of(intent), COSTS[intent.cost_model]
    table = _table([c for c in candidates if c.estimate is not None], intent, objective, cost, prices)
    served = None if intent.rate_per_s is None else _served(table, intent)
    configs = [c.config for c in table.rows]
    checks = checks_as_asked(intent, configs, table.seen, table.costs_high, cost.unit, served)
    verdicts = Verdicts(checks, served, intent.rate_per_s)
    judged = _judge(table, checks, verdicts, intent, objective, cost, fits)
    feasible = [ranked for ranked in judged if ranked.feasible]
    refused = [ranked for ranked in judged if not ranked.feasible]
    blank = [
        Ranked(c.config, None, None, None, False, c.refusal or "nothing is predicted of this configuration")
        for c in candidates
        if c.estimate is None
    ]
    blank.sort(key=lambda ranked: (ranked.config.num_gpus, ranked.config))
    ordered = (*feasible, *refused, *blank)
    why_not = WhyNot()
    if not feasible:
        why_not = what_it_takes(refused, checks, table.seen, intent, fits=fits, cost_unit=cost.unit, served=served)
    return Plan(
        intent=intent,
        candidates=ordered,
        chosen=0 if feasible else None,
        objective_unit=objective.unit,
        maximize=objective.maximize,
        cost_unit=cost.unit,
        queueing=None if served is None else MODEL_NAME,
        served=told_of(served, feasible[0].row, intent) if feasible and served is not None else None,
        why_not=replace(why_not, better=better(ordered, objective.maximize)),
    )


def _served(table: _Table, intent: Intent) -> Attainment:
    alone = None
    if any(row.alone is not None for row in table.rows):
        found = (row.alone or row.estimate for row in table.rows)
        alone = [estimate for estimate in found if estimate is not None]
    return Attainment(paces(table.seen, alone, intent.traffic), intent.traffic)


class _Table(NamedTuple):
    """The candidates that have an estimate, best objective first, and their columns in the same order."""

    rows: list[Candidate]
    seen: Figures
    costs: Column  # NaN: unknown, as are the objectives
    costs_high: Column
    objectives: Column


def _table(
    predicted: Sequence[Candidate], intent: Intent, objective: Objective, cost: Cost, prices: Prices
) -> _Table:
    seen = figures([c.estimate for c in predicted if c.estimate is not None])
    with np.errstate(all="ignore"):  # rows that cannot be used are refused by ``_judge``
        costs = np.where(seen.usable, cost.of(seen, prices), np.nan)
        costs_high = np.where(seen.usable, cost.of(seen.at_high, prices), np.nan)
        objectives = np.where(seen.usable, objective.of(seen, prices), np.nan)
    order = _order(predicted, seen, -objectives if objective.maximize else objectives)
    rows = [predicted[row] for row in order.tolist()]
    return _Table(rows, seen.take(order), costs[order], costs_high[order], objectives[order])


def _judge(
    table: _Table,
    checks: Sequence[Check],
    verdicts: Verdicts,
    intent: Intent,
    objective: Objective,
    cost: Cost,
    fits: Fits,
) -> list[Ranked]:
    """The verdict on every candidate of ``table``."""
    unknown = np.isnan(table.objectives) | (np.isnan(table.costs) & (intent.budget is not None))
    refusals = [candidate.refusal for candidate in table.rows]
    usable, known = table.seen.usable, ~np.isnan(table.objectives)
    for row in np.flatnonzero(unknown).tolist():
        why = (cost.unknown if known[row] else objective.unknown) if usable[row] else _NOT_USABLE
        refusals[row] = refusals[row] or why
    judged: list[Ranked] = []
    for row, ((config, estimate, *_), refusal, limits, value, spent) in enumerate(
        zip(
            table.rows,
            refusals,
            limits_missed(checks, len(table.rows)),
            _or_none(table.objectives),
            _or_none(table.costs),
            strict=True,
        )
    ):
        layout: Layout | None = None
        no_room: NoRoom | None = None
        if refusal is not None:
            limits = ()
        elif not limits and estimate is not None:
            answer = fits(estimate)
            if isinstance(answer, NoRoom):
                no_room, limits = answer, (Limit(LimitKind.MEMORY, 0.0, answer.reason),)
            else:
                layout = answer
        feasible = layout is not None
        judged.append(
            Ranked(config, estimate, value, spent, feasible, refusal, limits, layout, no_room, verdicts, row)
        )
    return judged


def _or_none(column: Column) -> list[float | None]:
    return [None if value != value else value for value in column.tolist()]


def _order(predicted: Sequence[Candidate], seen: Figures, ascending: Column) -> npt.NDArray[np.intp]:
    """Rows by objective, then fewer GPUs, less memory, and the order of configurations; unknown ones last."""
    keys = (seen.total_bytes, seen.num_gpus, ascending)  # lexsort: the last key counts most, and NaN sorts last
    order = np.lexsort(keys)
    tied = np.ones(max(len(predicted) - 1, 0), dtype=np.bool_)
    for key in keys:
        left, right = key[order[:-1]], key[order[1:]]
        tied &= (left == right) | (np.isnan(left) & np.isnan(right))
    runs = np.flatnonzero(np.diff(tied, prepend=False, append=False)).reshape(-1, 2)  # first and last of equals
    for first, last in runs.tolist():
        order[first : last + 1] = sorted(order[first : last + 1].tolist(), key=lambda row: predicted[row].config)
    return order
