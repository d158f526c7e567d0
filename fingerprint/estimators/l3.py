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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from fingerprint.estimators.physical_floor import PhysicalFloor
from fingerprint.estimators.repeat_overhead import (
    RepeatCosts,
    Round,
    depths_contradict,
    ending,
    repeat_costs,
    repeated_points,
    together,
    token_bound_s,
    until_first,
)
from fingerprint.estimators.trusted_points import Distrust, trusted_points
from fingerprint.measurements import MeasuredKey, Profile, RunReading, TimingPoint, key_of

__all__ = ["L3", "WholePoint", "in_hull", "whole_points"]

# Of what steps grow by beyond the measured contexts, how far it may be off: in 74 extrapolations by an octave 0.84
# at most where it was 3% of the step or more, but for three in which noise hid it; mostly 0.1 (decision 58).
_GROWTH_ERROR = 0.8
_SMALL_ERROR = 0.02  # of a TPOT, by which a measured one may be off beyond its contexts
_Z90 = 1.6449
# Share and seconds by which nine calls in ten are off the median of the same point's other calls: 341 of one token
# and 944 of 65, whole models on vLLM 0.33 (docs/decisions, 57).
_LONE_PROMPTS, _LONE_STEPS = (0.035, 0.015), (0.045, 0.010)


