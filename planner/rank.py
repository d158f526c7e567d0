"""Ranking: candidates and an intent in, an ordered plan out.

Asks whether a candidate fits the cluster by calling a function it is given, and knows no GPU.

Rules.

*   A candidate is refused by the first of: its own refusal (shape, engine, no estimate); the limits, all of them
    listed; memory.
*   The limits are judged as :mod:`planner.constraints` says; the objective on the value itself. With a rate a
    latency is the mean request's at that rate; where it is not served that has no end, and a batch's latency
    orders those.
*   Of those that are feasible a measured one is preferred to those that are not (:mod:`planner.evidence`). The
    chosen one is listed first, the rest by their value: one with a better value that was passed over is next.
*   Ties are broken by fewer GPUs, then less memory, then the order of configurations, so that the order in which
    candidates are listed never matters. The configurations of ``candidates`` are distinct.
*   ``fits`` is called at most once per candidate, best objective first, and only for candidates that nothing
    else refuses; when none of them fits, also for those that relaxing a limit could admit.
*   All times are those of idle GPUs. Interference is counted where configuration and GPUs are chosen together
    (``placement.fleet``), and by placement policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.estimates import Estimate
from fingerprint.queueing import MODEL_NAME
from planner.attainment import Attainment
from planner.constraints import (
    Check,
    Verdicts,
    checks_as_asked,
    kept_at_the_upper_end,
    limits_missed,
    num_missed,
    told_of,
)
from planner.costs import COSTS, Column, Cost, Figures, Objective, Prices, figures, objective_of
from planner.evidence import Ends, Evidence, indistinguishable, preferred, rivals
from planner.explain import better, passed_over, what_it_takes
from planner.intent import Intent
from planner.lazy_columns import Mask, Rows
from planner.normal_distribution import Z_OF_INTERVAL
from planner.plan import (
    Candidate,
    Layout,
    Limit,
    LimitKind,
    NoRoom,
    Plan,
    Ranked,
    Violation,
    WhyNot,
)

__all__ = ["Fits", "best_of", "rank", "rivals_of"]

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
    table = _table(candidates, intent, objective, cost, prices)
    checks, served = _checks(table, intent, cost), table.served
    ends = _ends_of_kept(table, checks, objective, prices)
    evidence = _evidence(table, intent, objective, prices)
    evidence = evidence._replace(ends=lambda rows: Ends(ends.low[rows], ends.high[rows]))
    verdicts = Verdicts(checks, served, intent.rate_per_s, ends)
    judged = _judge(table, checks, verdicts, intent, objective, cost, fits)
    feasible = _chosen_first([ranked for ranked in judged if ranked.feasible], evidence)
    refused = [ranked for ranked in judged if not ranked.feasible]
    blank = [
        Ranked(
            c.config,
            None,
            None,
            None,
            False,
            c.refusal or "nothing is predicted of this configuration",
            is_unknown=c.refusal is None,
        )
        for c in candidates
        if c.estimate is None
    ]
    blank.sort(key=lambda ranked: (ranked.config.num_gpus, ranked.config))
    ordered = (*feasible, *refused, *blank)
    why_not, misses = WhyNot(), tuple[Violation, ...]()
    if not feasible:
        why_not, misses = what_it_takes(refused, checks, intent, fits=fits, cost_unit=cost.unit, served=served)
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
        nearest_misses=misses,
        passed_over=passed_over(feasible, objective.unit),
        indistinguishable=_like_the_first(feasible, evidence),
    )


def best_of(
    candidates: Sequence[Candidate],
    intent: Intent,
    *,
    fits: Fits,
    prices: Prices = _NO_PRICES,
) -> Ranked | None:
    """Return what ``rank`` chooses, with nothing explained."""
    objective, cost = objective_of(intent), COSTS[intent.cost_model]
    table = _table(candidates, intent, objective, cost, prices)
    checks = _checks(table, intent, cost)
    verdicts = Verdicts(checks, table.served, intent.rate_per_s)
    judged = _judge(table, checks, verdicts, intent, objective, cost, fits)
    feasible = [ranked for ranked in judged if ranked.feasible]
    return next(iter(_chosen_first(feasible, _evidence(table, intent, objective, prices))), None)


def rivals_of(
    measured: Candidate, predicted: Sequence[Candidate], intent: Intent, prices: Prices = _NO_PRICES
) -> list[Candidate]:
    """Return the candidates that are chosen before the best ``measured`` one if they fit, the best first.

    Args:
        predicted: candidates that were not measured; all keep every limit, as ``measured`` does.
    """
    objective, cost = objective_of(intent), COSTS[intent.cost_model]
    table = _table([measured, *predicted], intent, objective, cost, prices)
    row = next(at for at, one in enumerate(table.rows) if one.config == measured.config)
    found = rivals(np.arange(row), row, _evidence(table, intent, objective, prices))
    return [table.rows[at] for at in found.tolist()]


def _rows(ranked: Sequence[Ranked]) -> Rows:
    return np.array([one.row for one in ranked], dtype=np.intp)


def _chosen_first(feasible: list[Ranked], evidence: Evidence) -> list[Ranked]:
    """Return ``feasible``, best first, with the one that is chosen before all of them."""
    chosen = preferred(_rows(feasible), evidence)
    if chosen is None or feasible[0].row == chosen:
        return feasible
    return sorted(feasible, key=lambda ranked: ranked.row != chosen)


def _like_the_first(feasible: Sequence[Ranked], evidence: Evidence) -> tuple[int, ...]:
    """Return the positions of those that cannot be distinguished from the first one."""
    if not feasible:
        return ()
    return tuple(np.flatnonzero(indistinguishable(_rows(feasible), feasible[0].row, evidence)).tolist()[1:])


class _Table(NamedTuple):
    """The candidates that have an estimate, best objective first, and their columns in the same order."""

    rows: list[Candidate]
    figures: Figures
    served: Attainment | None  # None without a rate
    costs: Column  # NaN: unknown, as are the objectives
    costs_high: Column
    objectives: Column


def _table(
    candidates: Sequence[Candidate], intent: Intent, objective: Objective, cost: Cost, prices: Prices
) -> _Table:
    predicted = [c for c in candidates if c.estimate is not None]
    seen = figures([c.estimate for c in predicted if c.estimate is not None])
    served = None if intent.rate_per_s is None else _served(predicted, seen, intent)
    with np.errstate(all="ignore"):  # rows that cannot be used are refused by ``_judge``
        costs = np.where(seen.usable, cost.of(seen, prices), np.nan)
        costs_high = np.where(seen.usable, cost.of(seen.at_high, prices), np.nan)
        objectives = _objectives(seen, served, objective, prices)
    order = _order(predicted, seen, -objectives if objective.maximize else objectives)
    return _Table(
        [predicted[row] for row in order.tolist()],
        seen.take(order),
        None if served is None else served.take(order),
        costs[order],
        costs_high[order],
        objectives[order],
    )


def _objectives(
    seen: Figures, served: Attainment | None, objective: Objective, prices: Prices, z: float = 0.0
) -> Column:
    """Return each row's objective; NaN: it cannot be used.

    Args:
        z: where in their intervals the times of ``served`` are taken, in standard deviations.
    """
    own = objective.of(seen, prices)
    if objective.rate_per_s is not None and served is not None:
        own = served.mean_e2e(objective.rate_per_s, z)
    return np.where(seen.usable, own, np.nan)


def _ends(table: _Table, rows: Rows, objective: Objective, prices: Prices) -> Ends:
    """Return the ends of each row's objective."""
    seen = table.figures.take(rows)
    served = None if table.served is None else table.served.take(rows)
    with np.errstate(all="ignore"):
        least = _objectives(seen.at_low, served, objective, prices, -Z_OF_INTERVAL)
        most = _objectives(seen.at_high, served, objective, prices, Z_OF_INTERVAL)
    return Ends(np.minimum(least, most), np.maximum(least, most))


