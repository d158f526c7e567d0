"""Points of a profile whose times can be trusted: those that no other call of the profile contradicts.

What disturbs a call (a kernel that is compiled, another process) only ever adds time. So no point can truly take
longer than any call that did at least as much: another call of itself, with one token or with many; one of a
larger batch, of longer prompts, of more layers in as many repeats or more; or a smaller batch, as many times as
its requests make up the point's. A point whose median is above the fastest of these by more than calls may differ
is left out, and so is a lone call that is short: the host's pace can be half of it.

Calls may differ by the share within which a profile asks them to agree, and by the host's pace, which is below
0.1 s in everything that was recorded; a compilation takes 0.4 s and more (docs/decisions, 57). The order of calls
does not count, and one call of three or more does not move their median. A longer lone call that nothing else
bounds is believed, with a wider interval (``l3``). Pipelines are not judged: calls of one point share their
prompts and steps out to the batches in flight in different ways.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fingerprint.estimators.repeat_overhead import together, until_first, until_first_s
from fingerprint.measurements import TimingPoint

__all__ = ["Distrust", "Trusted", "trusted_points"]

_AGREE_WITHIN = 0.10  # as ``DepthTiedPlan.agree_within``
_HOST_PACE_S = 0.1
_SHORT_S = 2 * _HOST_PACE_S

At = tuple[int, int, int]  # layers, batch, input tokens


@dataclass(frozen=True, slots=True)
class Distrust:
    """A point that is left out."""

    point: TimingPoint
    why: str

    def __str__(self) -> str:
        at, runs = self.point, len(self.point.runs)
        calls = "1 call" if runs == 1 else f"{runs} calls"
        return (
            f"{at.key}: batch {at.batch} with {at.input_tokens} in is not trusted ({calls} of {_depth(at)}): "
            f"{self.why}"
        )


@dataclass(frozen=True, slots=True)
class _Timed:
    """Seconds of one kind of a point's work."""

    point: TimingPoint
    what: str
    used_s: float  # what estimators take
    fastest_s: float  # of its calls
    steps: int  # that each take as long


@dataclass(frozen=True, slots=True)
class Trusted:
    """Points of one configuration, without those that are contradicted."""

    points: tuple[TimingPoint, ...]
    stalled: frozenset[At]  # of these, bursts that go on of which the decode steps alone are to be trusted
    distrusts: tuple[Distrust, ...]
    is_enough: bool  # to tell the whole model's times


def trusted_points(points: Sequence[TimingPoint], possible: Sequence[TimingPoint] | None = None) -> Trusted:
    """Return the points that no call contradicts, and why each of the rest is not trusted.

    Where a burst that goes on was disturbed in its prompts alone, its decode steps stay, if bursts of one token
    tell the time of its prompts.

    They are enough where half of the points that the deeper fingerprint generated at are trusted, for a profile
    most of which was disturbed is no measurement, and where two depths still ran alike what they ran alike before,
    bursts of one token and those that go on: it tells what a repeat costs.

    Args:
        points: of one configuration, at its repeated depths.
        possible: of these, the points with times that the GPU can keep, whose calls contradict; None: all.
    """
    judged = [point for point in points if point.pp == 1 and point.runs]
    bounding = {id(point) for point in (points if possible is None else possible)}
    prompts, steps = [_prompts(point) for point in judged], [_steps(point) for point in judged]
    prompt_bounds = [timed for timed in prompts if id(timed.point) in bounding]
    step_bounds = [timed for timed in steps if timed is not None and id(timed.point) in bounding]
    deepest = max((point.num_layers for point in points), default=0)
    kept, stalled, whys = list[TimingPoint](), set[At](), dict[int, str]()
    for point, of_prompts, of_steps in zip(judged, prompts, steps, strict=True):
        why = _lone_and_short(point) if id(point) in bounding else ""
        why = why or _contradicted(of_steps, step_bounds)
        in_prompts = _contradicted(of_prompts, prompt_bounds)
        if why or in_prompts:
            whys[id(point)] = why or in_prompts
        if not why and in_prompts and point.output_tokens > 1:
            stalled.add(_at(point))
    short = {_at(point) for point in points if point.output_tokens == 1 and id(point) not in whys}
    for point in points:
        alone = point.num_layers < deepest or _at(point) in short  # a shallow one tells decode steps alone
        if id(point) not in whys or (point.output_tokens > 1 and _at(point) in stalled and alone):
            kept.append(point)
    sound = [point for point in points if id(point) not in whys]
    return Trusted(
        points=tuple(kept),
        stalled=frozenset(stalled),
        distrusts=tuple(Distrust(point, whys[id(point)]) for point in points if id(point) in whys),
        is_enough=2 * _generated_at(sound, deepest) >= _generated_at(points, deepest)
        and _alike(points) == _alike(kept),
    )


