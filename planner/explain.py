"""Why the better-ranked candidates were refused; with nothing feasible, what it would take. Changes no verdict.

Each relaxation is of one limit alone: following its advice makes the plan feasible. ``nearest`` may take several
at once; among all candidates that can run at all it prefers those that fit the hardware there is, then those that
keep the quality, then the smallest sum of |ln(needed / allowed)| over the violated limits, then the better rank.
Where requests wait too long, the limit can give way or the rate can: each candidate is told by the smaller change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from planner.costs import figures
from planner.intent import Intent
from planner.plan import (
    GIB,
    INTERVAL_NOTE,
    QUALITIES,
    Better,
    Layout,
    LimitKind,
    Nearest,
    NoRoom,
    Ranked,
    Relaxation,
    Violation,
    WhyNot,
)
from planner.queueing import MODEL_NAME, md1_largest_utilisation

__all__ = ["WhatIf", "explain"]

_MOST_BETTER = 5
_NUMERIC = (LimitKind.TTFT, LimitKind.TPOT, LimitKind.E2E, LimitKind.BUDGET)
_MARGIN = 1 - 1e-6  # for rates found by bisection
_WAITING = frozenset({LimitKind.TTFT, LimitKind.E2E, LimitKind.RATE})


class WhatIf(NamedTuple):
    """Another cluster to ask about, and what to call it: ``one more idle GPU``."""

    label: str
    fits: Callable[[Estimate], Layout | NoRoom]


def explain(
    ordered: Sequence[Ranked],
    intent: Intent,
    *,
    fits: Callable[[Estimate], Layout | NoRoom],
    what_if: Sequence[WhatIf],
    maximize: bool,
    cost_unit: str,
) -> WhyNot:
    """Why not, for a plan's candidates in their final order."""
    chosen = ordered[0] if ordered and ordered[0].feasible else None
    better = _better(ordered, chosen, maximize)
    if chosen is not None:
        return WhyNot(better)
    able = [ranked for ranked in ordered if ranked.refusal is None and ranked.estimate is not None]
    alone: dict[LimitKind, list[Ranked]] = {limit: [] for limit in LimitKind}
    for ranked in able:
        if len(ranked.violations) == 1:
            alone[ranked.violations[0].limit].append(ranked)
    room = _Room(fits)
    relaxations = [
        *(_numeric(limit, alone[limit], room, cost_unit) for limit in _NUMERIC),
        _rate(able, intent, room),
        _quality(alone[LimitKind.QUALITY], room),
        _memory(alone[LimitKind.MEMORY]),
        *(_elsewhere(alone[LimitKind.MEMORY], other) for other in what_if),
    ]
    return WhyNot(
        better, _nearest(_with_rates(able, intent), room), tuple(r for r in relaxations if r is not None)
    )


class _Room:
    """Asks ``fits`` once per candidate and remembers."""

    def __init__(self, fits: Callable[[Estimate], Layout | NoRoom]) -> None:
        self._fits = fits
        self._answers: dict[DeploymentConfig, bool] = {}

    def has(self, ranked: Ranked) -> bool:
        if ranked.no_room is not None:
            return False
        if ranked.config not in self._answers:
            assert ranked.estimate is not None, "only candidates with an estimate are asked about"
            self._answers[ranked.config] = not isinstance(self._fits(ranked.estimate), NoRoom)
        return self._answers[ranked.config]

    def first(self, candidates: Sequence[Ranked]) -> Ranked | None:
        return next((ranked for ranked in candidates if self.has(ranked)), None)


def _better(ordered: Sequence[Ranked], chosen: Ranked | None, maximize: bool) -> tuple[Better, ...]:
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


def _up(value: float) -> float:
    """Rounded up to 3 digits, so that the number that is printed is enough."""
    return _rounded(value, math.ceil)


def _down(value: float) -> float:
    return _rounded(value, math.floor)


def _rounded(value: float, how: Callable[[Fraction], int]) -> float:
    exact = Fraction(value)  # 0.1 + 0.2 is above 0.3, and must round up to 0.301
    step = Fraction(10) ** (math.floor(math.log10(value)) - 2)
    return float(how(exact / step) * step)


def _numeric(limit: LimitKind, alone: Sequence[Ranked], room: _Room, cost_unit: str) -> Relaxation | None:
    """The smallest change of ``limit`` that admits one of ``alone``, which miss nothing else."""
    best = room.first(sorted(alone, key=_actual))  # stable: of equals the better-ranked
    if best is None:
        return None
    allowed, needed = best.violations[0].allowed, _up(_actual(best))
    unit = cost_unit if limit is LimitKind.BUDGET else "s"
    text = f"{limit}={allowed:g} -> {needed:g} {unit} would admit {best.config}"
    return Relaxation(limit, allowed, needed, best.config, best.objective, text)


def _rates(able: Sequence[Ranked], intent: Intent) -> tuple[list[float], list[bool]]:
    """Per candidate, the highest rate whose wait leaves it within TTFT and E2E, and whether it is within them when
    nobody waits. A limit that it misses even then is told without any wait, so it leaves no time for one."""
    seen = figures([ranked.estimate for ranked in able if ranked.estimate is not None])
    slack_s, meets = np.full_like(seen.e2e_s, np.inf), np.ones(len(able), dtype=np.bool_)
    slo = intent.slo
    for allowed_s, high_s in (
        (None if slo is None else slo.ttft_s, seen.ttft_high_s),
        (None if slo is None else slo.e2e_s, seen.e2e_high_s),
    ):
        if allowed_s is not None:
            left_s = allowed_s - high_s
            meets &= left_s >= 0
            slack_s = np.minimum(slack_s, np.maximum(left_s, 0.0))
    rates: list[float] = (
        md1_largest_utilisation(slack_s / seen.service_s, intent.percentile) / seen.service_s
    ).tolist()
    return rates, meets.tolist()


