"""Measurements of a running worker over HTTP before a trace is played: its steps, and a request's further time.

Never of the trace itself, whose latencies are what these predict.

A profile of the worker's own model, whole, parts two errors: with it nothing is extrapolated from fingerprints, so
what a simulation then gets wrong is the simulator's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimate, Quantity, Source
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import Profile, RunReading, TimingPoint
from fingerprint.trimmed_mean import locate

__all__ = ["Lone", "WholeSteps", "lone_request", "whole_profile"]

BurstTime = Callable[[Workload], float]  # seconds of a burst over HTTP

_STEPS = 32  # decode steps of a burst that tells their time
_LONE_RUNS = 12
_FEWEST_ROUNDS = 3


class Lone(NamedTuple):
    """A request of one token each way, alone."""

    ttft_s: float
    beside_s: float  # of it, what is no step: the way there and back, HTTP, its prompt made ready, waking


def lone_request(burst: BurstTime) -> Lone:
    """Measure one step and the rest of a request.

    A decode step of one sequence is such a step, and is subtracted.
    """
    one, many = Workload(1, 1, 1), Workload(1, 1, 1 + _STEPS)
    burst(many)
    pairs = [(burst(one), burst(many)) for _ in range(_LONE_RUNS)]
    step_s = locate([(long - short) / _STEPS for short, long in pairs]).value
    ttft_s = locate([short for short, _ in pairs]).value
    return Lone(ttft_s, max(0.0, ttft_s - step_s))


def whole_profile(
    burst: BurstTime,
    profile: Profile,
    config: DeploymentConfig,
    workload: Workload,
    *,
    beside_s: float,
    max_seconds: float,
) -> Profile:
    """The whole model's times, round after round over batches and prompts up to those of ``workload``.

    Args:
        burst: of the running worker.
        profile: of the same worker's fingerprints; its memory and machine are kept.
        beside_s: of each burst, what is no step (:func:`lone_request`).
    """
    began_s = time.monotonic()
    context = workload.context_tokens
    batches = sorted({1, max(1, workload.batch // 3), workload.batch})
    prompts = sorted({max(1, context // 32), context // 4, context - _STEPS - 1})
    points = [Workload(b, p, o) for b in batches for p in prompts for o in (1, 1 + _STEPS)]
    runs: dict[Workload, list[RunReading]] = {point: [] for point in points}
    for point in points:  # what is done only once
        burst(replace(point, output_tokens=1))
    rounds = 0
    while rounds < _FEWEST_ROUNDS or (time.monotonic() - began_s) * (rounds + 1) / rounds < max_seconds:
        for point in points:
            steps_s = max(1e-9, burst(point) - beside_s)
            runs[point].append(RunReading(e2e_s=steps_s, device_s=steps_s, host_s=0.0))
        rounds += 1
    return replace(
        profile,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        budget_s=max_seconds,
        spent_s=time.monotonic() - began_s,
        timing=tuple(
            TimingPoint(
                num_layers=profile.spec.num_layers,
                tp=config.tp,
                pp=config.pp,
                weights=config.weights,
                kv=config.kv,
                batch=point.batch,
                input_tokens=point.input_tokens,
                output_tokens=point.output_tokens,
                runs=tuple(found),
            )
            for point, found in runs.items()
        ),
        notes=("of the running worker, over HTTP",),
    )


class WholeSteps:
    """Times between the points of :func:`whole_profile`, evenly in the logarithms of batch and prompt (TTFT) or in
    batch and mean context (a decode step); beyond them the last slopes go on.

    No straight line is laid through all points: of two seconds of prompts it misses some percent, and a fit of
    whole runs puts that on the few decode steps behind them.

    Raises:
        NotMeasuredError: a longer answer took no longer.
    """

    name = "whole steps"

    def __init__(self, whole: Profile) -> None:
        read = {
            (p.batch, p.input_tokens, p.output_tokens): locate([run.e2e_s for run in p.runs]).value
            for p in whole.timing
        }
        self._batches, self._prompts = (sorted({key[i] for key in read}) for i in (0, 1))
        short, long = sorted({key[2] for key in read})
        self._contexts = [prompt + long / 2 for prompt in self._prompts]
        self._ttft_log = [[math.log(read[b, p, short]) for p in self._prompts] for b in self._batches]
        self._tpot_s = [
            [(read[b, p, long] - read[b, p, short]) / (long - short) for p in self._prompts] for b in self._batches
        ]
        self._least_s = min(map(min, self._tpot_s))
        if self._least_s <= 0:
            rows = zip(self._batches, self._tpot_s, strict=True)
            b, p = next((b, p) for b, row in rows for p, s in zip(self._prompts, row, strict=True) if s <= 0)
            raise NotMeasuredError(
                f"{b} prompts of {p} tokens took {read[b, p, short]:.3f} s with {short} tokens of answer and "
                f"{read[b, p, long]:.3f} s with {long}: no decode step can be told from that; measure for longer"
            )
        self._roofline = RooflineEstimator(whole.spec, whole.machine.device)

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Estimate from the measured steps; memory is the roofline's, as no simulated worker uses it."""
        b, p = workload.batch, workload.input_tokens
        inside = b <= self._batches[-1] and self._prompts[0] <= p <= self._prompts[-1]
        source = Source.EXTRAPOLATED if inside else Source.SCALED
        logs = [[math.log(x) for x in axis] for axis in (self._batches, self._prompts)]
        ttft_s = math.exp(_between(*logs, self._ttft_log, math.log(b), math.log(p)))
        context = p + workload.output_tokens / 2
        tpot_s = max(self._least_s, _between(self._batches, self._contexts, self._tpot_s, b, context))
        return replace(
            self._roofline.estimate(config, workload),
            ttft_s=Quantity(ttft_s, ttft_s, ttft_s, source),
            tpot_s=Quantity(tpot_s, tpot_s, tpot_s, source),
        )


def _between(
    rows: Sequence[float], columns: Sequence[float], table: Sequence[Sequence[float]], row: float, column: float
) -> float:
    return _along(rows, [_along(columns, values, column) for values in table], row)


def _along(knots: Sequence[float], values: Sequence[float], at: float) -> float:
    if len(knots) == 1:
        return values[0]
    i = min(max(1, sum(knot < at for knot in knots)), len(knots) - 1)
    share = (at - knots[i - 1]) / (knots[i] - knots[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])