@dataclass(frozen=True, slots=True)
class WholePoint:
    """Times of the whole model at one measured point, repeats' overhead taken off."""

    batch: int
    input_tokens: int
    ttft_s: float
    first_s: float  # until the first token in the runs that go on, on a cooler GPU
    steps_s: tuple[float, ...]  # the following decode steps of the whole batch, in order
    ending_s: tuple[float, ...]  # the last decode steps, when sequences whose prompt was computed early had ended
    passes: float  # steps that computed the prompts
    relative_spread: float  # half of the 90% interval of one burst's time, over that time
    lone_prompts: float = 0.0  # the same, of a lone burst's prompts and of its decode steps; 0: there are several
    lone_steps: float = 0.0

    def with_sums(self, sums: GroupSums) -> WholePoint:
        """Return the times of a whole group, where these are of one of its ranks alone."""
        first_s = sums.prompts_s(self.batch * self.input_tokens, self.passes)
        step_s = sums.step_s(self.batch)
        return replace(
            self,
            ttft_s=self.ttft_s + first_s,
            first_s=self.first_s + first_s,
            steps_s=tuple(s + step_s for s in self.steps_s),
            ending_s=tuple(s + step_s for s in self.ending_s),
        )

    @property
    def steady_s(self) -> float:
        """A decode step once clocks have recovered from the prefill."""
        return statistics.median(self.steps_s[len(self.steps_s) // 2 :])

    def tpot_s(self, output_tokens: int, growth_s: float = 0.0) -> float:
        """``(T(n) - TTFT) / (n - 1)`` for n output tokens.

        The GPU cools while it decodes, so with fewer tokens than were measured the prefill is taken to differ from
        that of back-to-back bursts in proportion to the decode time: with one token, T(n) is the TTFT.

        Args:
            growth_s: what a decode step grows by with every token of context of each sequence.
        """
        decode_s = self._decode_s(max(1, output_tokens - 1), growth_s)
        cooled = min(1.0, decode_s / self._measured_s)
        return (decode_s + cooled * (self.first_s - self.ttft_s)) / max(1, output_tokens - 1)

    def _decode_s(self, steps: int, growth_s: float) -> float:
        together = max(0, steps - len(self.ending_s))
        seen = self.steps_s[:together]
        more = together - len(seen)
        middle = 0.75 * len(self.steps_s)  # of the steps behind ``steady_s``
        grown_s = growth_s * (len(self.steps_s) + more / 2 - middle)
        return sum(seen) + more * (self.steady_s + grown_s) + sum(self.ending_s[-steps:])

    @property
    def _measured_s(self) -> float:
        return sum(self.steps_s) + sum(self.ending_s)

    @property
    def usable(self) -> bool:
        """Return whether every time is positive; noise larger than the time measured makes it negative."""
        times = (self.ttft_s, self._measured_s + self.first_s - self.ttft_s, *self.steps_s, *self.ending_s)
        return min(times) > 0


def whole_points(
    points: tuple[TimingPoint, ...],
    num_layers: int,
    most_per_token_s: float = math.inf,
    stalled: frozenset[tuple[int, int, int]] = frozenset(),
) -> tuple[WholePoint, ...]:
    """The whole model at every point that the deepest repeated fingerprint generated at.

    TTFT is that of bursts of one token; where none was run, that of the bursts that went on, on a cooler GPU. A
    point where no decode step held the whole batch tells nothing of it and is left out.

    Args:
        points: of one configuration.
        num_layers: of the whole model.
        most_per_token_s: a repeat's cost outside its layers, at most (``repeat_overhead.token_bound_s``).
        stalled: layers, batch and input tokens of bursts that go on whose prompts tell no time
            (``trusted_points``): then their first token is taken to arrive as in those of one token.

    Raises:
        NotMeasuredError: no fingerprint was repeated, or one alone, or two of other mixes at no point of both.
    """
    repeated, deepest = repeated_points(points, num_layers)
    short = {(p.batch, p.input_tokens): p for p in repeated if p.num_layers == deepest and p.output_tokens == 1}
    long = {(p.batch, p.input_tokens): p for p in repeated if p.num_layers == deepest and p.output_tokens > 1}
    if {p.num_layers for p in repeated} == {deepest} and any(p.repeat > 1 for p in repeated):
        raise NotMeasuredError(f"{deepest} layers alone were repeated, which does not tell what a repeat costs")
    costs = repeat_costs(repeated, deepest, most_per_token_s)
    found = (_whole(short.get(at, long[at]), long[at], num_layers, costs) for at in sorted(long))
    told = (
        p if (deepest, p.batch, p.input_tokens) not in stalled else replace(p, first_s=p.ttft_s) for p in found
    )
    return tuple(point for point in told if point.usable)


def _whole(short: TimingPoint, long: TimingPoint, num_layers: int, costs: RepeatCosts) -> WholePoint:
    settled, in_run = until_first(short), until_first(long)

    def steps_s(of: Callable[[TimingPoint, RunReading], list[Round]]) -> tuple[float, ...]:
        """Medians over the bursts, in order."""
        by_run = [
            [
                _whole_s(long, s.cadence_s, s.forward_s, costs.step_s(long, index, s), num_layers)
                for index, s in enumerate(of(long, run))
            ]
            for run in long.runs
        ]
        return tuple(statistics.median(in_order) for in_order in zip(*by_run, strict=False))

    return WholePoint(
        batch=short.batch,
        input_tokens=short.input_tokens,
        ttft_s=_whole_s(short, settled.seconds, settled.forward_s, costs.first_s(short, settled), num_layers),
        first_s=_whole_s(long, in_run.seconds, in_run.forward_s, costs.first_s(long, in_run), num_layers),
        steps_s=steps_s(together),
        ending_s=steps_s(ending),
        passes=settled.passes,
        relative_spread=_spread([run.e2e_s for run in short.runs]),
        lone_prompts=_lone(short, settled.seconds, _LONE_PROMPTS),
        lone_steps=_lone(long, sum(s.cadence_s for s in together(long, long.runs[0])), _LONE_STEPS),
    )


def _whole_s(point: TimingPoint, seconds: float, forward_s: float, once_s: float, num_layers: int) -> float:
    """``T - (r - 1) o + (N - r p k) h``, one layer's h from the forward's own time.

    Where stages work at once, on batches of their own, so much less of all stages' o and h passes one after the
    other.

    Args:
        forward_s: of the ``seconds``, one stage's forward, all repeats of it.
        once_s: o.
    """
    missing = num_layers - point.repeat * point.num_layers
    layer_s = max(0.0, forward_s * point.pp / point.repeat - once_s) / point.num_layers
    in_turn = 1.0 if point.pp == 1 else min(1.0, seconds / (point.pp * forward_s))
    return seconds - in_turn * ((point.repeat - 1) * once_s - missing * layer_s)


def _spread(times: list[float]) -> float:
    if len(times) < 2:
        return 0.02  # one long burst; over seconds the clock's noise averages out
    return _Z90 * statistics.stdev(times) / math.sqrt(len(times)) / statistics.mean(times)


def _lone(point: TimingPoint, seconds: float, apart: tuple[float, float]) -> float:
    """Return by what share ``seconds`` of a lone burst may be off its like; 0.0: there are several.

    Args:
        apart: the share, and the seconds, that one burst is off the median of many.
    """
    return math.hypot(apart[0], apart[1] / seconds) if len(point.runs) == 1 and seconds > 0 else 0.0


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
        found = _measured(profile, PhysicalFloor(profile.spec, profile.machine.device))
        self.points: Mapping[MeasuredKey, tuple[WholePoint, ...]] = found.points
        self.shards = frozenset(found.shards)  # of these, what was run as one TP rank alone
        self.impossible = frozenset(found.impossible)  # run, and no point tells a time to be trusted
        self.unusable = tuple(_unusable(profile, found))

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
        growth = {batch: _growth(points, batch) for batch in {p.batch for p in points}}
        ttft, tpot = [], []
        for point in points:
            at = Workload(batch=point.batch, input_tokens=point.input_tokens, output_tokens=workload.output_tokens)
            roofline = self._roofline.estimate(config, at)
            ttft.append(math.log(point.ttft_s / roofline.ttft_s.value))
            tpot.append(
                math.log(point.tpot_s(workload.output_tokens, growth[point.batch]) / roofline.tpot_s.value)
            )
        asked = self._roofline.estimate(config, workload)
        between = in_hull([octaves(p) for p in points], octaves(workload))
        source = Source.EXTRAPOLATED if between else Source.SCALED
        first = self._between(points, ttft, workload, asked.ttft_s, "ttft", config, source)
        later = self._between(points, tpot, workload, asked.tpot_s, "tpot", config, source)
        found = Latency(
            first if between else _up_to_larger(first, points, workload),
            _beyond(later, points, growth, workload),
        )
        return self._of_a_group(found, config.tp, points, workload) if key_of(config) in self.shards else found

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
        log_ratios: list[float],
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
        is_by_tokens = metric == "ttft" and self.profile.spec.num_experts > 0
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


@dataclass(frozen=True, slots=True)
class _Measured:
    """Points of every configuration that was run."""

    points: dict[MeasuredKey, tuple[WholePoint, ...]] = field(default_factory=dict)
    shards: set[MeasuredKey] = field(default_factory=set)  # of these, what was run as one TP rank alone
    impossible: set[MeasuredKey] = field(default_factory=set)  # run, and no point tells a time to be trusted
    too_few: set[MeasuredKey] = field(default_factory=set)  # of these, most points are not trusted
    contradicted: set[MeasuredKey] = field(default_factory=set)  # of whose prompts the two depths do not agree
    distrusts: list[Distrust] = field(default_factory=list)


def _measured(profile: Profile, floor: PhysicalFloor) -> _Measured:
    grouped: dict[tuple[bool, MeasuredKey], list[TimingPoint]] = {}
    for point in profile.timing:
        if point.repeat == profile.spec.num_layers // point.num_layers:
            grouped.setdefault((point.shard, point.key), []).append(point)
    found = _Measured()
    most = token_bound_s(profile.spec, profile.machine.device)
    for (shard, key), points in sorted(grouped.items(), key=lambda item: item[0]):
        if shard and key in found.points:  # the real group was run
            continue
        trusted = trusted_points(points, [p for p in points if _can_be(p, profile, floor)])
        found.distrusts.extend(trusted.distrusts)
        if not trusted.is_enough:
            found.too_few.add(key)
            found.impossible.add(key)
            continue
        try:
            whole = whole_points(trusted.points, profile.spec.num_layers, most, trusted.stalled)
        except NotMeasuredError:
            continue
        if shard:
            sums = GroupSums(profile.spec, profile.machine.device, key.tp)
            whole = tuple(point.with_sums(sums) for point in whole)
        whole = tuple(point for point in whole if _is_possible(point, key.config(profile.engine), floor))
        if depths_contradict(trusted.points, profile.spec.num_layers, most):
            found.contradicted.add(key)
        if whole:
            found.points[key] = whole
            found.shards.update({key} if shard else ())
        else:
            found.impossible.add(key)
    for left_out in (found.impossible, found.too_few):
        left_out.difference_update(found.points)
    return found


def _can_be(point: TimingPoint, profile: Profile, floor: PhysicalFloor) -> bool:
    """Return whether the GPU can keep the point's times, as the share of the model that it runs."""
    whole = profile.spec.num_layers / (point.num_layers * point.repeat)
    at = Workload(point.batch, point.input_tokens, point.output_tokens)
    first_s = until_first(point).seconds
    next_s = (statistics.median(run.e2e_s for run in point.runs) - first_s) / max(1, point.output_tokens - 1)
    config = point.key.config(profile.engine)
    return floor.allows(config, at, ttft_s=whole * first_s, tpot_s=whole * next_s)


def _is_possible(point: WholePoint, config: DeploymentConfig, floor: PhysicalFloor) -> bool:
    at = Workload(point.batch, point.input_tokens, 1 + len(point.steps_s))
    return floor.allows(config, at, ttft_s=point.ttft_s, tpot_s=point.steady_s)


def _unusable(profile: Profile, found: _Measured) -> Iterator[str]:
    """A sentence on each point that was measured and is not trusted, or tells no time of the whole model."""
    told = {(key, p.batch, p.input_tokens) for key, points in found.points.items() for p in points}
    named = set[tuple[MeasuredKey, int, int]]()
    for distrust in found.distrusts:
        at = (distrust.point.key, distrust.point.batch, distrust.point.input_tokens)
        if at not in named:
            named.add(at)
            yield str(distrust)
    for key in sorted(found.too_few):
        yield f"{key}: too few points are trusted for any time to be measured; profile it again"
    for key in sorted(found.contradicted & found.points.keys()):
        yield (
            f"{key}: prompts took longer at one of the two depths than repeats of layers can: the host was slower "
            "there; times of short prompts may be off by that, profile it again for better ones"
        )
    measured = {
        (p.key, p.batch, p.input_tokens)
        for p in profile.timing
        if p.output_tokens > 1 and p.repeat == profile.spec.num_layers // p.num_layers
    }
    for key, batch, input_tokens in sorted(measured - told - named):
        if key not in found.too_few:
            yield (
                f"{key}: batch {batch} with {input_tokens} in is unusable, what it "
                "took and what its repeats cost tell no time of the whole model, or less than the GPU can need"
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
