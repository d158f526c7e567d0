"""Limits of an intent that candidates miss, and by how much: one column per limit, one row per candidate.

Without a rate, TTFT, TPOT and E2E are those of the batch handed over at once, judged on the upper end of the
estimate's interval. With a rate, each must be kept by ``percentile`` % of the requests that arrive so
(:mod:`planner.attainment`, which takes the interval into account), and at the upper end by a request alone. The
rate itself must be served at the upper end, or at the percentile of the truth where that is higher. The budget
must hold for a request whose time and memory are both at their upper ends. Memory is not judged here: the
cluster is asked about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.config import DeploymentConfig
from fingerprint.queueing import MODEL_NAME
from planner.attainment import Attainment, Metric
from planner.costs import Figures
from planner.evidence import Ends
from planner.intent import Intent, Quality, quality_needed
from planner.lazy_columns import Column, LazyColumn, Mask, Rows
from planner.normal_distribution import Z_OF_INTERVAL
from planner.plan import (
    INTERVAL_NOTE,
    QUALITIES,
    VALUE_NOTE,
    LatencyForecast,
    Limit,
    LimitKind,
    LoadForecast,
    LoadWaitForecast,
    Violation,
)
from planner.rate_profile import moving_rate

__all__ = [
    "Check",
    "Verdicts",
    "checks_as_asked",
    "checks_at_lower_rates",
    "kept_at_the_upper_end",
    "limits_missed",
    "num_missed",
    "told_of",
]

_MARGIN = 1 - 1e-6  # a rate found by its wait, less the rounding of the way there
_LEAST = 1e-9
_UPPER_END = 95.0  # the percentile of the truth at which a 90% interval ends
_METRICS: dict[LimitKind, Metric] = {LimitKind.TTFT: "ttft", LimitKind.TPOT: "tpot", LimitKind.E2E: "e2e"}


class Check(NamedTuple):
    """Check of one limit over all candidates.

    Attributes:
        rough: about ``actual``, where that has to be found: how near a candidate is, at no cost.
        risk: the share of requests that miss it, where there is a rate.
    """

    limit: Limit
    missed: Mask
    actual: LazyColumn
    rough: Column
    risk: LazyColumn | None = None

    def violation(self, row: int) -> Violation:
        return self.limit.violation(float(self.actual.of(np.array([row]))[0]))


class Verdicts:
    """The numbers of every candidate under every limit (``planner.plan.Numbers``)."""

    def __init__(
        self,
        checks: Sequence[Check],
        served: Attainment | None,
        rate_per_s: float | None,
        intervals: Ends | None = None,  # of the objective
    ) -> None:
        self._checks, self._intervals = tuple(checks), intervals
        self._risks = [check.risk for check in checks if check.risk is not None]
        self._busy = None if served is None or rate_per_s is None else (served.service_s * rate_per_s).tolist()

    def actual(self, row: int) -> tuple[float, ...]:
        return tuple(check.actual.at(row) for check in self._checks if check.missed[row])

    def risk(self, row: int) -> float | None:
        return max((risk.at(row) for risk in self._risks), default=None)

    def utilisation(self, row: int) -> float | None:
        return None if self._busy is None else self._busy[row]

    def interval(self, row: int) -> tuple[float, float] | None:
        return None if self._intervals is None else _ends_of(self._intervals, row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Verdicts) and self._found() == other._found()

    __hash__ = None  # type: ignore[assignment]

    def _found(self) -> list[object]:
        """Return every number to the last digit."""
        found: list[object] = [self._busy]
        for limit, missed, actual, _, risk in self._checks:
            every = np.arange(len(missed))
            columns = [column.of(every).tobytes() for column in (actual, risk) if column is not None]
            found.append((limit, missed.tobytes(), *columns))
        return found


def _ends_of(intervals: Ends, row: int) -> tuple[float, float] | None:
    """Return both ends; None of an interval without end."""
    low, high = float(intervals.low[row]), float(intervals.high[row])
    return (low, high) if np.isfinite(high) else None


def checks_as_asked(
    intent: Intent,
    configs: Sequence[DeploymentConfig],
    seen: Figures,
    costs: Column,
    cost_unit: str,
    served: Attainment | None,
) -> list[Check]:
    """Return a check of every limit that ``intent`` sets, in the order in which reasons are given.

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
    limit = Limit(LimitKind.RATE, rate, replicas=intent.replicas)
    checks.append(Check(limit, saturated, LazyColumn(capacity), capacity))
    return checks + _under_load(intent, served, capacity)


