"""Which limits of an intent the candidates miss, and by how much: one column per limit, one row per candidate.

TTFT, TPOT and E2E are judged on the upper end of the estimate's interval. With a rate, the wait at the intent's
percentile is added to TTFT and E2E, from an FCFS M/D/1 queue with service time e2e / batch, also at the upper end.
So is the budget: it must hold for a request whose time and memory are both at their upper ends. Memory is not
judged here: the cluster is asked about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fingerprint.config import DeploymentConfig
from planner.costs import Column, Figures
from planner.intent import Intent, Quality, quality_needed
from planner.plan import INTERVAL_NOTE, QUALITIES, Limit, LimitKind, Violation
from planner.queueing import MODEL_NAME, Md1Waits

__all__ = [
    "Check",
    "Mask",
    "checks_as_asked",
    "checks_at_lower_rates",
    "distances",
    "limits_missed",
    "num_missed",
]

Mask = npt.NDArray[np.bool_]

_MARGIN = 1 - 1e-6  # a rate found by its wait, less the rounding of the way there
_WAITING = frozenset({LimitKind.TTFT, LimitKind.E2E, LimitKind.RATE})
_IDLE = 0.0


class Check(NamedTuple):
    """One limit over all candidates."""

    limit: Limit
    actual: Column
    missed: Mask

    def violation(self, row: int) -> Violation:
        return Violation(self.limit.kind, self.limit.allowed, float(self.actual[row]), self.limit.note)


def checks_as_asked(
    intent: Intent, configs: Sequence[DeploymentConfig], seen: Figures, costs: Column, cost_unit: str
) -> list[Check]:
    """Every limit that ``intent`` sets, in the order in which reasons are told.

    Args:
        costs: of a request, at the upper end.
    """
    checks: list[Check] = []
    if intent.quality is not Quality.ANY:
        needed = np.array([QUALITIES.index(quality_needed(config)) for config in configs], dtype=np.float64)
        checks += _at_most(LimitKind.QUALITY, float(QUALITIES.index(intent.quality)), needed, "")
    checks += _at_most(LimitKind.BUDGET, intent.budget, costs, cost_unit)
    rate = intent.rate_per_s
    if rate is None:
        return checks + _latency(intent, seen, _IDLE, INTERVAL_NOTE)
    wait_s = seen.service_s * Md1Waits(intent.percentile).wait(seen.service_s * rate)
    saturated = ~np.isfinite(wait_s)
    wait_s[saturated] = _IDLE  # the rate is what is wrong then; say it once
    note = (
        f"(upper end of the 90% interval and p{intent.percentile:g} of the wait in an {MODEL_NAME} queue "
        f"at {rate:g} requests/s)"
    )
    checks.append(Check(Limit(LimitKind.RATE, rate), 1 / seen.service_s, saturated))
    return checks + _latency(intent, seen, wait_s, note)


def checks_at_lower_rates(asked: Sequence[Check], intent: Intent, seen: Figures) -> list[Check]:
    """The same limits told in another way, with the rate to blame for every wait: the highest at which the SLO
    would hold, and of TTFT and E2E only what is missed when nobody waits, at a rate at which nobody does."""
    rate = intent.rate_per_s
    if rate is None:
        return list(asked)
    slack_s = np.full_like(seen.e2e_s, np.inf)
    latency = _latency(intent, seen, _IDLE, INTERVAL_NOTE)
    for check in latency:
        if check.limit.kind in _WAITING:
            slack_s = np.minimum(slack_s, np.maximum(check.limit.allowed - check.actual, 0.0))
    highest = Md1Waits(intent.percentile).largest_utilisation(slack_s / seen.service_s) / seen.service_s
    queued = num_missed([check for check in asked if check.limit.kind in _WAITING], len(highest)) > 0
    note = "" if intent.slo is None else f"within the SLO at p{intent.percentile:g}"
    others = [check for check in asked if check.limit.kind in (LimitKind.QUALITY, LimitKind.BUDGET)]
    return [*others, Check(Limit(LimitKind.RATE, rate, note), highest * _MARGIN, queued), *latency]


def _latency(intent: Intent, seen: Figures, wait_s: Column | float, note: str) -> list[Check]:
    if intent.slo is None:
        return []
    return [
        *_at_most(LimitKind.TTFT, intent.slo.ttft_s, seen.ttft_high_s + wait_s, note),
        *_at_most(LimitKind.TPOT, intent.slo.tpot_s, seen.tpot_high_s, INTERVAL_NOTE),
        *_at_most(LimitKind.E2E, intent.slo.e2e_s, seen.e2e_high_s + wait_s, note),
    ]


def _at_most(kind: LimitKind, allowed: float | None, actual: Column, note: str) -> list[Check]:
    return [] if allowed is None else [Check(Limit(kind, allowed, note), actual, actual > allowed)]


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
    for (kind, allowed, _), actual, missed in checks:
        if kind is LimitKind.QUALITY:
            steps += np.where(missed, actual - allowed, 0.0)
        else:
            with np.errstate(divide="ignore", invalid="ignore"):  # a rate of 0 is infinitely far
                ratios += np.where(missed, np.abs(np.log(actual / allowed)), 0.0)
    return steps, ratios.round(9)  # what differs by less is equally far
