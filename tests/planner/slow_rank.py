"""The rules of ``planner.rank`` and ``planner.explain`` with a rate, every number of every row computed first.

The fast ranking must give the same. Every candidate fits, none is refused, and there is no budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate, Quantity
from planner.attainment import Attainment, Metric
from planner.costs import COSTS, Prices, figures
from planner.intent import Intent, IntentKind, quality_needed
from planner.plan import QUALITIES, Candidate, LimitKind

METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2e")
MARGIN = 1 - 1e-6


class Number(NamedTuple):
    """Values of one limit over all candidates."""

    kind: LimitKind
    allowed: float
    actual: np.ndarray
    missed: np.ndarray


class Slow(NamedTuple):
    """Rows are in order of the objective: the cost, or the mean latency, endless ones by their batch's."""

    configs: list[DeploymentConfig]
    asked: list[Number]
    slower: list[Number]
    risk: np.ndarray
    objectives: np.ndarray

    @property
    def feasible(self) -> set[DeploymentConfig]:
        return {c for c, missed in zip(self.configs, count(self.asked) > 0, strict=True) if not missed}

    def actual(self, row: int) -> list[tuple[LimitKind, float]]:
        return [(n.kind, float(n.actual[row])) for n in self.asked if n.missed[row]]

    def nearest(self) -> tuple[DeploymentConfig, list[tuple[LimitKind, float]]]:
        steps, ratios = distances(self.asked)
        _, slower_ratios = distances(self.slower)
        saturated = next(n.missed for n in self.asked if n.kind is LimitKind.RATE)
        told_slower = saturated | (slower_ratios < ratios)
        row = int(np.lexsort((np.where(told_slower, slower_ratios, ratios), steps))[0])
        told = self.slower if told_slower[row] else self.asked
        return self.configs[row], [(n.kind, float(n.actual[row])) for n in told if n.missed[row]]

    def relaxed(self) -> dict[LimitKind, tuple[DeploymentConfig, float]]:
        """Return, for each limit, the smallest change that admits one that misses nothing else."""
        found = {}
        for numbers, of_rate in ((self.asked, False), (self.slower, True)):
            lone = count(numbers) == 1
            for kind, _, actual, missed in numbers:
                rows = np.flatnonzero(lone & missed & (actual > 0))
                if len(rows) and (kind is LimitKind.RATE) is of_rate:
                    row = rows[np.argsort(-actual[rows] if of_rate else actual[rows], kind="stable")[0]]
                    found[kind] = (self.configs[row], float(actual[row]))
        return found


def slowly(candidates: Sequence[Candidate], intent: Intent) -> Slow:
    guesses = [c.estimate for c in candidates if c.estimate is not None]
    rate, slo, p = intent.rate_per_s, intent.slo, intent.percentile
    assert rate is not None
    objectives = COSTS[intent.cost_model].of(figures(guesses), Prices())
    if intent.kind is IntentKind.MIN_LATENCY:
        objectives = mean_latency(candidates, intent, rate)
    order = sorted(range(len(candidates)), key=lambda row: (objectives[row], guesses[row].e2e_s.value))
    rows = [candidates[row] for row in order]
    alone = [c.alone for c in rows if c.alone is not None]
    served = Attainment.of_estimates(figures([guesses[row] for row in order]), alone, intent.traffic)
    assert slo is not None
    needed = np.array([QUALITIES.index(quality_needed(c.config)) for c in rows], np.float64)
    quality = float(QUALITIES.index(intent.quality))
    capacity = 1 / served.service_at(max(95.0, p))
    saturated = rate >= capacity
    asked = [
        Number(LimitKind.QUALITY, quality, needed, needed > quality),
        Number(LimitKind.RATE, rate, capacity, saturated),
    ]
    risks, kept, hopeless = [], {}, np.zeros(len(rows), np.bool_)
    limits = [(m, a) for m in METRICS if (a := getattr(slo, f"{m}_s")) is not None]
    for metric, allowed in limits:
        alone_s = served.alone_high(metric)
        risks.append(served.misses(metric, allowed, rate))
        late = (risks[-1] > 1 - p / 100) & ~saturated
        actual = np.where(late, np.maximum(alone_s, served.quantile(metric, p, rate)), alone_s)
        asked.append(Number(LimitKind(metric), allowed, actual, late | (alone_s > allowed)))
        hopeless |= alone_s > allowed
        kept[metric] = np.where(alone_s > allowed, np.inf, allowed)
    queued = count(asked[1:]) > 0
    top = np.where(hopeless, (1 - p / 100) * capacity, capacity)
    highest = np.where(queued, served.highest_rate(kept, p, top), np.minimum(capacity, rate)) * MARGIN
    slower = [asked[0], Number(LimitKind.RATE, rate, highest, queued)]
    for metric, allowed in limits:
        alone_s = served.alone_high(metric)
        at_that_rate = np.maximum(alone_s, served.quantile(metric, p, highest))
        slower.append(Number(LimitKind(metric), allowed, at_that_rate, alone_s > allowed))
    return Slow([c.config for c in rows], asked, slower, np.max(risks, axis=0), objectives[order])


def mean_latency(candidates: Sequence[Candidate], intent: Intent, rate: float) -> np.ndarray:
    """At the value of the estimates: the integral of the share of requests that take longer, over all times."""
    sure = [(certain(c.estimate), certain(c.alone)) for c in candidates if c.estimate and c.alone]
    served = Attainment.of_estimates(
        figures([batch for batch, _ in sure]), [one for _, one in sure], intent.traffic
    )
    alone_s = figures([one for _, one in sure]).e2e_s
    # Until the longest queue is over: within 0.2% of saturation the mean itself is thousands of answers long.
    times = np.concatenate([np.linspace(0, 3, 400), np.geomspace(3, 3e7, 240)[1:]])[:, None] * alone_s
    longer = [served.misses("e2e", some, rate) for some in times]
    return np.where(rate >= 1 / served.service_s, np.inf, np.trapezoid(longer, times, axis=0))


def certain(seen: Estimate) -> Estimate:
    """Return the estimate without an interval."""
    ttft, tpot = (Quantity(q.value, q.value, q.value, q.source) for q in (seen.ttft_s, seen.tpot_s))
    return replace(seen, ttft_s=ttft, tpot_s=tpot)


def count(numbers: Sequence[Number]) -> np.ndarray:
    return np.sum([n.missed for n in numbers], axis=0)


def distances(numbers: Sequence[Number]) -> tuple[np.ndarray, np.ndarray]:
    """Steps of quality, and the sum of |ln(actual / allowed)| over the other limits."""
    steps, *others = numbers
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sum(np.where(n.missed, np.abs(np.log(n.actual / n.allowed)), 0.0) for n in others)
    return np.where(steps.missed, steps.actual - steps.allowed, 0.0), np.asarray(ratios).round(9)
