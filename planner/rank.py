"""Which configuration serves an intent best: candidates in, an ordered plan out. Asks whether a candidate fits the
cluster by calling a function it is given, and knows no GPU.

Rules.

*   A candidate is refused by the first of: its own refusal (shape, engine, no estimate); the limits, all of them
    listed; memory.
*   The limits are judged as :mod:`planner.limits` says; the objective on the value itself. With a rate a latency
    is the mean request's at that rate; where it is not served that has no end, and a batch's latency orders those.
*   Ties are broken by fewer GPUs, then less memory, then the order of configurations, so that the order in which
    candidates are listed never matters. The configurations of ``candidates`` are distinct.
*   ``fits`` is called at most once per candidate, best objective first, and only for candidates that nothing
    else refuses; when none of them fits, also for those that relaxing a limit could admit.
*   Where others run on the GPUs (:mod:`planner.beside`), the objective, the cost and the limits are those of the
    times where a candidate would go. What misses a limit on idle GPUs is asked for its place only where nothing is
    feasible; else it is taken to be as slow as the chosen one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from planner.attainment import Attainment
from planner.beside import Fits, Load, Neighbours, Sites, idle, told_of_idle
from planner.cells import Mask, Rows
from planner.costs import COSTS, Column, Cost, Figures, Objective, Prices, figures, objective_of
from planner.explain import better, what_it_takes
from planner.intent import Intent
from planner.limits import Check, Verdicts, checks_as_asked, limits_missed, num_missed, told_of
from planner.paces import paces
from planner.plan import TIMED, BetterIdle, Candidate, Layout, Limit, LimitKind, NoRoom, Plan, Ranked, WhyNot
from planner.queueing import MODEL_NAME

__all__ = ["best_of", "rank"]

_NO_PRICES = Prices()
_NOT_USABLE = "its estimate is not a positive, finite number of seconds and bytes"


def rank(
    candidates: Sequence[Candidate],
    intent: Intent,
    *,
    fits: Fits,
    prices: Prices = _NO_PRICES,
    neighbours: Neighbours | None = None,
) -> Plan:
    """Order ``candidates`` by ``intent`` and choose the best that keeps every limit and fits.

    Args:
        fits: where a candidate would go, or :class:`NoRoom`. Pure: one answer per estimate.
        prices: needed by the cost model ``dollars`` only.
        neighbours: what runs on the GPUs; None: nothing, or it is not to count.
    """
    objective, cost = objective_of(intent), COSTS[intent.cost_model]
    table, checks, fits, first = _weighed(candidates, intent, fits, prices, neighbours)
    served = table.served
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
        better_idle=None if first is None else _better_idle(*first, ordered, objective),
    )


def best_of(
    candidates: Sequence[Candidate],
    intent: Intent,
    *,
    fits: Fits,
    prices: Prices = _NO_PRICES,
    neighbours: Neighbours | None = None,
) -> Ranked | None:
    """What ``rank`` chooses, with nothing explained."""
    table, checks, fits, _ = _weighed(candidates, intent, fits, prices, neighbours)
    verdicts = Verdicts(checks, table.served, intent.rate_per_s)
    judged = _judge(table, checks, verdicts, intent, objective_of(intent), COSTS[intent.cost_model], fits)
    return next((ranked for ranked in judged if ranked.feasible), None)


class _Weighed(NamedTuple):
    """Everything on which the verdicts rest."""

    table: _Table
    checks: list[Check]
    fits: Fits
    first: tuple[DeploymentConfig, float] | None  # beside others: what is best on idle GPUs, and its objective


def _weighed(
    candidates: Sequence[Candidate], intent: Intent, fits: Fits, prices: Prices, neighbours: Neighbours | None
) -> _Weighed:
    objective, cost = objective_of(intent), COSTS[intent.cost_model]
    predicted = [c for c in candidates if c.estimate is not None]
    alone = figures([c.estimate for c in predicted if c.estimate is not None])
    table = _table(predicted, alone, idle(len(predicted)), intent, objective, cost, prices)
    checks = _checks(table, intent, cost)
    if neighbours is None:
        return _Weighed(table, checks, fits, None)
    sites = Sites(_askable(table, intent, objective, cost), fits, neighbours)
    kept = num_missed(checks, len(table.rows)) == 0
    sites.ask(kept)
    first = _first_of(table, kept & sites.placed)
    if first is not None and not (sites.load.slowdowns > 1).any() and not sites.load.later.any():
        # nobody is there where any of them would go, nor to come
        return _Weighed(table, checks, sites.fits, None)
    return _Weighed(*_beside(table, sites, intent, objective, cost, prices), sites.fits, first)


class _Table(NamedTuple):
    """The candidates that have an estimate, best objective first, and their columns in the same order."""

    rows: list[Candidate]
    alone: Figures  # on idle GPUs
    load: Load
    seen: Figures  # under it
    served: Attainment | None  # under it; None without a rate
    costs: Column  # NaN: unknown, as are the objectives
    costs_high: Column
    objectives: Column
    weights: Column  # what they are ranked by
    later_s: Column  # of that, by those who are expected


def _table(
    predicted: Sequence[Candidate],
    alone: Figures,
    load: Load,
    intent: Intent,
    objective: Objective,
    cost: Cost,
    prices: Prices,
) -> _Table:
    slowed = (load.slowdowns > 1).any()
    seen = alone.slowed(load.slowdowns) if slowed else alone
    served = None if intent.rate_per_s is None else _served(predicted, alone, intent)
    there = served.slowed(load.slowdowns) if served is not None and slowed else served
    with np.errstate(all="ignore"):  # rows that cannot be used are refused by ``_judge``
        costs = np.where(seen.usable, cost.of(seen, prices), np.nan)
        costs_high = np.where(seen.usable, cost.of(seen.at_high, prices), np.nan)
        idle_s, own = alone.e2e_s, objective.of(seen, prices)
        if objective.rate_per_s is not None and served is not None and there is not None:
            idle_s = served.mean_e2e(objective.rate_per_s)
            own = there.mean_e2e(objective.rate_per_s) if slowed else idle_s
        objectives = np.where(seen.usable, own, np.nan)
        later_s = np.where(np.isinf(idle_s), 0.0, load.later * idle_s)
        taken_s = np.where(np.isinf(idle_s), 0.0, load.taken * idle_s)
        weights = objectives + taken_s + later_s if objective.of_all else objectives
    order = _order(predicted, seen, -weights if objective.maximize else weights)
    rows = [predicted[row] for row in order.tolist()]
    return _Table(
        rows,
        alone.take(order),
        Load(*(column[order] for column in load)),
        seen.take(order),
        None if there is None else there.take(order),
        costs[order],
        costs_high[order],
        objectives[order],
        weights[order],
        later_s[order],
    )


def _checks(table: _Table, intent: Intent, cost: Cost) -> list[Check]:
    configs = [c.config for c in table.rows]
    return checks_as_asked(intent, configs, table.seen, table.costs_high, cost.unit, table.served)


def _served(rows: Sequence[Candidate], full: Figures, intent: Intent) -> Attainment:
    """On idle GPUs."""
    alone = None
    if any(row.alone is not None for row in rows):
        found = (row.alone or row.estimate for row in rows)
        alone = [estimate for estimate in found if estimate is not None]
    return Attainment(paces(full, alone, intent.traffic), intent.traffic)


def _askable(table: _Table, intent: Intent, objective: Objective, cost: Cost) -> list[Estimate | None]:
    """The estimates of the rows that can run at all."""
    refusals = _refusals(table, intent, objective, cost)
    return [None if refusal else row.estimate for row, refusal in zip(table.rows, refusals, strict=True)]


def _first_of(table: _Table, rows: Mask) -> tuple[DeploymentConfig, float] | None:
    """What would be chosen if nobody ran on the GPUs, whose ``table`` this is."""
    row = next(iter(np.flatnonzero(rows).tolist()), None)
    return None if row is None else (table.rows[row].config, float(table.objectives[row]))


def _beside(
    table: _Table, sites: Sites, intent: Intent, objective: Objective, cost: Cost, prices: Prices
) -> tuple[_Table, list[Check]]:
    """The idle ``table`` where each of its rows goes."""
    position = {id(row.estimate): at for at, row in enumerate(table.rows)}  # of the rows of ``sites``

    def there() -> tuple[_Table, list[Check], Rows]:
        found = _table(table.rows, table.alone, sites.load, intent, objective, cost, prices)
        rows = np.array([position[id(row.estimate)] for row in found.rows], dtype=np.intp)
        return found, _checks(found, intent, cost), rows

    def settled() -> tuple[_Table, list[Check], Rows]:
        answer = there()
        late = np.zeros(len(table.rows), np.bool_)
        for check in answer[1]:
            if check.limit.kind in TIMED:
                late[answer[2]] |= check.missed
        return there() if sites.quieten(late & sites.placed) else answer

    found, checks, rows = settled()
    feasible = np.flatnonzero((num_missed(checks, len(rows)) == 0) & sites.placed[rows])
    if not len(feasible):
        sites.ask(np.ones(len(rows), np.bool_))
        found, checks, _ = settled()
    elif found.load.slowdowns[feasible[0]] > 1:
        sites.assume(int(rows[feasible[0]]))
        found, checks, _ = there()
    return found, checks


def _better_idle(
    config: DeploymentConfig, value: float, ordered: Sequence[Ranked], objective: Objective
) -> BetterIdle | None:
    here = next(ranked for ranked in ordered if ranked.config == config)
    return told_of_idle(config, value, objective.unit, here, ordered[0] if ordered[0].feasible else None)


def _refusals(table: _Table, intent: Intent, objective: Objective, cost: Cost) -> list[str | None]:
    """Why each row cannot run at all, or cannot be judged."""
    unknown = np.isnan(table.objectives) | (np.isnan(table.costs) & (intent.budget is not None))
    refusals = [candidate.refusal for candidate in table.rows]
    usable, known = table.seen.usable, ~np.isnan(table.objectives)
    for row in np.flatnonzero(unknown).tolist():
        why = (cost.unknown if known[row] else objective.unknown) if usable[row] else _NOT_USABLE
        refusals[row] = refusals[row] or why
    return refusals


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
    judged: list[Ranked] = []
    values = _or_none(table.objectives)
    is_weighed = table.load.taken.any() or table.load.later.any()
    for row, ((config, estimate, *_), refusal, limits, value, spent, slowdown, weight, later_s) in enumerate(
        zip(
            table.rows,
            _refusals(table, intent, objective, cost),
            limits_missed(checks, len(table.rows)),
            values,
            _or_none(table.costs),
            table.load.slowdowns.tolist(),
            _or_none(table.weights) if is_weighed else values,
            table.later_s.tolist(),
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
            Ranked(
                config, estimate, value, spent, feasible, refusal, limits,
                layout, no_room, verdicts, row, slowdown, weight, later_s,
            )
        )  # fmt: skip
    return judged


def _or_none(column: Column) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in column.tolist()]


def _order(predicted: Sequence[Candidate], seen: Figures, ascending: Column) -> npt.NDArray[np.intp]:
    """Rows by objective, then fewer GPUs, less memory, and the order of configurations; those without end by their
    batch's E2E, unknown ones last."""
    endless_s = np.where(np.isposinf(ascending), seen.e2e_s, 0.0)
    keys = (seen.total_bytes, seen.num_gpus, endless_s, ascending)  # lexsort: the last counts most, NaN sorts last
    order = np.lexsort(keys)
    tied = np.ones(max(len(predicted) - 1, 0), dtype=np.bool_)
    for key in keys:
        left, right = key[order[:-1]], key[order[1:]]
        tied &= (left == right) | (np.isnan(left) & np.isnan(right))
    runs = np.flatnonzero(np.diff(tied, prepend=False, append=False)).reshape(-1, 2)  # first and last of equals
    for first, last in runs.tolist():
        order[first : last + 1] = sorted(order[first : last + 1].tolist(), key=lambda row: predicted[row].config)
    return order
