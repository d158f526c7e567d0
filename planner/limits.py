"""Which limits of an intent the candidates miss, and by how much: one column per limit, one row per candidate.

Without a rate, TTFT, TPOT and E2E are those of the batch handed over at once, judged on the upper end of the
estimate's interval. With a rate, each must be kept by ``percentile`` % of the requests that come so
(:mod:`planner.attainment`, which takes the interval into account), and at the upper end by a request alone. The
rate itself must be served at the upper end, or at the percentile of the truth where that is higher. The budget
must hold for a request whose time and memory are both at their upper ends. Memory is not judged here: the
cluster is asked about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.config import DeploymentConfig
from planner.attainment import Attainment, Metric, Rows
from planner.costs import Column, Figures
from planner.intent import Intent, Quality, quality_needed
from planner.plan import INTERVAL_NOTE, QUALITIES, Expected, Limit, LimitKind, Served, Violation
from planner.queueing import MODEL_NAME

__all__ = [
    "Check",
    "Mask",
    "checks_as_asked",
    "checks_at_lower_rates",
    "distances",
    "limits_missed",
    "num_missed",
    "told_of",
]

Mask = npt.NDArray[np.bool_]

_MARGIN = 1 - 1e-6  # a rate found by its wait, less the rounding of the way there
_UPPER_END = 95.0  # the percentile of the truth at which a 90% interval ends
_METRICS: dict[LimitKind, Metric] = {LimitKind.TTFT: "ttft", LimitKind.TPOT: "tpot", LimitKind.E2E: "e2e"}


class Check(NamedTuple):
    """One limit over all candidates. ``risk``: the share of requests that miss it, where there is a rate."""

    limit: Limit
    actual: Column
    missed: Mask
    risk: Column | None = None

    def violation(self, row: int) -> Violation:
        return Violation(self.limit.kind, self.limit.allowed, float(self.actual[row]), self.limit.note)


def checks_as_asked(
    intent: Intent,
    configs: Sequence[DeploymentConfig],
    seen: Figures,
    costs: Column,
    cost_unit: str,
    served: Attainment | None,
) -> list[Check]:
    """Every limit that ``intent`` sets, in the order in which reasons are told.

    Args:
        costs: of a request, at the upper end.
        served: needed with a rate.
    """
    checks: list[Check] = []
    if intent.quality is not Quality.ANY:
        needed = np.array([QUALITIES.index(quality_needed(config)) for config in configs], dtype=np.float64)
        checks += _at_most(LimitKind.QUALITY, float(QUALITIES.index(intent.quality)), needed, "")
    checks += _at_most(LimitKind.BUDGET, intent.budget, costs, cost_unit)
    rate = intent.rate_per_s
    if rate is None or served is None:
        return checks + _of_the_batch(intent, seen)
    capacity = _capacity(intent, served)
    saturated = rate >= capacity
    checks.append(Check(Limit(LimitKind.RATE, rate), capacity, saturated))
    return checks + _under_load(intent, served, saturated)


def _capacity(intent: Intent, served: Attainment) -> Column:
    """Requests per second that are served for sure."""
    return np.asarray(1 / served.service_at(max(_UPPER_END, intent.percentile)))


def _limits_of(intent: Intent) -> list[tuple[LimitKind, float]]:
    slo = intent.slo
    if slo is None:
        return []
    asked = ((LimitKind.TTFT, slo.ttft_s), (LimitKind.TPOT, slo.tpot_s), (LimitKind.E2E, slo.e2e_s))
    return [(kind, allowed) for kind, allowed in asked if allowed is not None]


def _of_the_batch(intent: Intent, seen: Figures) -> list[Check]:
    highs = {LimitKind.TTFT: seen.ttft_high_s, LimitKind.TPOT: seen.tpot_high_s, LimitKind.E2E: seen.e2e_high_s}
    return [
        check
        for kind, allowed in _limits_of(intent)
        for check in _at_most(kind, allowed, highs[kind], INTERVAL_NOTE)
    ]


def _under_load(intent: Intent, served: Attainment, saturated: Mask) -> list[Check]:
    """Where the rate is not served at all, that is what is wrong; say it once, and judge a request alone."""
    rate, share = intent.rate_per_s, 1 - intent.percentile / 100
    assert rate is not None, "asked with a rate only"
    note = (
        f"at p{intent.percentile:g} of {rate:g} requests/s ({MODEL_NAME}; alone at the upper end of the interval)"
    )
    checks = []
    for kind, allowed in _limits_of(intent):
        metric, alone = _METRICS[kind], served.alone_high(_METRICS[kind])
        risk = served.misses(metric, allowed, rate)
        late = (risk > share) & ~saturated
        actual = _at_least(alone, np.flatnonzero(late), served, metric, intent.percentile, rate)
        checks.append(Check(Limit(kind, allowed, note), actual, late | (alone > allowed), risk))
    return checks


def _at_least(
    alone: Column, rows: Rows, served: Attainment, metric: Metric, percentile: float, rate: Column | float
) -> Column:
    """``alone``, in ``rows`` at least the quantile."""
    actual = alone.copy()
    if len(rows):
        rates = rate[rows] if isinstance(rate, np.ndarray) else rate
        actual[rows] = np.maximum(alone[rows], served.take(rows).quantile(metric, percentile, rates))
    return actual


def checks_at_lower_rates(
    asked: Sequence[Check], intent: Intent, seen: Figures, served: Attainment | None
) -> list[Check]:
    """The same limits told in another way, with the rate to blame for every wait: the highest at which the limits
    hold that a request alone keeps; and of the others, how they come out at a rate at which all but the percentile
    find a slot at once."""
    rate = intent.rate_per_s
    if rate is None or served is None:
        return list(asked)
    waiting = [check for check in asked if check.limit.kind in _METRICS]
    others = [check for check in asked if check.limit.kind in (LimitKind.QUALITY, LimitKind.BUDGET)]
    queued = (
        num_missed(
            [check for check in asked if check.limit.kind not in (LimitKind.QUALITY, LimitKind.BUDGET)],
            len(served),
        )
        > 0
    )
    rows, capacity = np.flatnonzero(queued), _capacity(intent, served)
    hopeless = np.zeros(len(served), np.bool_)
    kept: dict[Metric, Column] = {}
    for kind, allowed in _limits_of(intent):
        never = served.alone_high(_METRICS[kind]) > allowed
        hopeless |= never
        kept[_METRICS[kind]] = np.where(never, np.inf, allowed)[rows]
    highest = np.minimum(capacity, rate)
    highest[rows] = np.where(hopeless, (1 - intent.percentile / 100) * capacity, capacity)[rows]
    if kept and len(rows):
        highest[rows] = served.take(rows).highest_rate(kept, intent.percentile, highest[rows])
    note = "" if intent.slo is None else f"within the SLO at p{intent.percentile:g}"
    slower = [Check(Limit(LimitKind.RATE, rate, note), highest * _MARGIN, queued)]
    for check in waiting:
        metric = _METRICS[check.limit.kind]
        alone = served.alone_high(metric)
        never = alone > check.limit.allowed
        actual = _at_least(alone, np.flatnonzero(never), served, metric, intent.percentile, highest)
        slower.append(Check(check.limit, actual, never))
    return [*others, *slower]


def _at_most(kind: LimitKind, allowed: float | None, actual: Column, note: str) -> list[Check]:
    return [] if allowed is None else [Check(Limit(kind, allowed, note), actual, actual > allowed)]


def told_of(served: Attainment, row: int, intent: Intent) -> Served:
    """What the candidate in ``row`` gives under the intent's rate."""
    rate, one = intent.rate_per_s, served.take(np.array([row]))
    assert rate is not None, "asked with a rate only"
    limits = dict(_limits_of(intent))
    times = []
    for kind, metric in _METRICS.items():
        limit, quantile = limits.get(kind), float(one.quantile(metric, intent.percentile, rate)[0])
        risk = None if limit is None else float(one.misses(metric, limit, rate)[0])
        times.append(Expected(metric, quantile, limit, risk))
    highest = _capacity(intent, one)
    if limits:
        kept = {_METRICS[kind]: np.array([limit]) for kind, limit in limits.items()}
        highest = one.highest_rate(kept, intent.percentile, highest)
    risks = [time.risk for time in times if time.risk is not None]
    return Served(
        rate, float(one.service_s[0] * rate), float(highest[0]) * _MARGIN, max(risks, default=None), tuple(times)
    )


