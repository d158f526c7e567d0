"""L3: latency from depth-tied fingerprints, whose forward was repeated to the whole model's depth.

With N layers, p stages and fingerprints of k layers per stage run r = N // (p k) times, a step takes
``r (o + p k h) + c``: h one layer, o what a repeat costs beside its layers (embedding, last norm, a graph's start,
the host's call), c what happens once. Two depths tell o, since both run (nearly) N layers:
``T(k, r) - T(k', r') = (r - r') o``. The whole model is ``T(k, r) - (r - 1) o + (N - r p k) h``.

What is predicted is what a client sees of a batch handed over at once: TTFT is the time of a burst of one output
token, of bursts back to back; ``TPOT = (T(n) - TTFT) / (n - 1)`` for n output tokens, where T(n) starts on a
cooler GPU (its prefill is a little faster) whose first decode steps still run at the prefill's lower clock. Both
are measured, so both are in it.

Between measured points the logarithm of (measured / roofline) is smooth: a Gaussian process over log2 batch and
log2 input tokens carries it, with an interval that widens away from what was measured. Between means inside the
convex hull of the points in these two logarithms: a corner of the box around them where none was run (the largest
batch with the longest input, mostly) is beyond, and its source says so.

A tensor-parallel group that was run as one of its ranks alone gets its sums from ``all_reduce``, and says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import LinearRegression, QuantileRegressor

from fingerprint.config import DeploymentConfig, Pruning, WeightFormat, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator, Quantity, Source
from fingerprint.estimators.all_reduce import GroupSums
from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.l2 import Latency, MeasuredKey, key_of
from fingerprint.measurements import Profile, RunReading, StepReading, TimingPoint

Array = npt.NDArray[np.float64]

__all__ = ["L3", "Overhead", "WholePoint", "in_hull", "repeat_overheads", "repeated_points", "whole_points"]

_LENGTH_OCTAVES = 2.5  # of batch or input, over which the ratio to the roofline keeps its value
_RATIO_SPREAD = 0.2  # of its logarithm, prior to any measurement
_PACE_S, _PACE_SHARE = 2e-4, 0.01  # how well a forward's time is told: the host's pace, the clock's
_Z90 = 1.6449
_ON_THE_EDGE = 1e-6  # of the hull of points, in octaves: rounding


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that one repeat costs beside its layers: ``per_pass * passes + per_token * tokens``."""

    per_pass_s: float
    per_token_s: float

    def at(self, passes: float, tokens: float) -> float:
        return self.per_pass_s * passes + self.per_token_s * tokens


@dataclass(frozen=True, slots=True)
class WholePoint:
    """What the whole model takes at one measured point, repeats' overhead taken off."""

    batch: int
    input_tokens: int
    ttft_s: float
    first_s: float  # until the first token in the runs that go on, on a cooler GPU
    steps_s: tuple[float, ...]  # the following decode steps of the whole batch, in order
    ending_s: tuple[float, ...]  # the last decode steps, when sequences whose prompt came early had ended
    passes: float  # steps that computed the prompts
    relative_spread: float  # half of the 90% interval of one burst's time, over that time

    def with_sums(self, sums: GroupSums) -> WholePoint:
        """Of a whole group, where this is of one of its ranks alone."""
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
        """Whether every time is positive: noise larger than what is measured makes some that are not."""
        times = (self.ttft_s, self._measured_s + self.first_s - self.ttft_s, *self.steps_s, *self.ending_s)
        return min(times) > 0


def whole_points(points: tuple[TimingPoint, ...], num_layers: int) -> tuple[WholePoint, ...]:
    """The whole model at every point that the deepest repeated fingerprint generated at.

    TTFT is that of bursts of one token; where none was run, that of the bursts that went on, on a cooler GPU. A
    point where no decode step held the whole batch tells nothing of it and is left out.

    Args:
        points: of one configuration.
        num_layers: of the whole model.

    Raises:
        NotMeasuredError: no fingerprint was repeated, or one alone.
    """
    repeated, deepest = repeated_points(points, num_layers)
    short = {(p.batch, p.input_tokens): p for p in repeated if p.num_layers == deepest and p.output_tokens == 1}
    long = {(p.batch, p.input_tokens): p for p in repeated if p.num_layers == deepest and p.output_tokens > 1}
    if {p.num_layers for p in repeated} == {deepest} and any(p.repeat > 1 for p in repeated):
        raise NotMeasuredError(f"{deepest} layers alone were repeated, which does not tell what a repeat costs")
    first, step = _overheads(repeated, deepest)
    found = (_whole(short.get(at, long[at]), long[at], num_layers, first, step) for at in sorted(long))
    return tuple(point for point in found if point.usable)


