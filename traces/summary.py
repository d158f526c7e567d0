"""A run's outcomes in figures: percentiles, throughput, SLO attainment, goodput, failures by kind. Pure.

Latencies are those of completed requests. A request that failed has none, but it counts: against the SLO, and
among the failures. Otherwise a server would look faster for failing under load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from planner.intent import Slo
from traces.outcomes import Failure, Floats, Outcomes

__all__ = [
    "FailureCount",
    "Lengths",
    "Percentiles",
    "SloResult",
    "Summary",
    "kept",
    "limit_words",
    "outcome_words",
    "percentiles",
    "summarize",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """Percentiles of one quantity, in seconds, interpolated linearly between order statistics as numpy does."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureCount:
    kind: str  # a ``Failure`` in words
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SloResult:
    """Number of requests that kept every limit.

    A failed one keeps none; an answer of one token has no TPOT to miss.

    Requests in flight when a run was ended early are not judged.
    """

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    met: int
    attainment_fraction: float  # of all that are judged, the failed and the refused included
    goodput_requests_per_s: float  # those that met it, over the run's duration
    missed_ttft: int  # of the completed; one request may miss several
    missed_tpot: int
    missed_e2e: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens asked by the trace and tokens served, over completed requests."""

    asked_input_tokens: int
    input_tokens: int | None  # None: the server did not count them for every request
    requests_of_other_input: int  # whose prompt the server counted otherwise than the trace
    asked_output_tokens: int
    output_tokens: int
    requests_of_other_output: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """``ttft`` and ``e2e`` count from the scheduled send, their ``_from_send`` twins from the actual one.

    A quantity that no completed request has is None.
    """

    requests: int
    completed: int
    duration_s: float  # from the first scheduled send to the last thing that happened
    offered_requests_per_s: float  # over the time in which requests were scheduled
    completed_requests_per_s: float
    output_tokens_per_s: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl: Percentiles | None
    e2e: Percentiles | None
    ttft_from_send: Percentiles | None
    e2e_from_send: Percentiles | None
    lateness: Percentiles | None
    slo: SloResult | None
    failures: tuple[FailureCount, ...]  # most frequent first
    lengths: Lengths


def percentiles(values: Floats) -> Percentiles | None:
    """Return percentiles without NaN; None when nothing remains."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        return None
    p50, p90, p95, p99 = (float(v) for v in np.percentile(known, (50, 90, 95, 99)))
    return Percentiles(
        count=int(known.size),
        mean_s=float(known.mean()),
        p50_s=p50,
        p90_s=p90,
        p95_s=p95,
        p99_s=p99,
        max_s=float(known.max()),
    )


def summarize(outcomes: Outcomes, slo: Slo | None = None, *, duration_s: float | None = None) -> Summary:
    """Return the figures of a run.

    Args:
        duration_s: what rates are over; None: from the first scheduled send to the last token.
    """
    done = outcomes.select(outcomes.completed)
    span_s = _span_s(outcomes) if duration_s is None else duration_s
    scheduled_s = float(np.ptp(outcomes.scheduled_s)) if len(outcomes) else 0.0
    return Summary(
        requests=len(outcomes),
        completed=len(done),
        duration_s=span_s,
        offered_requests_per_s=_rate(len(outcomes) - 1, scheduled_s),
        completed_requests_per_s=_rate(len(done), span_s),
        output_tokens_per_s=_rate(int(done.output_tokens.sum()), span_s),
        ttft=percentiles(done.ttft_s),
        tpot=percentiles(done.tpot_s),
        itl=percentiles(done.gaps_s),
        e2e=percentiles(done.e2e_s),
        ttft_from_send=percentiles(done.ttft_from_send_s),
        e2e_from_send=percentiles(done.e2e_from_send_s),
        lateness=percentiles(outcomes.lateness_s),
        slo=None if slo is None else _judge(outcomes, slo, span_s),
        failures=_failures(outcomes),
        lengths=_lengths(done),
    )