def num_missed(checks: Sequence[Check], num_rows: int) -> npt.NDArray[np.int64]:
    """How many limits each candidate misses."""
    return sum((check.missed.astype(np.int64) for check in checks), start=np.zeros(num_rows, dtype=np.int64))


def limits_missed(
    checks: Sequence[Check], num_rows: int
) -> tuple[list[tuple[Limit, ...]], list[tuple[float, ...]]]:
    """Per candidate, the limits it misses in the order of ``checks``; and its own number for each of them."""
    limits: list[tuple[Limit, ...]] = [()] * num_rows
    actual: list[tuple[float, ...]] = [()] * num_rows
    which = sum((check.missed << bit for bit, check in enumerate(checks)), start=np.zeros(num_rows, np.int64))
    for pattern in np.unique(which[which > 0]).tolist():  # candidates that miss the same limits are told together
        rows = np.flatnonzero(which == pattern)
        missed = [check for bit, check in enumerate(checks) if pattern >> bit & 1]
        same = tuple(check.limit for check in missed)
        columns = [check.actual[rows].tolist() for check in missed]
        for row, own in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
            limits[row], actual[row] = same, own
    return limits, actual


def distances(checks: Sequence[Check], num_rows: int) -> tuple[Column, Column]:
    """(quality steps, sum of |ln(actual / allowed)| over the other limits) of what each candidate misses."""
    steps, ratios = np.zeros(num_rows), np.zeros(num_rows)
    for (kind, allowed, _), actual, missed, _ in checks:
        if kind is LimitKind.QUALITY:
            steps += np.where(missed, actual - allowed, 0.0)
        else:
            with np.errstate(divide="ignore", invalid="ignore"):  # a rate of 0 is infinitely far
                ratios += np.where(missed, np.abs(np.log(actual / allowed)), 0.0)
    return steps, ratios.round(9)  # what differs by less is equally far
