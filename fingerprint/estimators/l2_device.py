"""L2 on the device's own time: the forward of one and two layers, extrapolated, and the host's time next to it.

Where a step timer recorded the steps of unrepeated fingerprints, a step's forward F is known on its own. With
N layers ``F(N) = o + N * h``, from two depths. The rest does not grow with depth:

* TTFT = F(N) + rest: handing over the prompts, making inputs, sampling and answering. A burst's first step
  overlaps with nothing.
* TPOT = F(N) + rest on an engine that waits for each step before it prepares the next. One that prepares the next
  meanwhile takes ``max(F(N), cadence)``, cadence being the whole step of the shallowest fingerprint: that is
  ``max(F(1), host)``, so that of the whole model is ``max(F(N), host)``.

Source: design, section 5, lessons 1 and 2. What it does not see, and the repeated forward (L3) does: prompts whose
kernels the host launches one by one, so that a shallow forward is the launching's time and not the device's; the
clock under the whole model's power; what follows a forward on the device (sampling). It reaches the batches and
input lengths that were run, at pp = 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fingerprint.config import DeploymentConfig, Pruning, Workload
from fingerprint.engines import traits_of
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Source
from fingerprint.estimators.l2 import MAX_EXTRAPOLATION, Latency, LayerEffect, quantity
from fingerprint.estimators.linear import Array, Interval, LinearModel, Prediction, combine
from fingerprint.measurements import MeasuredKey, Profile, RunReading, StepReading, TimingPoint, key_of

__all__ = ["DeviceFit", "L2Device"]

_At = tuple[int, int]  # batch, input tokens


class DeviceFit:
    """Unrepeated fingerprints of one configuration.

    Args:
        points: with step records, of all depths.
        overlapped: whether the engine prepares the next step meanwhile.
    """

    def __init__(
        self, key: MeasuredKey, num_layers: int, points: Sequence[TimingPoint], *, overlapped: bool
    ) -> None:
        self.key, self.num_layers, self.points = key, num_layers, tuple(points)
        self._overlapped = overlapped
        short = [p for p in points if p.output_tokens == 1]
        long = [p for p in points if p.output_tokens > 1 and all(_decodes(p, run) for run in p.runs)]
        self._long_output = max((p.output_tokens for p in long), default=1)
        self._first, self._next = _by_point(short), _by_point(long)
        self.reached: tuple[_At, ...] = tuple(sorted(self._first.keys() & self._next.keys()))

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(sorted({point.num_layers for point in self.points}))

    @property
    def is_determined(self) -> bool:
        return bool(self.reached)

    def reaches(self, workload: Workload) -> bool:
        """Return whether this batch and input were run, and the mean context is at most a factor of two off."""
        there = workload.input_tokens + self._long_output / 2
        asked = workload.input_tokens + workload.output_tokens / 2
        near = there / MAX_EXTRAPOLATION <= asked <= there * MAX_EXTRAPOLATION
        return near and (workload.batch, workload.input_tokens) in self.reached

    def nearest_workload(self, workload: Workload) -> Workload:
        def apart(at: _At) -> tuple[float, _At]:
            return abs(math.log(at[0] / workload.batch)) + abs(math.log(at[1] / workload.input_tokens)), at

        batch, input_tokens = min(self.reached, key=apart)
        return Workload(batch, input_tokens, self._long_output)

    def latency(self, workload: Workload) -> Latency:
        """Raises NotMeasuredError: this batch and input were not run."""
        if not self.reaches(workload):
            raise NotMeasuredError(f"{workload} was not run unrepeated at {self.key}")
        at = (workload.batch, workload.input_tokens)
        first, step = self._first[at], self._next[at]
        in_bursts = [_over_runs(p, _prefill_forward_s) for p in first]
        beside = [_over_runs(p, lambda _, run: run.e2e_s) - f for p, f in zip(first, in_bursts, strict=True)]
        ttft = self._sum(first, in_bursts, beside)
        forwards = [_over_runs(p, _decode_forward_s) for p in step]
        cadences = [_over_runs(p, _decode_cadence_s) for p in step]
        if self._overlapped:
            device, host = self._sum(step, forwards, None), _constant(cadences[:1])
            tpot = Interval(*(max(ends) for ends in zip(_ends(device), _ends(host), strict=True)))
        else:
            rest = [cadence - forward for cadence, forward in zip(cadences, forwards, strict=True)]
            tpot = self._sum(step, forwards, rest)
        return Latency(quantity(ttft, Source.EXTRAPOLATED), quantity(tpot, Source.EXTRAPOLATED))

    def layer_effect(self) -> LayerEffect:
        """Return one layer's forward at the largest point that was run.

        Raises:
            NotMeasuredError: none was run at two depths.
        """
        if not self.reached:
            raise NotMeasuredError(f"one layer's cost at {self.key} needs fingerprints of two depths")
        at = max(self.reached, key=lambda at: at[0] * at[1])
        found = []
        for points, of in ((self._first[at], _prefill_forward_s), (self._next[at], _decode_forward_s)):
            runs = [_over_runs(p, of) for p in points]
            layer = _line(points, runs).predict(np.array([0.0, 1.0]), constrained=False)
            found.append(combine([(layer, runs)]))
        return LayerEffect(self.key, *at, *found)

    def _sum(self, points: Sequence[TimingPoint], forwards: list[Array], rest: list[Array] | None) -> Interval:
        """Forward of all layers, and the rest that does not grow with them."""
        row = np.array([1.0, float(self.num_layers)])
        parts: list[tuple[Prediction, Sequence[Array]]] = [(_line(points, forwards).predict(row), forwards)]
        if rest is not None:
            parts.append((_flat(rest).predict(np.ones(1)), rest))
        return combine(parts)


class L2Device:
    """All fits of a profile whose unrepeated points carry step records.

    Args:
        overlapped: how the engine composes device and host; None: as the profile's engine does by default.
    """

    name = "L2-device"

    def __init__(self, profile: Profile, *, overlapped: bool | None = None) -> None:
        grouped: dict[MeasuredKey, list[TimingPoint]] = {}
        for point in profile.timing:
            recorded = bool(point.runs) and all(run.steps for run in point.runs)
            if recorded and point.repeat == 1 and point.pp == 1 and not point.shard:
                grouped.setdefault(point.key, []).append(point)
        if overlapped is None:
            overlapped = traits_of(profile.engine).overlaps_host
        self.fits: Mapping[MeasuredKey, DeviceFit] = {
            key: DeviceFit(key, profile.spec.num_layers, points, overlapped=overlapped)
            for key, points in grouped.items()
        }

    @property
    def layer_effects(self) -> tuple[LayerEffect, ...]:
        """Effects of one layer in every fit that determines one."""
        return tuple(fit.layer_effect() for fit in self.fits.values() if fit.is_determined)

    def latency(self, config: DeploymentConfig, workload: Workload) -> Latency:
        """Return the latency of the whole model under ``config``.

        Raises:
            NotMeasuredError: no unrepeated fingerprint of this configuration, batch and input was recorded.
        """
        fit = self.fits.get(key_of(config))
        if fit is None or config.pruning is not Pruning.NONE:
            raise NotMeasuredError(f"no step of an unrepeated fingerprint was recorded at {config}")
        return fit.latency(workload)


def _by_point(points: Sequence[TimingPoint]) -> dict[_At, list[TimingPoint]]:
    """The points of two depths or more, shallowest first."""
    found: dict[_At, list[TimingPoint]] = {}
    for point in sorted(points, key=lambda p: p.num_layers):
        found.setdefault((point.batch, point.input_tokens), []).append(point)
    return {at: alike for at, alike in found.items() if len({p.num_layers for p in alike}) > 1}


def _over_runs(point: TimingPoint, of: Callable[[TimingPoint, RunReading], float]) -> Array:
    return np.array([of(point, run) for run in point.runs])


def _prefill_forward_s(point: TimingPoint, run: RunReading) -> float:
    return sum(step.forward_s for step in run.steps)


def _decode_forward_s(point: TimingPoint, run: RunReading) -> float:
    return statistics.median(step.forward_s for step in _decodes(point, run))


def _decode_cadence_s(point: TimingPoint, run: RunReading) -> float:
    return statistics.median(step.cadence_s for step in _decodes(point, run))


def _decodes(point: TimingPoint, run: RunReading) -> list[StepReading]:
    """Decode steps of the whole batch."""
    return [step for step in run.steps if not step.prefill_tokens and step.sequences == point.batch]


def _line(points: Sequence[TimingPoint], runs: list[Array]) -> LinearModel:
    design = np.array([[1.0, float(point.num_layers)] for point in points])
    return LinearModel(design, runs, non_negative=True)


def _flat(runs: list[Array]) -> LinearModel:
    return LinearModel(np.ones((len(runs), 1)), runs, non_negative=True)


def _constant(runs: list[Array]) -> Interval:
    return combine([(_flat(runs).predict(np.ones(1)), runs)])


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high