def outcome_words(summary: Summary, reasons: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return one line: how many requests failed and why, and how many were answered.

    Args:
        reasons: words for kinds of failure; a kind without any is printed as it is.
    """
    failed = summary.requests - summary.completed
    if not failed:
        return f"all {summary.requests:,} requests were answered" if summary.requests else "no requests arrived"
    why = [(failure.count, reasons.get(failure.kind, failure.kind)) for failure in summary.failures]
    told = why[0][1] if len(why) == 1 else ", ".join(f"{count:,} {words}" for count, words in why)
    return f"{failed:,} of {summary.requests:,} requests failed: {told}; {summary.completed:,} answered"


def limit_words(limits: Slo | SloResult | None) -> str:
    """Return the limits of an SLO, such as ``TTFT 0.5 s, TPOT 0.05 s``."""
    if limits is None:
        return "none"
    named = (("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s), ("E2E", limits.e2e_s))
    return ", ".join(f"{name} {value:g} s" for name, value in named if value is not None)


def _span_s(outcomes: Outcomes) -> float:
    if not len(outcomes):
        return 0.0
    ends = np.concatenate([outcomes.scheduled_s, outcomes.last_token_s])
    return float(np.nanmax(ends) - outcomes.scheduled_s.min())


def _rate(count: int, span_s: float) -> float:
    return max(count, 0) / span_s if span_s > 0 else 0.0


def _judge(outcomes: Outcomes, slo: Slo, span_s: float) -> SloResult:
    done = outcomes.completed
    missed_ttft = done & _over(outcomes.ttft_s, slo.ttft_s)
    missed_tpot = done & _over(outcomes.tpot_s, slo.tpot_s)
    missed_e2e = done & _over(outcomes.e2e_s, slo.e2e_s)
    judged = int((outcomes.failure != Failure.INTERRUPTED).sum())
    met = int(kept(outcomes, slo).sum())
    return SloResult(
        ttft_s=slo.ttft_s,
        tpot_s=slo.tpot_s,
        e2e_s=slo.e2e_s,
        met=met,
        attainment_fraction=met / judged if judged else 0.0,
        goodput_requests_per_s=_rate(met, span_s),
        missed_ttft=int(missed_ttft.sum()),
        missed_tpot=int(missed_tpot.sum()),
        missed_e2e=int(missed_e2e.sum()),
    )


def kept(outcomes: Outcomes, slo: Slo) -> NDArray[np.bool_]:
    """Return a mask of the requests that were answered within every limit of ``slo``."""
    late = (
        _over(outcomes.ttft_s, slo.ttft_s) | _over(outcomes.tpot_s, slo.tpot_s) | _over(outcomes.e2e_s, slo.e2e_s)
    )
    return np.asarray(outcomes.completed & ~late)


def _over(values_s: Floats, limit_s: float | None) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Return which values are over the limit; NaN is over no limit."""
    if limit_s is None:
        return np.zeros(values_s.shape, np.bool_)
    return np.asarray(values_s > limit_s)


def _failures(outcomes: Outcomes) -> tuple[FailureCount, ...]:
    kinds, counts = np.unique(outcomes.failure, return_counts=True)
    found = [
        FailureCount(kind=Failure(int(kind)).words, count=int(count))
        for kind, count in zip(kinds, counts, strict=True)
        if kind != Failure.NONE
    ]
    return tuple(sorted(found, key=lambda failure: -failure.count))


def _lengths(done: Outcomes) -> Lengths:
    counted = bool((done.input_tokens > 0).all())
    other_input = (done.input_tokens > 0) & (done.input_tokens != done.asked_input_tokens)
    return Lengths(
        asked_input_tokens=int(done.asked_input_tokens.sum()),
        input_tokens=int(done.input_tokens.sum()) if counted else None,
        requests_of_other_input=int(other_input.sum()),
        asked_output_tokens=int(done.asked_output_tokens.sum()),
        output_tokens=int(done.output_tokens.sum()),
        requests_of_other_output=int((done.output_tokens != done.asked_output_tokens).sum()),
    )