def _ends_of_kept(table: _Table, checks: Sequence[Check], objective: Objective, prices: Prices) -> Ends:
    """Return the ends of each row's objective where it keeps every limit; NaN for all other rows."""
    rows = np.flatnonzero(num_missed(checks, len(table.rows)) == 0)
    if len(rows) == len(table.rows):
        return _ends(table, rows, objective, prices)
    nothing = np.full(len(table.rows), np.nan)
    found = Ends(nothing, nothing.copy())
    found.low[rows], found.high[rows] = _ends(table, rows, objective, prices)
    return found


def _evidence(table: _Table, intent: Intent, objective: Objective, prices: Prices) -> Evidence:
    def keeps(rows: Rows) -> Mask:
        served = None if table.served is None else table.served.take(rows)
        return kept_at_the_upper_end(intent, served, len(rows))

    return Evidence(
        np.array([row.estimate is not None and row.estimate.is_measured for row in table.rows], dtype=np.bool_),
        lambda rows: _ends(table, rows, objective, prices),
        keeps,
        objective.maximize,
    )


def _checks(table: _Table, intent: Intent, cost: Cost) -> list[Check]:
    configs = [c.config for c in table.rows]
    return checks_as_asked(intent, configs, table.figures, table.costs_high, cost.unit, table.served)


def _served(rows: Sequence[Candidate], full: Figures, intent: Intent) -> Attainment:
    found = (row.alone or row.estimate for row in rows)
    alone = [estimate for estimate in found if estimate is not None]
    return Attainment.of_estimates(full, alone, intent.traffic, intent.replicas)


def _refusals(table: _Table, intent: Intent, objective: Objective, cost: Cost) -> list[str | None]:
    """Return why each row cannot run at all, or cannot be judged."""
    unknown = np.isnan(table.objectives) | (np.isnan(table.costs) & (intent.budget is not None))
    refusals = [candidate.refusal for candidate in table.rows]
    usable, known = table.figures.usable, ~np.isnan(table.objectives)
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
    """Return the verdict on every candidate of ``table``."""
    judged: list[Ranked] = []
    for row, (candidate, refusal, limits, value, spent) in enumerate(
        zip(
            table.rows,
            _refusals(table, intent, objective, cost),
            limits_missed(checks, len(table.rows)),
            _or_none(table.objectives),
            _or_none(table.costs),
            strict=True,
        )
    ):
        config, estimate, own_refusal, _ = candidate
        is_unknown = refusal is not None and own_refusal is None
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
                layout, no_room, verdicts, row, is_unknown,
            )
        )  # fmt: skip
    return judged


def _or_none(column: Column) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in column.tolist()]


def _order(predicted: Sequence[Candidate], seen: Figures, ascending: Column) -> npt.NDArray[np.intp]:
    """Return the rows by objective, then fewer GPUs, less memory, and the order of configurations.

    Rows without end are ordered by their batch's E2E, unknown ones are last.
    """
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
