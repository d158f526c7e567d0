"""L3: latency from depth-tied fingerprints, whose forward was repeated to the whole model's depth.

With N layers, p stages and fingerprints of k layers per stage run r = N // (p k) times, a step takes
``r (o + p k h) + c``: h one layer, o a repeat's cost outside its layers (embedding, last norm, a graph's start,
the host's call), c what happens once. Two depths tell o (``repeats``), since both run (nearly) N layers:
``T(k, r) - T(k', r') = (r - r') o``. The whole model is ``T(k, r) - (r - 1) o + (N - r p k) h``. Layers of several
kinds are measured in cuts between which this holds for their mix (``depth_tied_cuts``).

What is predicted is what a client sees of a batch handed over at once: TTFT is the time of a burst of one output
token, of bursts back to back; ``TPOT = (T(n) - TTFT) / (n - 1)`` for n output tokens, where T(n) starts on a
cooler GPU (its prefill is a little faster) whose first decode steps still run at the prefill's lower clock. Both
are measured, so both are in it.

Between measured points the logarithm of (measured / roofline) is smooth: a Gaussian process carries it, with an
interval that widens away from what was measured, over log2 batch and log2 input tokens; of a mixture's TTFT over
what steps of prompts go by (``of_prompts``), which a dense model's interval heeds alone. Between means inside the
convex hull of the points in log2 batch and log2 input tokens: a corner of the box around them where none was run
(the largest batch with the longest input, mostly) is beyond, and its source says so. Below the shortest measured
prompt a TTFT stops falling where the host's launches take longer than the GPU's work, which no point tells: its
interval reaches up to the least TTFT measured with as many sequences and tokens or more, which it cannot exceed.
Decode steps with longer contexts than any that was measured are taken to grow as the measured ones did, with an
interval for that (``_beyond``).

A tensor-parallel group that was run as one of its ranks alone gets its sums from ``all_reduce``, and says so.

A point whose times are less than the GPU's peaks allow (``physical_floor``) is left out: its clock was wrong.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fingerprint.config import DeploymentConfig, Pruning, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator, Quantity, Source
from fingerprint.estimators.all_reduce import GroupSums
from fingerprint.estimators.between_points import (
    PROMPTS_SPREAD,
    STEPS_SPREAD,
    Coordinates,
    in_hull,
    octaves,
    of_prompts,
    of_steps,
)
from fingerprint.estimators.calibration import Calibration, kernels_of
from fingerprint.estimators.gaussian_process import Array, smooth_at
from fingerprint.estimators.l2 import Latency
from fingerprint.estimators.whole_points import WholePoint, measured_points, unusable_points
from fingerprint.measurements import MeasuredKey, Profile, key_of

__all__ = ["L3"]

# Of what steps grow by beyond the measured contexts, how far it may be off: in 74 extrapolations by an octave 0.84
# at most where it was 3% of the step or more, but for three in which noise hid it; mostly 0.1 (decision 58).
_GROWTH_ERROR = 0.8
_SMALL_ERROR = 0.02  # of a TPOT, by which a measured one may be off beyond its contexts
_Z90 = 1.6449


@dataclass(frozen=True, slots=True)
class _AtPoints:
    """Measured times over the roofline's at each point of a configuration."""

    ttft: tuple[float, ...]  # logarithms
    tpot: tuple[float, ...]
    growth: Mapping[int, float]  # of a decode step with every token of context, by batch