def kept_at_the_upper_end(intent: Intent, served: Attainment | None, num_rows: int) -> Mask:
    """Return the rows that keep the SLO under the rate were the truth the upper end of the estimate's interval.

    Without a rate that is what ``checks_as_asked`` asks already, as it does of budget and rate.
    """
    kept, rate = np.ones(num_rows, np.bool_), intent.rate_per_s
    if served is None or rate is None:
        return kept
    for kind, allowed in _limits_of(intent):
        kept &= served.misses(_METRICS[kind], allowed, rate, Z_OF_INTERVAL) <= 1 - intent.percentile / 100
    return kept


def _capacity(intent: Intent, served: Attainment) -> Column:
    """Return the requests per second that are served for sure."""
    return np.asarray(1 / served.service_at(max(_UPPER_END, intent.percentile)))


def _limits_of(intent: Intent) -> list[tuple[LimitKind, float]]:
    slo = intent.slo
    if slo is None:
        return []
    asked = ((LimitKind.TTFT, slo.ttft_s), (LimitKind.TPOT, slo.tpot_s), (LimitKind.E2E, slo.e2e_s))
    return [(kind, allowed) for kind, allowed in asked if allowed is not None]


def _of_the_batch(intent: Intent, seen: Figures) -> list[Check]:
    judged, note = (
        seen if intent.slo_by_value else seen.at_high,
        VALUE_NOTE if intent.slo_by_value else INTERVAL_NOTE,
    )
    times = {LimitKind.TTFT: judged.ttft_s, LimitKind.TPOT: judged.tpot_s, LimitKind.E2E: judged.e2e_s}
    return [check for kind, allowed in _limits_of(intent) for check in _at_most(kind, allowed, times[kind], note)]


def _under_load(intent: Intent, served: Attainment, capacity: Column) -> list[Check]:
    """Return the checks under load.

    Where the rate is not served at all, say it once, and judge a request alone.
    """
    rate, percentile = intent.rate_per_s, intent.percentile
    assert rate is not None, "asked with a rate only"
    saturated = rate >= capacity
    at_rate = f"at p{percentile:g} of {rate * intent.replicas:g} requests/s"
    note = f"{at_rate} ({MODEL_NAME}; alone at the upper end of the interval)"
    wait_s = -math.log(1 - percentile / 100) / np.maximum(capacity - rate, _LEAST)  # as of M/M/1
    checks = []
    for kind, allowed in _limits_of(intent):
        metric, alone = _METRICS[kind], served.alone_high(_METRICS[kind])
        open_rows = np.flatnonzero(~(saturated | (alone > allowed)))
        risk = np.full(len(served), np.nan)
        risk[open_rows] = served.take(open_rows).misses(metric, allowed, rate)
        late = ~saturated & ~(risk <= 1 - percentile / 100)  # NaN: not known yet
        missed = late & (alone <= allowed) | (alone > allowed)
        checks.append(
            Check(
                Limit(kind, allowed, note),
                missed,
                LazyColumn(np.where(late, np.nan, alone), _quantile(served, metric, percentile, lambda _: rate)),
                np.where(late & (metric != "tpot"), alone + wait_s, alone),
                LazyColumn(risk, _risk(served, metric, allowed, rate)),
            )
        )
    return checks


def _risk(served: Attainment, metric: Metric, allowed: float, rate_per_s: float) -> Callable[[Rows], Column]:
    return lambda rows: served.take(rows).misses(metric, allowed, rate_per_s)


def _quantile(
    served: Attainment, metric: Metric, percentile: float, rates_per_s: Callable[[Rows], Column | float]
) -> Callable[[Rows], Column]:
    """Return a function: the time under load of given rows, at least that of a request alone."""

    def find(rows: Rows) -> Column:
        some = served.take(rows)
        return np.maximum(some.alone_high(metric), some.quantile(metric, percentile, rates_per_s(rows)))

    return find


