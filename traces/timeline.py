"""A run over time, and its latencies as whole distributions: what a page draws from outcomes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from traces.outcomes import Floats, Outcomes

__all__ = ["Bin", "CurvePoint", "curve", "timeline"]

_PERCENTS = (*range(0, 100, 2), 99.0, 99.5, 99.9, 100.0)
_ROUND_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """A stretch of the run. Latencies and failures are of the requests scheduled in it."""

    start_s: float
    width_s: float
    scheduled: int
    completed: int
    failed: int
    in_flight: int  # of the completed: sent and without their last token, at the end of the bin
    output_tokens_per_s: float  # of the requests whose last token arrived in it
    ttft_p50_s: float | None
    ttft_p99_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    percent: float
    value_s: float


def curve(values: Floats) -> tuple[CurvePoint, ...]:
    """Return the quantiles of what is not NaN; empty when nothing is."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    if not known.size:
        return ()
    found = np.percentile(known, _PERCENTS)
    return tuple(CurvePoint(percent=p, value_s=float(v)) for p, v in zip(_PERCENTS, found, strict=True))


def timeline(outcomes: Outcomes, *, bins: int = 60) -> tuple[Bin, ...]:
    """Return the run from its start to its last event, in about ``bins`` stretches of a round width."""
    if not len(outcomes):
        return ()
    ends_s = np.nanmax(np.concatenate([outcomes.scheduled_s, outcomes.last_token_s]))
    width_s = _round_up(float(ends_s) / bins)
    count = int(ends_s / width_s) + 1
    edges_s = np.arange(count + 1) * width_s
    done = outcomes.completed
    which = np.minimum((outcomes.scheduled_s / width_s).astype(int), count - 1)
    ended = np.histogram(outcomes.last_token_s[done], edges_s, weights=outcomes.output_tokens[done])[0]
    in_flight = [
        int((done & (outcomes.sent_s < edge) & (outcomes.last_token_s >= edge)).sum()) for edge in edges_s[1:]
    ]
    ttft_s = np.where(done, outcomes.ttft_s, np.nan)
    return tuple(
        Bin(
            start_s=float(edges_s[i]),
            width_s=width_s,
            scheduled=int((which == i).sum()),
            completed=int((done & (which == i)).sum()),
            failed=int((~done & (which == i)).sum()),
            in_flight=in_flight[i],
            output_tokens_per_s=float(ended[i]) / width_s,
            ttft_p50_s=_percentile(ttft_s[which == i], 50),
            ttft_p99_s=_percentile(ttft_s[which == i], 99),
        )
        for i in range(count)
    )


def _round_up(width_s: float) -> float:
    return next((round_s for round_s in _ROUND_S if round_s >= width_s), float(math.ceil(width_s)))


def _percentile(values_s: Floats, percent: float) -> float | None:
    known = values_s[~np.isnan(values_s)]
    return float(np.percentile(known, percent)) if known.size else None