def _rate(able: Sequence[Ranked], intent: Intent, room: _Room) -> Relaxation | None:
    """The highest rate at which some candidate, refused for its queue alone, meets everything."""
    allowed = intent.rate_per_s
    queued = [r for r in able if r.violations and all(v.limit in _WAITING for v in r.violations)]
    if allowed is None or not queued:
        return None
    rates, meets = _rates(queued, intent)
    served = [i for i, rate in enumerate(rates) if meets[i] and rate > 0]  # 0: below what the bisection resolves
    for index in sorted(served, key=lambda i: -rates[i]):
        best, needed = queued[index], _down(rates[index] * _MARGIN)
        if needed < allowed and room.has(best):
            text = f"rate={allowed:g} -> {needed:g} requests/s would admit {best.config} ({MODEL_NAME})"
            return Relaxation(LimitKind.RATE, allowed, needed, best.config, best.objective, text)
    return None


def _with_rates(able: Sequence[Ranked], intent: Intent) -> list[Ranked]:
    """The same candidates. Where the queue is too long: the rate at which the SLO would hold and the
    limits missed even then, or the wait at the asked rate where it ends and that is the smaller change.
    """
    rows = [i for i, r in enumerate(able) if any(v.limit in _WAITING for v in r.violations)]
    told = list(able)
    if intent.rate_per_s is None or not rows:
        return told
    rates, _ = _rates([able[i] for i in rows], intent)
    for i, rate in zip(rows, rates, strict=True):
        slower = _at_rate(able[i], intent, intent.rate_per_s, rate * _MARGIN)
        saturated = any(v.limit is LimitKind.RATE for v in able[i].violations)
        if saturated or _distance(slower) < _distance(able[i]):
            told[i] = slower
    return told


def _at_rate(ranked: Ranked, intent: Intent, allowed: float, rate: float) -> Ranked:
    """``ranked`` with ``rate`` to blame for its waits, and TTFT and E2E as they are when nobody waits."""
    note = "" if intent.slo is None else f"within the SLO at p{intent.percentile:g}"
    assert ranked.estimate is not None, "only candidates with an estimate wait"
    idle_s = {LimitKind.TTFT: ranked.estimate.ttft_s.high, LimitKind.E2E: ranked.estimate.e2e_s.high}
    others = [
        v._replace(actual=idle_s.get(v.limit, v.actual), note=INTERVAL_NOTE if v.limit in idle_s else v.note)
        for v in ranked.violations
        if v.limit is not LimitKind.RATE
    ]
    kept = tuple(v for v in others if v.limit not in idle_s or v.actual > v.allowed)
    return ranked._replace(violations=(Violation(LimitKind.RATE, allowed, rate, note), *kept))


def _quality(alone: Sequence[Ranked], room: _Room) -> Relaxation | None:
    """The strictest quality that admits one of ``alone``, and the best-ranked of those."""
    best = room.first(sorted(alone, key=_actual))
    if best is None:
        return None
    allowed, needed = best.violations[0].allowed, _actual(best)
    text = f"quality={QUALITIES[int(allowed)]} -> {QUALITIES[int(needed)]} would admit {best.config}"
    return Relaxation(LimitKind.QUALITY, allowed, needed, best.config, best.objective, text)


def _memory(alone: Sequence[Ranked]) -> Relaxation | None:
    """The smallest addition of free memory on the GPUs there are."""
    short = (
        ranked
        for ranked in alone
        if (room := ranked.no_room) is not None and room.missing_gpus == 0 < room.shortfall_bytes
    )
    best = min(short, key=_actual, default=None)
    if best is None:
        return None
    missing = _actual(best)
    text = f"{_up(missing / GIB):g} GiB more free memory on each GPU would admit {best.config}"
    return Relaxation(LimitKind.MEMORY, 0.0, missing, best.config, best.objective, text)


def _elsewhere(alone: Sequence[Ranked], other: WhatIf) -> Relaxation | None:
    """The best candidate that only memory refuses here and that fits the other cluster."""
    for ranked in alone:
        if ranked.estimate is not None and not isinstance(other.fits(ranked.estimate), NoRoom):
            text = f"{other.label} would admit {ranked.config}"
            return Relaxation(LimitKind.MEMORY, 0.0, _actual(ranked), ranked.config, ranked.objective, text)
    return None


def _distance(ranked: Ranked) -> tuple[float, float]:
    """(quality steps, sum of |ln ratio|) of what ``ranked`` violates, memory apart."""
    steps = ratios = 0.0
    for limit, allowed, actual, _ in ranked.violations:
        if limit is LimitKind.QUALITY:
            steps += actual - allowed
        elif limit is not LimitKind.MEMORY:
            ratios += abs(math.log(actual / allowed)) if actual > 0 else math.inf
    return steps, ratios


def _nearest(able: Sequence[Ranked], room: _Room) -> Nearest | None:
    best = room.first(sorted(able, key=_distance))
    if best is not None:
        text = f"{best.config} comes nearest: {best.reason}"
        return Nearest(best.config, best.objective, best.violations, text)
    short = [(r.no_room.missing_gpus, _actual(r), i) for i, r in enumerate(able) if r.no_room is not None]
    if not short:
        return None
    least = able[min(short)[2]]
    text = f"nothing fits the free memory; {least.config} is the least short of it: {least.reason}"
    return Nearest(least.config, least.objective, least.violations, text)


def _actual(ranked: Ranked) -> float:
    """What the only limit that ``ranked`` misses would have to be."""
    return ranked.violations[0].actual
