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
*   Where other deployments run on the GPUs (:mod:`planner.beside`), the objective, the cost and the limits are
    those of the times where a candidate would go. What misses a limit on idle GPUs is asked for its place only
    where nothing is feasible; else it is taken to be as slow as the chosen one.
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
from planner.normal_distribution import Z_OF_INTERVAL
from planner.paces import paces
from planner.plan import (
    TIMED,
    BetterIdle,
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
from planner.queueing import MODEL_NAME

__all__ = ["best_of", "rank", "rivals_of"]

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
    served, (own, weights) = table.served, _ends_of_kept(table, checks, objective, prices)
    evidence = _evidence(table, intent, objective, prices)
    evidence = evidence._replace(ends=lambda rows: Ends(weights.low[rows], weights.high[rows]))
    verdicts = Verdicts(checks, served, intent.rate_per_s, (own, weights))
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
        why_not, misses = what_it_takes(
            refused, checks, table.seen, intent, fits=fits, cost_unit=cost.unit, served=served
        )
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
        better_idle=None if first is None else _better_idle(*first, ordered, objective),
        passed_over=passed_over(feasible, objective.unit),
        indistinguishable=_like_the_first(feasible, evidence),
    )


def best_of(
    candidates: Sequence[Candidate],
    intent: Intent,
    *,
    fits: Fits,
    prices: Prices = _NO_PRICES,
    neighbours: Neighbours | None = None,
) -> Ranked | None:
    """Return what ``rank`` chooses, with nothing explained."""
    objective = objective_of(intent)
    table, checks, fits, _ = _weighed(candidates, intent, fits, prices, neighbours)
    verdicts = Verdicts(checks, table.served, intent.rate_per_s)
    judged = _judge(table, checks, verdicts, intent, objective, COSTS[intent.cost_model], fits)
    feasible = [ranked for ranked in judged if ranked.feasible]
    return next(iter(_chosen_first(feasible, _evidence(table, intent, objective, prices))), None)


def rivals_of(
    measured: Candidate, predicted: Sequence[Candidate], intent: Intent, prices: Prices = _NO_PRICES
) -> list[Candidate]:
    """Return the candidates that are chosen before the best ``measured`` one on idle GPUs if they fit, the best
    first.

    Args:
        predicted: candidates that were not measured; all keep every limit on idle GPUs, as ``measured`` does.
    """
    objective, cost = objective_of(intent), COSTS[intent.cost_model]
    among = [measured, *predicted]
    alone = figures([one.estimate for one in among if one.estimate is not None])
    table = _table(among, alone, idle(len(among)), intent, objective, cost, prices)
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


class _Weighed(NamedTuple):
    """Everything on which the verdicts rest."""

    table: _Table
    checks: list[Check]
    fits: Fits
    first: tuple[DeploymentConfig, float] | None  # on shared GPUs: what is best on idle ones, and its objective


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
    first = _first_of(table, kept & sites.placed, _evidence(table, intent, objective, prices))
    if first is not None and not (sites.load.slowdowns > 1).any() and not sites.load.later.any():
        # no deployment runs where any of them would go, and none is expected
        return _Weighed(table, checks, sites.fits, None)
    return _Weighed(*_beside(table, sites, intent, objective, cost, prices), sites.fits, first)


class _Table(NamedTuple):
    """The candidates that have an estimate, best objective first, and their columns in the same order."""

    rows: list[Candidate]
    alone: Figures  # on idle GPUs
    load: Load
    seen: Figures  # under it
    idle: Attainment | None  # on idle GPUs; None without a rate
    served: Attainment | None  # under it
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
        objectives, weights, later_s = _weights(alone, seen, load, served, there, objective, prices)
    order = _order(predicted, seen, -weights if objective.maximize else weights)
    rows = [predicted[row] for row in order.tolist()]
    ordered = alone.take(order)
    return _Table(
        rows,
        ordered,
        Load(*(column[order] for column in load)),
        seen.take(order) if slowed else ordered,
        None if served is None else served.take(order),
        None if there is None else there.take(order),
        costs[order],
        costs_high[order],
        objectives[order],
        weights[order],
        later_s[order],
    )


def _weights(
    alone: Figures,
    seen: Figures,
    load: Load,
    idle: Attainment | None,
    there: Attainment | None,
    objective: Objective,
    prices: Prices,
    z: float = 0.0,
) -> tuple[Column, Column, Column]:
    """Return each row's objective, what it is ranked by, and how much of that is by the expected deployments.

    Args:
        z: where in their intervals the times of ``idle`` and ``there`` are taken, in standard deviations.
    """
    idle_s, own = alone.e2e_s, objective.of(seen, prices)
    if objective.rate_per_s is not None and idle is not None and there is not None:
        idle_s = idle.mean_e2e(objective.rate_per_s, z)
        own = idle_s if there is idle else there.mean_e2e(objective.rate_per_s, z)
    objectives = np.where(seen.usable, own, np.nan)
    later_s = np.where(np.isinf(idle_s), 0.0, load.later * idle_s)
    taken_s = np.where(np.isinf(idle_s), 0.0, load.taken * idle_s)
    weights = objectives + taken_s + later_s if objective.of_all else objectives
    return objectives, weights, later_s


