"""Points of a profile as times of the whole model: what repeats cost is taken off, what cannot be is left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimators.all_reduce import GroupSums
from fingerprint.estimators.physical_floor import PhysicalFloor
from fingerprint.estimators.repeat_overhead import (
    RepeatCosts,
    Round,
    ending,
    repeat_costs,
    repeated_points,
    together,
    token_bound_s,
    until_first,
)
from fingerprint.estimators.trusted_points import Distrust, trusted_points
from fingerprint.measurements import MeasuredKey, Profile, RunReading, TimingPoint

__all__ = ["MeasuredPoints", "WholePoint", "measured_points", "unusable_points", "whole_points"]

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
    return _points_and_costs(points, num_layers, most_per_token_s, stalled)[0]


def _points_and_costs(
    points: tuple[TimingPoint, ...],
    num_layers: int,
    most_per_token_s: float,
    stalled: frozenset[tuple[int, int, int]],
) -> tuple[tuple[WholePoint, ...], RepeatCosts]:
    """Return :func:`whole_points`, with what a repeat cost."""
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
    return tuple(point for point in told if point.usable), costs


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


@dataclass(frozen=True, slots=True)
class MeasuredPoints:
    """Points of every configuration that was run."""

    points: dict[MeasuredKey, tuple[WholePoint, ...]] = field(default_factory=dict)
    shards: set[MeasuredKey] = field(default_factory=set)  # of these, what was run as one TP rank alone
    impossible: set[MeasuredKey] = field(default_factory=set)  # run, and no point tells a time to be trusted
    too_few: set[MeasuredKey] = field(default_factory=set)  # of these, most points are not trusted
    contradicted: set[MeasuredKey] = field(default_factory=set)  # of whose prompts the two depths do not agree
    distrusts: list[Distrust] = field(default_factory=list)


@lru_cache(maxsize=8)
def measured_points(profile: Profile) -> MeasuredPoints:
    """Return the points of a profile that tell times of the whole model; of the last profiles they are kept."""
    floor = PhysicalFloor(profile.spec, profile.machine.device)
    grouped: dict[tuple[bool, MeasuredKey], list[TimingPoint]] = {}
    for point in profile.timing:
        if point.repeat == profile.spec.num_layers // point.num_layers:
            grouped.setdefault((point.shard, point.key), []).append(point)
    found = MeasuredPoints()
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
            whole, costs = _points_and_costs(trusted.points, profile.spec.num_layers, most, trusted.stalled)
        except NotMeasuredError:
            continue
        if shard:
            sums = GroupSums(profile.spec, profile.machine.device, key.tp)
            whole = tuple(point.with_sums(sums) for point in whole)
        whole = tuple(point for point in whole if _is_possible(point, key.config(profile.engine), floor))
        if costs.contradicted:
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


def unusable_points(profile: Profile, found: MeasuredPoints) -> Iterator[str]:
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
