"""Measured times against layers, and the line that L2 fits through them: the numbers behind the time charts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fingerprint.config import KvFormat, WeightFormat, Workload
from fingerprint.estimators.l2 import L2, TimingFit
from fingerprint.measurements import Profile, TimingPoint
from fingerprint.trimmed_mean import locate

__all__ = ["TPOT", "TTFT", "MeasuredTime", "TimePanel", "TimeSeries", "time_panels"]

TTFT, TPOT = "ttft_s", "tpot_s"
_LINE_POINTS = 9  # the line is straight, its band nearly so


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """A time in seconds at one depth, with its 90% interval; measured, or on a fitted line."""

    num_layers: float
    value_s: float
    low_s: float
    high_s: float
    num_runs: int = 0  # 0: not run but fitted


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSeries:
    """Times of one pair of formats. ``line`` reaches from one layer to the whole model; empty without a fit."""

    weights: WeightFormat
    kv: KvFormat
    points: tuple[MeasuredTime, ...]
    line: tuple[MeasuredTime, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePanel:
    """Quantity of one burst under one (tp, pp)."""

    quantity: str  # TTFT or TPOT
    tp: int
    pp: int
    batch: int
    input_tokens: int
    output_tokens: int  # of the longer runs, from which TPOT is computed
    series: tuple[TimeSeries, ...]

    @property
    def name(self) -> str:
        return self.quantity.removesuffix("_s").upper()


def time_panels(profile: Profile) -> tuple[TimePanel, ...]:
    """Return every (burst, quantity, tp, pp) that was run, in this order.

    TTFT is the time of the runs with the shortest output; TPOT the difference of the longest and the shortest over
    the tokens between (equation 1 of the paper), each run located by its trimmed mean.
    """
    fits = L2(profile).fits
    shapes = sorted({(p.batch, p.input_tokens) for fit in fits.values() for p in fit.points})
    degrees = sorted({(key.tp, key.pp) for key in fits}, key=lambda d: (d[0] * d[1], d[1]))
    panels = []
    for batch, prompt in shapes:
        for quantity in (TTFT, TPOT):
            for tp, pp in degrees:
                series = [
                    found
                    for key, fit in sorted(fits.items())
                    if (key.tp, key.pp) == (tp, pp)
                    and (found := _series(fit, batch, prompt, quantity)) is not None
                ]
                if series:
                    panels.append(
                        TimePanel(
                            quantity=quantity,
                            tp=tp,
                            pp=pp,
                            batch=batch,
                            input_tokens=prompt,
                            output_tokens=max(p.output_tokens for p in profile.timing),
                            series=tuple(series),
                        )
                    )
    return tuple(panels)


def _series(fit: TimingFit, batch: int, prompt: int, quantity: str) -> TimeSeries | None:
    by_depth: dict[int, list[TimingPoint]] = defaultdict(list)
    for point in fit.points:
        if (point.batch, point.input_tokens) == (batch, prompt):
            by_depth[point.num_layers].append(point)
    measured = [_measured(depth, points, quantity) for depth, points in sorted(by_depth.items())]
    found = tuple(time for time in measured if time is not None)
    if not found:
        return None
    workload = Workload(batch, prompt, max(p.output_tokens for p in fit.points))
    line = _line(fit, workload, quantity) if len(fit.depths) > 1 and fit.reaches(workload) else ()
    return TimeSeries(weights=fit.key.weights, kv=fit.key.kv, points=found, line=line)


def _measured(depth: int, points: Sequence[TimingPoint], quantity: str) -> MeasuredTime | None:
    short, long = min(points, key=lambda p: p.output_tokens), max(points, key=lambda p: p.output_tokens)
    at_short = locate([run.e2e_s for run in short.runs])
    half_short = at_short.half_width if at_short.dof else 0.0
    if quantity == TTFT:
        value, half, runs = at_short.value, half_short, len(short.runs)
    elif long.output_tokens == short.output_tokens:
        return None
    else:
        steps = long.output_tokens - short.output_tokens
        at_long = locate([run.e2e_s for run in long.runs])
        half_long = at_long.half_width if at_long.dof else 0.0
        value = (at_long.value - at_short.value) / steps
        half = float(np.hypot(half_short, half_long)) / steps
        runs = min(len(short.runs), len(long.runs))
    return MeasuredTime(depth, value, value - half, value + half, runs)


def _line(fit: TimingFit, workload: Workload, quantity: str) -> tuple[MeasuredTime, ...]:
    first, deepest = quantity == TTFT, fit.depths[-1]
    found = []
    for layers in np.unique(np.append(np.linspace(1, fit.num_layers, _LINE_POINTS), deepest)):
        # the fit is linear in layers, so that points between whole ones are on it
        at = fit.predict(workload, float(layers), first)
        low = max(at.low, fit.floor_s(workload, first)) if layers > deepest else at.low
        value = max(at.value, 0.0)
        found.append(MeasuredTime(float(layers), value, min(max(low, 0.0), value), max(at.high, value)))
    return tuple(found)