def _at(point: TimingPoint) -> At:
    return point.num_layers, point.batch, point.input_tokens


def _generated_at(points: Sequence[TimingPoint], num_layers: int) -> int:
    return sum(point.num_layers == num_layers and point.output_tokens > 1 for point in points)


def _alike(points: Sequence[TimingPoint]) -> set[bool]:
    """Return for which kinds of bursts, those that go on or not, two depths ran the same point."""
    depths: dict[tuple[int, int, bool], set[int]] = {}
    for point in points:
        at = (point.batch, point.input_tokens, point.output_tokens > 1)
        depths.setdefault(at, set()).add(point.num_layers)
    return {goes_on for (_, _, goes_on), layers in depths.items() if len(layers) > 1}


def _prompts(point: TimingPoint) -> _Timed:
    calls = [until_first_s(point, run) for run in point.runs]
    return _Timed(point, "its prompts", until_first(point).seconds, min(calls), 1)


def _steps(point: TimingPoint) -> _Timed | None:
    """Return the mean decode step of the whole batch; None: there is none."""
    by_run = [[round_.cadence_s for round_ in together(point, run)] for run in point.runs]
    if not all(by_run):
        return None
    in_order = [statistics.median(times) for times in zip(*by_run, strict=False)]
    fastest_s = min(min(statistics.fmean(steps), statistics.median(steps)) for steps in by_run)
    return _Timed(point, "a decode step", statistics.fmean(in_order), fastest_s, len(in_order))


def _lone_and_short(point: TimingPoint) -> str:
    took_s = point.runs[0].e2e_s
    if len(point.runs) > 1 or took_s >= _SHORT_S:
        return ""
    return f"a call of {1e3 * took_s:.0f} ms follows the host's pace, and no second one tells by how much"


def _contradicted(one: _Timed | None, timed: Sequence[_Timed]) -> str:
    """Return how a call that did at least as much as ``one`` was faster; "": none was."""
    if one is None:
        return ""
    at = one.point
    as_much = (by for by in timed if _does_as_much(by.point, at))
    bounds = ((_times(at, by.point) * by.fastest_s, by.point) for by in as_much)
    bound_s, by = min(bounds, key=lambda bound: bound[0], default=(math.inf, at))
    if one.used_s <= bound_s + max(_AGREE_WITHIN * bound_s, _HOST_PACE_S / one.steps):
        return ""
    times = _times(at, by)
    by_calls = "a call" if times == 1 else f"{times} calls"
    of = f"of batch {by.batch} with {by.input_tokens} in ({_depth(by)})"
    return f"{one.what} took {1e3 * one.used_s:.1f} ms, {by_calls} {of} {1e3 * bound_s:.1f} ms"


def _does_as_much(other: TimingPoint, point: TimingPoint) -> bool:
    """Return whether ``other`` did at least as much as ``point`` for each of its requests."""
    layers = zip(point.layer_counts, other.layer_counts, strict=True)
    as_deep = all(mine * point.repeat <= its * other.repeat for mine, its in layers)
    return as_deep and point.repeat <= other.repeat and point.input_tokens <= other.input_tokens


def _times(point: TimingPoint, other: TimingPoint) -> int:
    """Return how often a batch like ``other``'s is run until all requests of ``point`` are served."""
    return math.ceil(point.batch / other.batch)


def _depth(point: TimingPoint) -> str:
    return f"{point.num_layers} x {point.repeat} layers"