def repeat_overheads(points: tuple[TimingPoint, ...], num_layers: int) -> tuple[Overhead, Overhead]:
    """What one repeat costs until the first token and in a decode step; zero where one depth alone was repeated.

    Arguments and errors are those of :func:`whole_points`.
    """
    return _overheads(*repeated_points(points, num_layers))


def repeated_points(points: tuple[TimingPoint, ...], num_layers: int) -> tuple[list[TimingPoint], int]:
    """The repeated points that tell something of the whole model, and the deepest fingerprint's layers.

    Arguments and errors are those of :func:`whole_points`.
    """
    repeated = [p for p in points if p.repeat == num_layers // p.num_layers]  # not those run as they are
    if not repeated:
        raise NotMeasuredError("no fingerprint was run with its forward repeated; profile the model again")
    repeated = [p for p in repeated if p.output_tokens == 1 or _decodes_together(p)]
    return repeated, max((p.num_layers for p in repeated), default=0)


@dataclass(frozen=True, slots=True)
class _Took:
    """Seconds of a burst until its first tokens, or of one decode step, and what was run in them."""

    seconds: float
    forward_s: float  # of one stage
    passes: float
    tokens: float


def _whole(short: TimingPoint, long: TimingPoint, num_layers: int, first: Overhead, step: Overhead) -> WholePoint:
    settled, in_run = _first(short), _first(long)

    def step_s(reading: StepReading) -> float:
        took = _Took(reading.cadence_s, reading.forward_s, 1, reading.sequences)
        return _whole_s(long, took, step, num_layers)

    by_run = [[step_s(s) for s in _together(long, run)] for run in long.runs]
    steps = tuple(statistics.median(in_order) for in_order in zip(*by_run, strict=False))
    ending = [[step_s(s) for s in _decoding(run) if s.sequences < long.batch] for run in long.runs]
    return WholePoint(
        batch=short.batch,
        input_tokens=short.input_tokens,
        ttft_s=_whole_s(short, settled, first, num_layers),
        first_s=_whole_s(long, in_run, first, num_layers),
        steps_s=steps,
        ending_s=tuple(statistics.median(in_order) for in_order in zip(*ending, strict=False)),
        passes=settled.passes,
        relative_spread=_spread([run.e2e_s for run in short.runs]),
    )


def _whole_s(point: TimingPoint, took: _Took, overhead: Overhead, num_layers: int) -> float:
    """``T - (r - 1) o + (N - r p k) h``, one layer's h from the forward's own time."""
    once = overhead.at(took.passes, took.tokens)
    missing = num_layers - point.repeat * point.num_layers
    layer_s = max(0.0, took.forward_s * point.pp / point.repeat - once) / point.num_layers
    return took.seconds - (point.repeat - 1) * once + missing * layer_s


def _spread(times: list[float]) -> float:
    if len(times) < 2:
        return 0.02  # one long burst; over seconds the clock's noise averages out
    return _Z90 * statistics.stdev(times) / math.sqrt(len(times)) / statistics.mean(times)


def _first(point: TimingPoint) -> _Took:
    """Until the first tokens, whether the bursts end there or go on."""
    prompts = [[s for s in run.steps if s.prefill_tokens] for run in point.runs]
    return _Took(
        statistics.median(run.e2e_s - sum(s.cadence_s for s in _decoding(run)) for run in point.runs),
        statistics.median(sum(s.forward_s for s in steps) for steps in prompts),
        statistics.median(len(steps) for steps in prompts),
        statistics.median(sum(s.tokens for s in steps) for steps in prompts),
    )


def _decoding(run: RunReading) -> list[StepReading]:
    return [step for step in run.steps if not step.prefill_tokens]


def _together(point: TimingPoint, run: RunReading) -> list[StepReading]:
    """Decode steps of the whole batch."""
    return [step for step in _decoding(run) if step.sequences == point.batch]


def _decodes_together(point: TimingPoint) -> bool:
    return all(_together(point, run) for run in point.runs)


def _step(point: TimingPoint) -> _Took:
    """One decode step of the whole batch."""
    together = [_together(point, run) for run in point.runs]

    def middle(of: Callable[[StepReading], float]) -> float:
        by_step = zip(*([of(s) for s in steps] for steps in together), strict=False)
        return float(statistics.median(statistics.median(runs) for runs in by_step))

    return _Took(middle(lambda s: s.cadence_s), middle(lambda s: s.forward_s), 1, point.batch)


def _overheads(points: list[TimingPoint], deepest: int) -> tuple[Overhead, Overhead]:
    """Of a repeat in a first token and in a decode step, from what two depths ran alike.

    With n = r p k layers run, ``F - F' = (r - r') o + (n - n') h`` of the forwards F of all stages, for a repeat
    takes its time within the forward; what is around it is the host's, whose pace changes between two engines.
    Where the depths do not divide N alike, n differs by a layer or two, and h is the deeper one's forward less o.
    """
    by_depth: dict[int, dict[tuple[int, int, bool], TimingPoint]] = {}
    for point in points:
        at = (point.batch, point.input_tokens, point.output_tokens > 1)
        by_depth.setdefault(point.num_layers, {})[at] = point
    first: list[tuple[_Took, float]] = []
    step: list[tuple[_Took, float]] = []
    for depth, others in by_depth.items():
        for at, other in others.items():
            same = by_depth[deepest].get(at)
            if depth == deepest or same is None or other.repeat == same.repeat:
                continue
            of = _step if at[2] else _first
            there, here = of(other), of(same)
            more_layers = (other.repeat * other.num_layers - same.repeat * same.num_layers) / same.num_layers
            forwards_s = same.pp * (there.forward_s - here.forward_s)
            excess_s = forwards_s - more_layers * here.forward_s * same.pp / same.repeat
            (step if at[2] else first).append((here, excess_s / (other.repeat - same.repeat - more_layers)))
    return _fit_overhead(first), _fit_overhead(step)


def _fit_overhead(seen: list[tuple[_Took, float]]) -> Overhead:
    """Non-negative least absolute deviations of seconds per repeat over passes and tokens.

    Absolute, because a launch-bound forward on a slow host is an outlier. A forward is told to ``_PACE_S``, or to
    ``_PACE_SHARE`` of it where that is more.
    """
    if not seen:
        return Overhead(0.0, 0.0)
    work = np.array([[took.passes, took.tokens] for took, _ in seen])
    cost, seconds = np.array([c for _, c in seen]), np.array([took.forward_s for took, _ in seen])
    weight = 1 / np.maximum(_PACE_S, _PACE_SHARE * seconds)
    # One size alone does not tell the two apart: as if nothing grew.
    told_apart = np.linalg.matrix_rank(work) == 2
    tried = (work, work * [1, 0], work * [0, 1]) if told_apart else (work * [1, 0],)
    fits = [_absolute_fit(columns, cost, weight) for columns in tried]
    loss = [float(weight @ np.abs(cost - work @ fit)) if fit.min() >= 0 else math.inf for fit in fits]
    per_pass, per_token = fits[loss.index(min(loss))] if min(loss) < math.inf else (0.0, 0.0)
    return Overhead(float(per_pass), float(per_token))


def _absolute_fit(work: Array, cost: Array, weight: Array) -> Array:
    """Least absolute deviations without an intercept; columns of zeros get no coefficient."""
    scale = np.array([max(1.0, float(column.max())) for column in work.T])
    unit = max(float(np.abs(cost).max()), 1e-12)  # the solver's tolerances are absolute
    fit = QuantileRegressor(quantile=0.5, alpha=0.0, fit_intercept=False)
    fit.fit(work / scale, cost / unit, sample_weight=weight / weight.max())
    return np.where(work.any(axis=0), fit.coef_ * unit / scale, 0.0)


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
        self._calibration = calibration
        self.points: Mapping[MeasuredKey, tuple[WholePoint, ...]]
        self.shards: frozenset[MeasuredKey]  # of these, what was run as one TP rank alone
        self.points, self.shards = _by_key(profile)
        self.unusable = tuple(_unusable(profile, self.points))

    def reaches(self, config: DeploymentConfig) -> bool:
        """Whether this very configuration was run."""
        return config.pruning is Pruning.NONE and key_of(config) in self.points

    def latency(self, config: DeploymentConfig, workload: Workload) -> Latency:
        """Predict ``config`` under ``workload``.

        Raises:
            NotMeasuredError: the configuration was not run.
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
        between = in_hull([_octaves(p) for p in points], _octaves(workload))
        source = Source.EXTRAPOLATED if between else Source.SCALED
        found = Latency(
            self._between(points, ttft, workload, asked.ttft_s, "ttft", config.weights, source),
            self._between(points, tpot, workload, asked.tpot_s, "tpot", config.weights, source),
        )
        return self._of_a_group(found, config.tp, points, workload) if key_of(config) in self.shards else found

    def _of_a_group(self, rank: Latency, tp: int, points: tuple[WholePoint, ...], workload: Workload) -> Latency:
        """``rank`` with the source and the interval of sums that were modelled."""
        sums = GroupSums(self.profile.spec, self.profile.machine.device, tp)
        tokens = workload.batch * workload.input_tokens
        passes = max(1.0, tokens / max(p.batch * p.input_tokens / p.passes for p in points))
        return Latency(
            _widened(rank.ttft_s, sums.log_errors(sums.prompts_s(tokens, passes), rank.ttft_s.value)),
            _widened(rank.tpot_s, sums.log_errors(sums.step_s(workload.batch), rank.tpot_s.value)),
        )

    def _between(
        self,
        points: tuple[WholePoint, ...],
        log_ratios: list[float],
        workload: Workload,
        roofline: Quantity,
        metric: str,
        weights: WeightFormat,
        source: Source,
    ) -> Quantity:
        where = np.log2([[p.batch, p.input_tokens] for p in points])
        mean = statistics.fmean(log_ratios)
        noise = np.array([max(0.003, p.relative_spread / _Z90) ** 2 for p in points])
        process = GaussianProcessRegressor(
            ConstantKernel(_RATIO_SPREAD**2) * RBF(_LENGTH_OCTAVES), alpha=noise, optimizer=None
        )
        process.fit(where, np.array(log_ratios) - mean)
        asked = np.log2([[workload.batch, workload.input_tokens]])
        (shift,), (deviation,) = process.predict(asked, return_std=True)
        others = self._calibration.of_others(
            metric,
            prompt_tokens=workload.batch * workload.input_tokens,
            exclude_shape=self.profile.spec.shape_hash,
            engine=dict(self.profile.machine.versions).get("engine", self.profile.engine),
            gpu=self.profile.machine.device.name,
            weights=weights,
        )
        value = roofline.value * math.exp(mean + float(shift) + others.middle)
        spread = _Z90 * float(deviation)
        return Quantity(
            value,
            value * math.exp(-math.hypot(others.middle - others.low, spread)),
            value * math.exp(math.hypot(others.high - others.middle, spread)),
            source,
        )


def _widened(found: Quantity, log_errors: tuple[float, float]) -> Quantity:
    """With independent errors of the logarithm on both sides; squares add."""
    below, above = log_errors
    return Quantity(
        found.value,
        found.value * math.exp(-math.hypot(below, math.log(found.value / found.low))),
        found.value * math.exp(math.hypot(above, math.log(found.high / found.value))),
        Source.SHARDED,
    )


def _by_key(profile: Profile) -> tuple[dict[MeasuredKey, tuple[WholePoint, ...]], frozenset[MeasuredKey]]:
    """The points of every configuration, and which of these were run as one rank alone."""
    grouped: dict[tuple[bool, MeasuredKey], list[TimingPoint]] = {}
    for point in profile.timing:
        key = MeasuredKey(point.tp, point.pp, point.weights, point.kv)
        grouped.setdefault((point.shard, key), []).append(point)
    found, shards = {}, set()
    for (shard, key), points in sorted(grouped.items()):
        if shard and key in found:  # the real group was run
            continue
        try:
            whole = whole_points(tuple(points), profile.spec.num_layers)
        except NotMeasuredError:
            continue
        if shard:
            sums = GroupSums(profile.spec, profile.machine.device, key.tp)
            whole = tuple(point.with_sums(sums) for point in whole)
        if whole:
            found[key] = whole
            shards |= {key} if shard else set()
    return found, frozenset(shards)


def _unusable(profile: Profile, used: Mapping[MeasuredKey, tuple[WholePoint, ...]]) -> Iterator[str]:
    """A sentence on each point that was measured and tells no time of the whole model."""
    told = {(key, p.batch, p.input_tokens) for key, points in used.items() for p in points}
    measured = {
        (MeasuredKey(p.tp, p.pp, p.weights, p.kv), p.batch, p.input_tokens)
        for p in profile.timing
        if p.output_tokens > 1 and p.repeat == profile.spec.num_layers // p.num_layers
    }
    for key, batch, input_tokens in sorted(measured - told):
        yield (
            f"tp={key.tp} pp={key.pp} {key.weights}: batch {batch} with {input_tokens} in is unusable, what it "
            "took and what its repeats cost tell no time of the whole model"
        )


def _growth(points: tuple[WholePoint, ...], batch: int) -> float:
    """Seconds by which a decode step grows per token of every sequence's context; 0 with one input length."""
    same = [(p.input_tokens, p.steady_s) for p in points if p.batch == batch]
    if len({n for n, _ in same}) < 2:
        return 0.0
    tokens, seconds = np.array(same, dtype=float).T
    return max(0.0, float(np.polyfit(tokens, seconds, 1)[0]))


def in_hull(points: Sequence[tuple[float, float]], asked: tuple[float, float]) -> bool:
    """Whether ``asked`` lies in the convex hull of ``points``: whether it is their mean under some weights.

    One point or several in a row have a hull too.
    """
    corners = np.array([(x, y, 1.0) for x, y in points]).T
    wanted = np.array([*asked, 1.0])
    weights = LinearRegression(positive=True, fit_intercept=False).fit(corners, wanted).coef_
    return bool(np.linalg.norm(corners @ weights - wanted) < _ON_THE_EDGE)


def _octaves(at: WholePoint | Workload) -> tuple[float, float]:
    return math.log2(at.batch), math.log2(at.input_tokens)