class L3:
    """Latency of every configuration that was profiled depth-tied.

    Args:
        profile: with repeated points.
        roofline: of the same model and device; only its shape between the points is used.
        calibration: how far such predictions were off on other models; moves every number and widens its interval.
    """

    name = "L3"

    def __init__(self, profile: Profile, roofline: Estimator, calibration: Calibration) -> None:
        self.profile = profile
        self._roofline = roofline
        self.calibration = calibration
        found = measured_points(profile)
        self.points: Mapping[MeasuredKey, tuple[WholePoint, ...]] = found.points
        self.shards = frozenset(found.shards)  # of these, what was run as one TP rank alone
        self.impossible = frozenset(found.impossible)  # run, and no point tells a time to be trusted
        self.unusable = tuple(unusable_points(profile, found))
        self._at_points: dict[tuple[DeploymentConfig, int], _AtPoints] = {}  # by output tokens; no calibration's

    def reaches(self, config: DeploymentConfig) -> bool:
        """Return whether this very configuration was run."""
        return config.pruning is Pruning.NONE and key_of(config) in self.points

    def latency(self, config: DeploymentConfig, workload: Workload) -> Latency:
        """Predict ``config`` under ``workload``.

        Raises NotMeasuredError: the configuration was not run.
        """
        if not self.reaches(config):
            raise NotMeasuredError(f"{config} was not profiled on {self.profile.engine}")
        points = self.points[key_of(config)]
        shape = config.without_expert_parallel  # for the roofline, which knows of no expert parallelism
        at_points = self._of_points(config, workload.output_tokens)
        asked = self._roofline.estimate(shape, workload)
        between = in_hull([octaves(p) for p in points], octaves(workload))
        source = Source.EXTRAPOLATED if between else Source.SCALED
        first = self._between(points, at_points.ttft, workload, asked.ttft_s, "ttft", config, source)
        later = self._between(points, at_points.tpot, workload, asked.tpot_s, "tpot", config, source)
        found = Latency(
            first if between else _up_to_larger(first, points, workload),
            _beyond(later, points, at_points.growth, workload),
        )
        return self._of_a_group(found, config.tp, points, workload) if key_of(config) in self.shards else found

    def _of_points(self, config: DeploymentConfig, output_tokens: int) -> _AtPoints:
        """Return what the points of ``config`` say of so many output tokens; kept, for every workload needs it."""
        kept = self._at_points.get((config, output_tokens))
        if kept is not None:
            return kept
        points, shape = self.points[key_of(config)], config.without_expert_parallel
        growth = {batch: _growth(points, batch) for batch in {p.batch for p in points}}
        ttft, tpot = [], []
        for point in points:
            at = Workload(batch=point.batch, input_tokens=point.input_tokens, output_tokens=output_tokens)
            roofline = self._roofline.estimate(shape, at)
            ttft.append(math.log(point.ttft_s / roofline.ttft_s.value))
            tpot.append(math.log(point.tpot_s(output_tokens, growth[point.batch]) / roofline.tpot_s.value))
        found = self._at_points[config, output_tokens] = _AtPoints(tuple(ttft), tuple(tpot), growth)
        return found

    def _of_a_group(self, rank: Latency, tp: int, points: tuple[WholePoint, ...], workload: Workload) -> Latency:
        """``rank`` with the source and the interval of sums that were modelled."""
        sums = GroupSums(self.profile.spec, self.profile.machine.device, tp)
        tokens = workload.batch * workload.input_tokens
        passes = max(1.0, tokens / max(p.batch * p.input_tokens / p.passes for p in points))
        ttft_s = _widened(rank.ttft_s, sums.log_errors(sums.prompts_s(tokens, passes), rank.ttft_s.value))
        tpot_s = _widened(rank.tpot_s, sums.log_errors(sums.step_s(workload.batch), rank.tpot_s.value))
        return Latency(replace(ttft_s, source=Source.SHARDED), replace(tpot_s, source=Source.SHARDED))

    def _between(
        self,
        points: tuple[WholePoint, ...],
        log_ratios: Sequence[float],
        workload: Workload,
        roofline: Quantity,
        metric: str,
        config: DeploymentConfig,
        source: Source,
    ) -> Quantity:
        mean = statistics.fmean(log_ratios)
        apart = np.array(log_ratios) - mean
        noise = np.array([max(0.003, p.relative_spread / _Z90) ** 2 for p in points])
        lone = np.array([p.lone_prompts if metric == "ttft" else p.lone_steps for p in points])
        unknown = np.maximum(noise, (lone / _Z90) ** 2)  # not known as well, and believed as much

        def smooth(of: Coordinates, spread: float, noise: Array) -> tuple[float, float]:
            where = np.array([of(point) for point in points])
            return smooth_at(np.array(of(workload)), where, apart, noise, length=1.0, spread=spread)

        by_tokens = of_prompts(self.profile.graph_tokens)
        is_by_tokens = metric == "ttft" and self.profile.spec.is_mixture
        of, spread = (by_tokens, PROMPTS_SPREAD) if is_by_tokens else (of_steps, STEPS_SPREAD)
        shift, deviation = smooth(of, spread, noise)
        if lone.any():
            deviation = smooth(of, spread, unknown)[1]
        if metric == "ttft" and not is_by_tokens:  # the value is no better by these, and the interval is
            deviation = max(deviation, smooth(by_tokens, PROMPTS_SPREAD, unknown)[1])
        others = self.calibration.of_others(
            metric,
            prompt_tokens=workload.batch * workload.input_tokens,
            exclude_shape=self.profile.spec.shape_hash,
            engine=dict(self.profile.machine.versions).get("engine", self.profile.engine),
            gpu=self.profile.machine.device.name,
            weights=kernels_of(self.profile.spec, config.weights),
            tp=config.tp,
            pp=config.pp,
            graph_tokens=self.profile.graph_tokens,
            expert_parallel=config.expert_parallel,
        )
        value = roofline.value * math.exp(mean + shift + others.middle)
        half = _Z90 * deviation
        return Quantity(
            value,
            value * math.exp(-math.hypot(others.middle - others.low, half)),
            value * math.exp(math.hypot(others.high - others.middle, half)),
            source,
        )