def _ends(table: _Table, rows: Rows, objective: Objective, prices: Prices) -> tuple[Ends, Ends]:
    """Return the ends of each row's objective, and of what it is ranked by."""
    alone = table.alone.take(rows)
    seen = alone if table.seen is table.alone else table.seen.take(rows)
    load = Load(*(column[rows] for column in table.load))
    idle = None if table.idle is None else table.idle.take(rows)
    there = None if table.served is None else idle if table.served is table.idle else table.served.take(rows)
    with np.errstate(all="ignore"):
        least = _weights(alone.at_low, seen.at_low, load, idle, there, objective, prices, -Z_OF_INTERVAL)
        most = _weights(alone.at_high, seen.at_high, load, idle, there, objective, prices, Z_OF_INTERVAL)
    own, weights = (Ends(np.minimum(a, b), np.maximum(a, b)) for a, b in zip(least[:2], most[:2], strict=True))
    return own, weights


def _ends_of_kept(
    table: _Table, checks: Sequence[Check], objective: Objective, prices: Prices
) -> tuple[Ends, Ends]:
    """Return what each row gives, and what it is ranked by, where it keeps every limit; NaN for all other rows."""
    rows = np.flatnonzero(num_missed(checks, len(table.rows)) == 0)
    if len(rows) == len(table.rows):
        return _ends(table, rows, objective, prices)
    nothing = np.full(len(table.rows), np.nan)
    found = Ends(nothing.copy(), nothing.copy()), Ends(nothing.copy(), nothing)
    for whole, kept in zip(found, _ends(table, rows, objective, prices), strict=True):
        whole.low[rows], whole.high[rows] = kept
    return found


def _evidence(table: _Table, intent: Intent, objective: Objective, prices: Prices) -> Evidence:
    def keeps(rows: Rows) -> Mask:
        served = None if table.served is None else table.served.take(rows)
        return kept_at_the_upper_end(intent, served, len(rows))

    return Evidence(
        np.array([row.estimate is not None and row.estimate.is_measured for row in table.rows], dtype=np.bool_),
        lambda rows: _ends(table, rows, objective, prices)[1],
        keeps,
        objective.maximize,
    )


def _checks(table: _Table, intent: Intent, cost: Cost) -> list[Check]:
    configs = [c.config for c in table.rows]
    return checks_as_asked(intent, configs, table.seen, table.costs_high, cost.unit, table.served)


def _served(rows: Sequence[Candidate], full: Figures, intent: Intent) -> Attainment:
    """Return the service on idle GPUs."""
    alone = None
    if any(row.alone is not None for row in rows):
        found = (row.alone or row.estimate for row in rows)
        alone = [estimate for estimate in found if estimate is not None]
    return Attainment(paces(full, alone, intent.traffic), intent.traffic)


def _askable(table: _Table, intent: Intent, objective: Objective, cost: Cost) -> list[Estimate | None]:
    """Return the estimates of the rows that can run at all."""
    refusals = _refusals(table, intent, objective, cost)
    return [None if refusal else row.estimate for row, refusal in zip(table.rows, refusals, strict=True)]


def _first_of(table: _Table, rows: Mask, evidence: Evidence) -> tuple[DeploymentConfig, float] | None:
    """Return what would be chosen on idle GPUs, whose ``table`` this is."""
    row = preferred(np.flatnonzero(rows), evidence)
    return None if row is None else (table.rows[row].config, float(table.objectives[row]))


def _beside(
    table: _Table, sites: Sites, intent: Intent, objective: Objective, cost: Cost, prices: Prices
) -> tuple[_Table, list[Check]]:
    """Return the idle ``table`` where each of its rows goes."""
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
    else:
        chosen = preferred(feasible, _evidence(found, intent, objective, prices))
        if chosen is not None and found.load.slowdowns[chosen] > 1:
            sites.assume(int(rows[chosen]))
            found, checks, _ = there()
    return found, checks


def _better_idle(
    config: DeploymentConfig, value: float, ordered: Sequence[Ranked], objective: Objective
) -> BetterIdle | None:
    here = next(ranked for ranked in ordered if ranked.config == config)
    return told_of_idle(config, value, objective.unit, here, ordered[0] if ordered[0].feasible else None)


def _refusals(table: _Table, intent: Intent, objective: Objective, cost: Cost) -> list[str | None]:
    """Return why each row cannot run at all, or cannot be judged."""
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
    """Return the verdict on every candidate of ``table``."""
    judged: list[Ranked] = []
    values = _or_none(table.objectives)
    is_weighed = table.load.taken.any() or table.load.later.any()
    for row, (candidate, refusal, limits, value, spent, slowdown, weight, later_s) in enumerate(
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
                layout, no_room, verdicts, row, slowdown, weight, later_s, is_unknown,
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