def checks_at_lower_rates(asked: Sequence[Check], intent: Intent, served: Attainment | None) -> list[Check]:
    """Return the same limits in another form, with the rate to blame for every wait.

    That is the highest rate at which the limits hold that a request alone keeps; for the remaining limits, their
    values at a rate at which all but the percentile find a slot at once.
    """
    rate = intent.rate_per_s
    if rate is None or served is None:
        return list(asked)
    of_rate = [check for check in asked if check.limit.kind not in (LimitKind.QUALITY, LimitKind.BUDGET)]
    queued, capacity = num_missed(of_rate, len(served)) > 0, _capacity(intent, served)
    limits = {_METRICS[kind]: allowed for kind, allowed in _limits_of(intent)}
    late_alone = {metric: served.alone_high(metric) > allowed for metric, allowed in limits.items()}
    hopeless = np.any([*late_alone.values(), np.zeros(len(served), np.bool_)], axis=0)
    kept = {metric: np.where(late_alone[metric], np.inf, allowed) for metric, allowed in limits.items()}
    top = np.where(hopeless, (1 - intent.percentile / 100) * capacity, capacity)
    most = np.where(queued, top, np.minimum(capacity, rate))

    def find(rows: Rows) -> Column:
        limits_s = {metric: limit[rows] for metric, limit in kept.items()}
        return _MARGIN * served.take(rows).highest_rate(limits_s, intent.percentile, most[rows])

    highest = LazyColumn(np.where(queued, np.nan, most * _MARGIN), find) if kept else LazyColumn(most * _MARGIN)
    rough, missed = most, 1 - intent.percentile / 100
    at_once = capacity * missed ** (1 / served.no_slot_exponent)  # at most so many wait at all
    for metric, limit in kept.items():
        spare_s = np.maximum(limit - served.alone_high(metric), _LEAST)
        if metric != "tpot":
            rough = np.minimum(rough, np.maximum(at_once, capacity + math.log(missed) / spare_s))
    note = "" if intent.slo is None else f"within the SLO at p{intent.percentile:g}"
    slower = [
        Check(Limit(LimitKind.RATE, rate, note, intent.replicas), queued, highest, np.maximum(rough, _LEAST))
    ]
    for check in asked:
        if check.limit.kind in _METRICS:
            metric = _METRICS[check.limit.kind]
            actual = LazyColumn(
                np.full(len(served), np.nan), _quantile(served, metric, intent.percentile, highest.of)
            )
            slower.append(Check(check.limit, late_alone[metric], actual, served.alone_high(metric)))
    return [*(check for check in asked if check.limit.kind in (LimitKind.QUALITY, LimitKind.BUDGET)), *slower]


def _at_most(kind: LimitKind, allowed: float | None, actual: Column, note: str) -> list[Check]:
    return (
        []
        if allowed is None
        else [Check(Limit(kind, allowed, note), actual > allowed, LazyColumn(actual), actual)]
    )


def told_of(served: Attainment, row: int, intent: Intent) -> LoadForecast:
    """Return what the candidate in ``row`` gives under the intent's rate."""
    rate, one = intent.rate_per_s, served.take(np.array([row]))
    assert rate is not None, "asked with a rate only"
    limits = dict(_limits_of(intent))

    def time(kind: LimitKind) -> LatencyForecast:
        metric, limit = _METRICS[kind], limits.get(kind)
        quantile = float(one.quantile(metric, intent.percentile, rate)[0])
        risk = None if limit is None else float(one.misses(metric, limit, rate)[0])
        return LatencyForecast(quantile if math.isfinite(quantile) else None, limit, risk)

    times = {metric: time(kind) for kind, metric in _METRICS.items()}
    highest = _capacity(intent, one)
    if limits:
        kept = {_METRICS[kind]: np.array([limit]) for kind, limit in limits.items()}
        highest = one.highest_rate(kept, intent.percentile, highest)
    risks = [time.miss_probability for time in times.values() if time.miss_probability is not None]
    traffic = intent.traffic
    return LoadForecast(
        rate_per_s=rate,
        percentile=intent.percentile,
        burstiness=traffic.burstiness,
        input_cv=traffic.input_cv,
        output_cv=traffic.output_cv,
        rate_levels=moving_rate(traffic.relative_rates).levels if traffic.relative_rates else (),
        utilisation=float(one.service_s[0] * rate),
        highest_rate_per_s=float(highest[0]) * _MARGIN,
        miss_probability=max(risks, default=None),
        load_wait=_load_wait(one, rate),
        **times,
    )


def _load_wait(one: Attainment, rate_per_s: float) -> LoadWaitForecast | None:
    wait = one.load_wait(rate_per_s)
    if wait is None or not wait.share[0]:
        return None
    return LoadWaitForecast(share=float(wait.share[0]), mean_s=float(wait.mean_s[0]))


def num_missed(checks: Sequence[Check], num_rows: int) -> npt.NDArray[np.int64]:
    """Return how many limits each candidate misses."""
    return sum((check.missed.astype(np.int64) for check in checks), start=np.zeros(num_rows, dtype=np.int64))


def limits_missed(checks: Sequence[Check], num_rows: int) -> list[tuple[Limit, ...]]:
    """Return, per candidate, the limits it misses in the order of ``checks``."""
    limits: list[tuple[Limit, ...]] = [()] * num_rows
    which = sum((check.missed << bit for bit, check in enumerate(checks)), start=np.zeros(num_rows, np.int64))
    for pattern in np.unique(which[which > 0]).tolist():  # one value for candidates that miss the same limits
        same = tuple(check.limit for bit, check in enumerate(checks) if pattern >> bit & 1)
        for row in np.flatnonzero(which == pattern).tolist():
            limits[row] = same
    return limits
