"""Explanation of a plan: why better-ranked candidates were refused; with none feasible, what it would take.

It changes no verdict. Each relaxation is of one limit alone: following its advice makes the plan feasible.
``nearest`` may take several at once, and ``together`` then says to what each. Among all candidates that can run at
all it prefers those that fit the hardware there is, then those that keep the quality, then the smallest sum of
|ln(needed / allowed)| over the violated limits, then the better rank. Where nothing fits, it prefers fewer missing
GPUs to all that, and of equals what is least short of memory. Where requests wait too long, the limit can give way
or the rate can: each candidate is described by the smaller change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import numpy as np

from fingerprint.estimates import Estimate
from fingerprint.queueing import MODEL_NAME
from planner.attainment import Attainment
from planner.constraints import Check, checks_at_lower_rates, num_missed
from planner.costs import objective_of
from planner.intent import Intent
from planner.lazy_columns import Column, Mask, Rows
from planner.plan import (
    GIB,
    QUALITIES,
    Better,
    Change,
    CombinedRelaxation,
    Layout,
    LimitKind,
    Nearest,
    NoRoom,
    PassedOver,
    Ranked,
    Relaxation,
    Violation,
    WhyNot,
)

__all__ = ["better", "nearest_admitted", "passed_over", "what_it_takes"]

_MOST_BETTER = 5
_TOLD_IN_ORDER = tuple(LimitKind)
_LOOKED_AT = 64  # candidates whose numbers are found
_DIGITS = 9  # of a distance; what differs by less is equally far


def better(ordered: Sequence[Ranked], maximize: bool) -> tuple[Better, ...]:
    """Return the refused that rank above the chosen one, or the best of all where there is none; in the plan's
    order.
    """
    chosen = ordered[0] if ordered and ordered[0].feasible else None
    found: list[Better] = []
    for ranked in ordered:
        if ranked.feasible or ranked.objective is None:
            continue
        if chosen is not None and chosen.objective is not None:
            ahead = ranked.objective > chosen.objective if maximize else ranked.objective < chosen.objective
            if not ahead:
                break  # the refused ones are in order of their objective
        found.append(Better(ranked.config, ranked.objective, ranked.reason or ""))
        if len(found) == _MOST_BETTER:
            break
    return tuple(found)


def passed_over(feasible: Sequence[Ranked], unit: str) -> tuple[PassedOver, ...]:
    """Return the feasible ones that have a better value than the first of them, the chosen one, in the plan's
    order.
    """
    ahead = [one for one in feasible[1:] if one.row < feasible[0].row]
    if not ahead:
        return ()
    measured = next(one for one in sorted(feasible, key=lambda one: one.row) if one.is_measured)
    found = []
    for one in ahead:
        low, high = one.interval or (None, None)
        found.append(PassedOver(one.config, one.objective, low, high, _why_passed_over(one, measured, unit)))
    return tuple(found)


def _why_passed_over(one: Ranked, measured: Ranked, unit: str) -> str:
    """Return why ``one`` was passed over for ``measured``, the best of the measured ones."""
    mine, theirs = one.interval, measured.interval
    may_miss = mine and theirs and (mine[1] < theirs[0] or theirs[1] < mine[0])
    why = (
        "it may miss a limit at the upper end of its interval, as the measured"
        if may_miss
        else "it may be worse than the measured"
    )
    return f"{_told_value(one, unit)} was not measured: {why} {_told_value(measured, unit)}" + (
        " does not" if may_miss else ""
    )


def _told_value(ranked: Ranked, unit: str) -> str:
    """Return a configuration with its objective, and the interval of that."""
    within = "" if ranked.interval is None else ", {:.4g} to {:.4g}".format(*ranked.interval)
    value = "unknown" if ranked.objective is None else f"{ranked.objective:.4g} {unit}"
    return f"{ranked.config} ({value}{within})"


def what_it_takes(
    refused: Sequence[Ranked],
    asked: Sequence[Check],
    intent: Intent,
    *,
    fits: Callable[[Estimate], Layout | NoRoom],
    cost_unit: str,
    served: Attainment | None,
) -> tuple[WhyNot, tuple[Violation, ...]]:
    """Return the nearest point, the relaxations and what the nearest misses, where nothing is feasible.

    Args:
        refused: every candidate that has an estimate, best objective first: the rows of ``asked`` and ``served``.
    """
    able = np.array([ranked.refusal is None for ranked in refused], dtype=np.bool_)
    slower = checks_at_lower_rates(asked, intent, served)
    room = _Room(refused, fits, served if objective_of(intent).rate_per_s is not None else None, intent.replicas)
    alone = [pair for pair in _missed_alone(asked, able) if pair[0].limit.kind is not LimitKind.RATE]
    alone += [pair for pair in _missed_alone(slower, able) if pair[0].limit.kind is LimitKind.RATE]
    alone.sort(key=lambda pair: _TOLD_IN_ORDER.index(pair[0].limit.kind))
    homeless = np.flatnonzero(able & (num_missed(asked, len(able)) == 0)).tolist()
    relaxations = [
        *(_relaxation(check, rows, room, cost_unit) for check, rows in alone),
        _memory(homeless, room),
    ]
    nearest = _nearest(able, asked, slower, room)
    why_not = WhyNot(
        nearest=None if nearest is None else _told_nearest(*nearest, room),
        relaxations=tuple(r for r in relaxations if r is not None),
        combined_relaxation=None if nearest is None else _together(*nearest, room, cost_unit),
    )
    return why_not, () if nearest is None else nearest[1]


class _Room:
    """Asks ``fits`` once per candidate and remembers. Rows are positions in ``refused``.

    Args:
        served: where the objective is a latency at the rate.
        replicas: that share the rate.
    """

    def __init__(
        self,
        refused: Sequence[Ranked],
        fits: Callable[[Estimate], Layout | NoRoom],
        served: Attainment | None,
        replicas: int,
    ) -> None:
        self.refused, self._replicas = refused, replicas
        self._served = served
        self._fits = fits
        self._answers = {row: ranked.no_room for row, ranked in enumerate(refused) if ranked.no_room is not None}
        self._fitting: set[int] = set()

    def lack(self, row: int) -> NoRoom | None:
        """Return why the candidate goes nowhere; None when it has a place."""
        if row not in self._answers and row not in self._fitting:
            estimate = self.refused[row].estimate
            assert estimate is not None, "only candidates with an estimate are asked about"
            answer = self._fits(estimate)
            if isinstance(answer, NoRoom):
                self._answers[row] = answer
            else:
                self._fitting.add(row)
        return self._answers.get(row)

    def first(self, rows: Iterable[int]) -> int | None:
        return next((row for row in rows if self.lack(row) is None), None)

    def objective(self, row: int, changes: Sequence[Change]) -> float | None:
        """Return the objective with ``changes`` made: a latency at a rate is then that at the rate which is
        needed.
        """
        rate = next((change.needed for change in changes if change.limit is LimitKind.RATE), None)
        if rate is None or self._served is None:
            return self.refused[row].objective
        found = float(self._served.take(np.array([row])).mean_e2e(rate / self._replicas)[0])
        return found if math.isfinite(found) else None

    def admits(self, row: int) -> bool:
        return self.lack(row) is None


def _missed_alone(checks: Sequence[Check], able: Mask) -> list[tuple[Check, Rows]]:
    """Return, per limit, the candidates that miss nothing else."""
    lone = able & (num_missed(checks, len(able)) == 1)
    return [(check, np.flatnonzero(lone & check.missed)) for check in checks]


def _relaxation(check: Check, rows: Rows, room: _Room, cost_unit: str) -> Relaxation | None:
    """Return the smallest change of one limit that admits one of ``rows``, which miss nothing else."""
    sign = -1.0 if check.limit.kind is LimitKind.RATE else 1.0
    row = nearest_admitted(rows, sign * check.rough[rows], lambda some: sign * check.actual.of(some), room.admits)
    if row is None or check.actual.at(row) <= 0:  # a rate of 0 is no advice
        return None
    best, change = room.refused[row], _change(check.violation(row))
    model = f" ({MODEL_NAME})" if check.limit.kind is LimitKind.RATE else ""
    text = f"{_told(change, cost_unit)} would admit {best.config}{model}"
    return Relaxation(
        change.limit, change.allowed, change.needed, best.config, room.objective(row, [change]), text
    )


def _memory(homeless: Sequence[int], room: _Room) -> Relaxation | None:
    """Return the smallest addition of free memory on the GPUs there are."""
    short = [
        (lack.shortfall_bytes, row, lack.device)
        for row in homeless
        if (lack := room.lack(row)) is not None
        and lack.missing_gpus == 0 < lack.shortfall_bytes
        and not lack.is_too_large
    ]
    if not short:
        return None
    missing_bytes, row, device = min(short)
    best, change = room.refused[row], Change(LimitKind.MEMORY, 0.0, float(missing_bytes))
    text = f"{_told(change, '', device)} would admit {best.config}"
    return Relaxation(change.limit, change.allowed, change.needed, best.config, best.objective, text)


def _nearest(
    able: Mask, asked: Sequence[Check], slower: Sequence[Check], room: _Room
) -> tuple[int, tuple[Violation, ...]] | None:
    """Return the row that is nearest, and all that it misses, memory included."""
    rows, steps, saturated = np.flatnonzero(able), np.zeros(len(able)), np.zeros(len(able), np.bool_)
    for check in asked:
        if check.limit.kind is LimitKind.QUALITY:
            steps += np.where(check.missed, check.rough - check.limit.allowed, 0.0)
        if check.limit.kind is LimitKind.RATE:  # a wait without end has no distance
            saturated |= check.missed

    def nearest(some: Rows, admits: Callable[[int], bool]) -> int | None:
        def far(rows: Rows, *, rough: bool = False) -> Column:
            at_once, later = (_distance(checks, rows, rough=rough) for checks in (asked, slower))
            return np.where(saturated[rows], later, np.minimum(at_once, later))

        return nearest_admitted(some, far(some, rough=True), far, admits)

    row = None
    for step in np.unique(steps[rows]).tolist():
        row = nearest(rows[steps[rows] == step], room.admits)
        if row is not None:
            break
    else:
        if len(rows):
            row = nearest(_least_homeless(rows, steps, room), lambda row: True)
    if row is None:
        return None
    one = np.array([row])
    is_slower = saturated[row] or _distance(slower, one)[0] < _distance(asked, one)[0]
    missed = [check.violation(row) for check in (slower if is_slower else asked) if check.missed[row]]
    lack = room.lack(row)
    if lack is not None:
        missed.append(Violation(LimitKind.MEMORY, 0.0, float(lack.shortfall_bytes), lack.reason))
    return row, tuple(missed)


def _least_homeless(rows: Rows, steps: Column, room: _Room) -> Rows:
    """Return those with fewest missing GPUs, then least change of quality; those least short of memory first."""
    lacks = [lack for row in rows.tolist() if (lack := room.lack(row)) is not None]
    assert len(lacks) == len(rows), "only asked where nothing fits"
    gpus = np.array([lack.missing_gpus for lack in lacks])
    short_bytes = np.array([lack.shortfall_bytes for lack in lacks])
    fewest = np.lexsort((steps[rows], gpus))[:1]
    some = np.flatnonzero((gpus == gpus[fewest]) & (steps[rows] == steps[rows][fewest]))
    return rows[some[np.argsort(short_bytes[some], kind="stable")]]


def _distance(checks: Sequence[Check], rows: Rows, *, rough: bool = False) -> Column:
    """Return the sum of |ln(actual / allowed)| over the limits but quality; a rate of 0 is infinitely far."""
    total = np.zeros(len(rows))
    for check in checks:
        missed = np.flatnonzero(check.missed[rows])
        if check.limit.kind is LimitKind.QUALITY or not len(missed):
            continue
        if rough:  # what is missed is on the far side of what is allowed
            within = np.minimum if check.limit.kind is LimitKind.RATE else np.maximum
            actual = within(check.rough[rows[missed]], check.limit.allowed)
        else:
            actual = check.actual.of(rows[missed])
        with np.errstate(divide="ignore", invalid="ignore"):
            # Not of the quotient, which is too large a number where the least there is is allowed.
            total[missed] += np.abs(np.log(actual) - np.log(check.limit.allowed))
    return total.round(_DIGITS)


def nearest_admitted(
    rows: Rows, rough: Column, exact: Callable[[Rows], Column], admits: Callable[[int], bool]
) -> int | None:
    """Return which of the ``rows`` that are admitted has about the smallest number; of equals the first.

    Of thousands only the nearest by ``rough``, about their numbers, are looked at.
    """
    places = np.argsort(rough, kind="stable")
    for first in range(0, len(places), _LOOKED_AT):
        near = rows[np.sort(places[first : first + _LOOKED_AT])]
        some = near[[admits(row) for row in near.tolist()]]
        if len(some):
            return int(some[np.argmin(exact(some))])
    return None


def _told_nearest(row: int, missed: tuple[Violation, ...], room: _Room) -> Nearest:
    best, reason = room.refused[row], "; ".join(violation.text for violation in missed)
    if room.lack(row) is None:
        text = f"{best.config} comes nearest: {reason}"
    elif len(missed) > 1:
        text = f"nothing fits the free memory; {best.config} comes nearest: {reason}"
    else:
        text = f"nothing fits the free memory; {best.config} is the least short of it: {reason}"
    return Nearest(best.config, room.objective(row, [_change(violation) for violation in missed]), text)


def _together(row: int, missed: tuple[Violation, ...], room: _Room, cost_unit: str) -> CombinedRelaxation | None:
    """Return what all the limits that the nearest point misses would have to be together.

    None where it is one alone, or where no number would do: GPUs are missing or too small, or only a rate of 0
    keeps the SLO.
    """
    lack = room.lack(row)
    is_lost = lack is not None and (lack.missing_gpus > 0 or lack.is_too_large)
    if len(missed) < 2 or is_lost or any(v.actual <= 0 for v in missed):
        return None
    best, changes = room.refused[row], tuple(_change(violation) for violation in missed)
    device = "GPU" if lack is None else lack.device
    told = " and ".join(_told(change, cost_unit, device) for change in changes)
    text = f"{told}, together, would admit {best.config}"
    return CombinedRelaxation(changes, best.config, room.objective(row, changes), text)


def _change(violation: Violation) -> Change:
    """Return what the limit of ``violation`` would have to be, rounded to 3 digits such that it is enough."""
    limit, allowed, actual, _ = violation
    if limit in (LimitKind.QUALITY, LimitKind.MEMORY):
        return Change(limit, allowed, actual)
    return Change(limit, allowed, _rounded(actual, math.floor) if limit is LimitKind.RATE else _up(actual))


def _told(change: Change, cost_unit: str, device: str = "GPU") -> str:
    limit, allowed, needed = change.limit, change.allowed, change.needed
    match limit:
        case LimitKind.QUALITY:
            return f"quality={QUALITIES[int(allowed)]} -> {QUALITIES[int(needed)]}"
        case LimitKind.MEMORY:
            return f"{_up(needed / GIB):g} GiB more free memory on each {device}"
        case LimitKind.RATE:
            unit = "requests/s"
        case LimitKind.BUDGET:
            unit = cost_unit
        case _:
            unit = "s"
    return f"{limit}={allowed:g} -> {needed:g} {unit}"


def _up(value: float) -> float:
    """Round up to 3 digits, so that the number that is printed is enough."""
    return _rounded(value, math.ceil)


def _rounded(value: float, how: Callable[[Fraction], int]) -> float:
    if float(f"{value:.3g}") == value:
        return value  # 0.4 is a hair above four tenths, and yet 0.4 is enough
    exact = Fraction(value)  # 0.1 + 0.2 is above 0.3, and must round up to 0.301
    step = Fraction(10) ** (math.floor(math.log10(value)) - 2)
    return float(how(exact / step) * step)