def _beyond(
    tpot_s: Quantity, points: Sequence[WholePoint], growth: Mapping[int, float], workload: Workload
) -> Quantity:
    """Return ``tpot_s`` with the interval of steps that have longer contexts than any that was measured.

    Where these may move it by more than ``_SMALL_ERROR`` it is no measured one.

    Args:
        growth: of a decode step with every token of context, by batch.
    """
    steps = max(1, workload.output_tokens - 1)
    longest = max(p.input_tokens + 1 + len(p.steps_s) + len(p.ending_s) for p in points)
    further = workload.input_tokens + steps - longest
    if further <= 0:
        return tpot_s
    if not any(growth.values()):  # one input length, or noise that hides it
        return replace(tpot_s, source=Source.SCALED)
    alike = min(growth, key=lambda batch: abs(math.log2(batch / workload.batch)))
    behind = min(steps, further)  # of the steps; the first of them has `further - behind + 1` tokens more
    mean_tokens = (further - (behind - 1) / 2) * behind / steps
    grown_s = growth[alike] * workload.batch / alike * mean_tokens
    error = _GROWTH_ERROR * min(1.0, grown_s / tpot_s.value)
    widened = _widened(tpot_s, (-math.log1p(-error), math.log1p(error)))
    return replace(widened, source=Source.SCALED if error > _SMALL_ERROR else tpot_s.source)


def _up_to_larger(ttft_s: Quantity, points: Sequence[WholePoint], workload: Workload) -> Quantity:
    """Return ``ttft_s`` with an interval that reaches the least TTFT of points that are no smaller."""
    batch, tokens = workload.batch, workload.input_tokens
    larger = [
        p.ttft_s * math.exp(p.relative_spread) for p in points if p.batch >= batch and p.input_tokens >= tokens
    ]
    return replace(ttft_s, high=max(ttft_s.high, min(larger, default=0.0)))


def _widened(found: Quantity, log_errors: tuple[float, float]) -> Quantity:
    """Return ``found`` with its interval widened by independent errors of the logarithm; squares add."""
    below, above = log_errors
    return replace(
        found,
        low=found.value * math.exp(-math.hypot(below, math.log(found.value / found.low))),
        high=found.value * math.exp(math.hypot(above, math.log(found.high / found.value))),
    )


def _growth(points: tuple[WholePoint, ...], batch: int) -> float:
    """Seconds by which a decode step grows per token of every sequence's context.

    A batch run with one input length takes what a cached token costs in the batch whose lengths are furthest
    apart, which noise moves least. 0 where no batch has two lengths.
    """
    lengths: dict[int, list[tuple[int, float]]] = {}
    for point in points:
        lengths.setdefault(point.batch, []).append((point.input_tokens, point.steady_s))
    apart = {b: b * (max(same)[0] - min(same)[0]) for b, same in lengths.items()}
    told_by = batch if apart[batch] else max(apart, key=apart.__getitem__)
    if not apart[told_by]:
        return 0.0
    tokens, seconds = np.array(lengths[told_by], dtype=float).T
    return max(0.0, float(np.polyfit(tokens, seconds, 1)[0])) * batch / told_by
