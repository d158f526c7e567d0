"""L2 of the paper: the latency of a model from fingerprints of one and two layers.

``T(n_out) = TTFT + (n_out - 1) * TPOT``, ``TTFT = N * h_first + o_first``, ``TPOT = N * h_next + o_next``, h one
hidden layer and o all else. The paper solves these for one batch and length; here the four are small polynomials
of batch, prompt and context, and all points of one (tp, pp, formats) are fitted at once:

* h_first: 1, batch * prompt, batch * prompt^2 (attention)       * o_first: 1, batch, batch * prompt
* h_next:  1, batch, batch * context (KV read)                    * o_next:  1, batch

Layers that look back differently are of kinds with an h each, in which prompt^2 and context end at the window.
Device and host time are fitted apart. The host's part does not depend on depth unless the runs say so (on an
engine that overlaps the two, what is left of the host's time shrinks as layers are added; it stops at zero), so
that the host's noise is not multiplied by N. It knows nothing of memory, and predicts for no configuration whose
fingerprints were not run, but one: at batch 1, more stages cost what one stage does plus the measured hand-overs.

An interval holds the noise of the runs, what the fit does not explain, and how far one load of a model differs
from the next (``loads``): in the fingerprints' own loads, and in the one that will be served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fingerprint.config import DeploymentConfig, Pruning, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.linear import Array, Interval, LinearModel, Prediction, combine, sizes_of
from fingerprint.estimators.load_variance import LoadSpread, Spread, load_spread, share_of_loads
from fingerprint.measurements import MeasuredKey, Profile, TimingPoint, key_of
from fingerprint.model_spec import LayerKind, ModelSpec

__all__ = ["L2", "Latency", "LayerEffect", "MeasuredKey", "TimingFit", "key_of", "quantity"]

MAX_EXTRAPOLATION = 2.0  # beyond the measured batches and lengths, as a factor; further, the roofline takes over
_HOST_SCALE_FLOOR = 0.01  # of the run: a host part below that is not worth a weight of its own


@dataclass(frozen=True, slots=True)
class Latency:
    """TTFT of the whole batch and time per decode step, each with interval and source."""

    ttft_s: Quantity
    tpot_s: Quantity


@dataclass(frozen=True, slots=True)
class LayerEffect:
    """Time that one hidden layer adds at one point, with 90% intervals that may reach below zero."""

    key: MeasuredKey
    batch: int
    input_tokens: int
    first_s: Interval
    next_s: Interval

    @property
    def parts(self) -> tuple[tuple[str, Interval], ...]:
        """Both times, each with a name of the step that the layer adds it to."""
        return ("a prefill", self.first_s), ("a step", self.next_s)

    @property
    def below_resolution(self) -> tuple[tuple[str, Interval], ...]:
        """Parts in which the noise hides a layer's cost: the measurement cannot tell it from zero."""
        return tuple((of_what, layer) for of_what, layer in self.parts if layer.low <= 0 <= layer.high)

    @property
    def below_zero(self) -> tuple[tuple[str, Interval], ...]:
        """Parts in which more layers ran faster than fewer, beyond the noise: it was the runs that differed."""
        return tuple((of_what, layer) for of_what, layer in self.parts if layer.high < 0)


# One run is one row: the prefill's columns as they are, the decode step's times the number of steps.
_HOST_LAYER_COLUMNS = (5, 6)


def _device_row(
    kinds: Sequence[LayerKind],
    counts: Sequence[float],
    batch: int,
    prompt: int,
    steps: float,
    context: float,
    *,
    prefill: float,
) -> Array:
    """Args: counts: layers of each kind."""
    tokens, first, step = batch * prompt, [1.0, batch, batch * prompt], [1.0, batch]
    for kind, k in zip(kinds, counts, strict=True):
        looked_at = 2 * kind.attended_pairs(prompt) / prompt - 1  # the prompt's length, where no window cuts it
        first += [k, k * tokens, k * tokens * looked_at]
        step += [k, k * batch, k * batch * kind.attended(context)]
    return np.array([prefill * f for f in first] + [steps * f for f in step], dtype=np.float64)


def _host_row(layers: float, batch: int, prompt: int, steps: float, *, prefill: float) -> Array:
    first, step = [1, batch, batch * prompt], [1, batch]
    row = [prefill * f for f in first] + [steps * f for f in step] + [prefill * layers, steps * layers]
    return np.array(row, dtype=np.float64)


def _handover_row(batch: int, prompt: int, steps: float, *, prefill: float) -> Array:
    return np.array([prefill, prefill * batch * prompt, steps, steps * batch], dtype=np.float64)


class TimingFit:
    """All points of one :class:`MeasuredKey`, fitted.

    Args:
        spec: of the whole model.
        spread: between loads; None: as these points show it.

    Raises:
        NotMeasuredError: there is no point with a run.
    """

    def __init__(
        self, key: MeasuredKey, spec: ModelSpec, points: Sequence[TimingPoint], spread: LoadSpread | None = None
    ) -> None:
        self.key, self.num_layers, self._kinds = key, spec.num_layers, spec.kinds
        self._spread = spread or load_spread(points)
        self.points = tuple(point for point in points if point.runs)
        if not self.points:
            raise NotMeasuredError(f"no fingerprint was run at {key}; profile the model first")
        self._device_runs = [np.array([run.device_s for run in point.runs]) for point in self.points]
        self._host_runs = [np.array([run.host_s for run in point.runs]) for point in self.points]
        rows = [self._device_row_of(point) for point in self.points]
        self._device = LinearModel(np.array(rows), self._device_runs, non_negative=True)
        self._host_columns, self._host = self._fit_host()
        self.handover = self._fit_handover() if key.pp > 1 else None

    def _device_row_of(self, p: TimingPoint) -> Array:
        steps, context = p.output_tokens - 1, _mean_context(p)
        return _device_row(self._kinds, p.layer_counts, p.batch, p.input_tokens, steps, context, prefill=1)

    def _fit_host(self) -> tuple[list[int], LinearModel]:
        """Without the depth, unless its effect is beyond the noise."""
        rows = np.array(
            [_host_row(p.num_layers, p.batch, p.input_tokens, p.output_tokens - 1, prefill=1) for p in self.points]
        )
        scale = np.maximum(sizes_of(self._host_runs), _HOST_SCALE_FLOOR * sizes_of(self._device_runs))
        full = LinearModel(rows, self._host_runs, scale, non_negative=False)
        columns = [c for c in range(rows.shape[1]) if c not in _HOST_LAYER_COLUMNS]
        for column in _HOST_LAYER_COLUMNS:
            unit = np.eye(rows.shape[1])[column]
            if full.reaches(unit):
                part = (full.predict(unit), self._host_runs)
                shared, _ = self.between_loads([part], column == _HOST_LAYER_COLUMNS[0])
                effect = combine([part], at_least=shared)
                if effect.low > 0 or effect.high < 0:
                    columns.append(column)
        return columns, LinearModel(rows[:, columns], self._host_runs, scale, non_negative=False)

    def _fit_handover(self) -> tuple[LinearModel, list[Array]]:
        """Return the fit of the hand-over time at one stage boundary, and its runs."""
        runs = [np.array([run.handover_s for run in point.runs]) / (self.key.pp - 1) for point in self.points]
        rows = np.array(
            [_handover_row(p.batch, p.input_tokens, p.output_tokens - 1, prefill=1) for p in self.points]
        )
        return LinearModel(rows, runs, non_negative=True), runs

    @property
    def misfit(self) -> float:
        """Factor by which residuals exceed the runs' own spread (1: not at all); included in the intervals."""
        return self._device.misfit

    @property
    def depths(self) -> tuple[int, ...]:
        """Layer counts of the fingerprints."""
        return tuple(sorted({point.num_layers for point in self.points}))

    def layer_effect(self, batch: int | None = None, input_tokens: int | None = None) -> LayerEffect:
        """Return one layer's device time at a measured point (default: the largest), unconstrained.

        Raises:
            NotMeasuredError: fingerprints of one depth only, or a point that they do not determine.
        """
        batch, prompt, rows = self._layer_rows(batch, input_tokens)
        if not all(self._device.reaches(row) for row in rows):
            raise NotMeasuredError(f"one layer's cost at {self.key} needs fingerprints of two depths")
        found = []
        for row, first in zip(rows, (True, False), strict=True):
            part = (self._device.predict(row, constrained=False), self._device_runs)
            shared, _ = self.between_loads([part], first)
            found.append(combine([part], at_least=shared))
        return LayerEffect(self.key, batch, prompt, found[0], found[1])

    @property
    def tells_layer_effect(self) -> bool:
        """Return whether the points determine one layer's time at the largest of them; those of a profile that was
        cut short may not, though there are two depths."""
        return all(self._device.reaches(row) for row in self._layer_rows(None, None)[2])

    def _layer_rows(self, batch: int | None, input_tokens: int | None) -> tuple[int, int, list[Array]]:
        """Batch, prompt, and what one layer alone adds there to a prefill and to a decode step."""
        largest = max(self.points, key=lambda p: (p.batch * p.input_tokens, p.output_tokens))
        batch, prompt = batch or largest.batch, input_tokens or largest.input_tokens
        context = prompt + self._longest_output() / 2
        rows = [
            [self._mixed_row(layers, batch, prompt, steps, context, prefill=1 - steps) for layers in (0, 1)]
            for steps in (0, 1)
        ]
        return batch, prompt, [one - none for none, one in rows]

    def _mixed_row(
        self, layers: float, batch: int, prompt: int, steps: float, context: float, *, prefill: float
    ) -> Array:
        """Return the design row of ``layers`` layers, of each kind as large a part as in the whole model."""
        counts = [layers * kind.count / self.num_layers for kind in self._kinds]
        return _device_row(self._kinds, counts, batch, prompt, steps, context, prefill=prefill)

    def reaches(self, workload: Workload) -> bool:
        """Return whether the points determine this workload, at most a factor of two outside them."""
        contexts = [_mean_context(p) for p in self.points if p.output_tokens > 1]
        if not (
            contexts
            and _within(workload.batch, [p.batch for p in self.points])
            and _within(workload.input_tokens, [p.input_tokens for p in self.points])
            and _within(_mean_context(workload), contexts)
        ):
            return False
        return all(
            self._device.reaches(self._device_at(workload, self.num_layers, first))
            and self._host.reaches(self._host_at(workload, self.num_layers, first))
            for first in (True, False)
        )

    def nearest_workload(self, workload: Workload) -> Workload:
        """``workload`` moved into the measured batches and lengths (it may stay between measured ones)."""
        batches, prompts = [p.batch for p in self.points], [p.input_tokens for p in self.points]
        near = replace(
            workload,
            batch=min(max(workload.batch, min(batches)), max(batches)),
            input_tokens=min(max(workload.input_tokens, min(prompts)), max(prompts)),
            longest_tokens=0,  # may be shorter than the shortest measured prompt, and latency knows nothing of it
        )
        if self.reaches(near):
            return near
        return min(self._determined(), key=lambda w: (_distance((w.batch, w.input_tokens), near), w), default=near)

    @property
    def is_determined(self) -> bool:
        """Return whether the points suffice for any prediction; a profile that was cut short may have too few."""
        return bool(self._determined())

    def _determined(self) -> list[Workload]:
        """The measured batches and lengths at which the points determine both times."""
        longest = self._longest_output()
        at_points = {Workload(p.batch, p.input_tokens, longest) for p in self.points}
        return [workload for workload in at_points if self.reaches(workload)]

    def latency(self, workload: Workload) -> Latency:
        """Return the full model's latency; ``measured`` when it was itself a fingerprint and ran this workload.

        Raises:
            NotMeasuredError: the points do not determine this workload.
        """
        measured = self._measured(workload)
        if measured is not None:
            return measured
        if not self.reaches(workload):
            raise NotMeasuredError(f"{workload} is beyond what was measured at {self.key}")
        return Latency(self._extrapolated(workload, True), self._extrapolated(workload, False))

    def parts(self, workload: Workload, layers: float, first: bool) -> list[tuple[Prediction, Sequence[Array]]]:
        """Return the parts of a prefill (``first``) or a decode step of ``layers`` layers, for :func:`combine`.

        The layers are of each kind as in the whole model.
        """
        device = self._device.predict(self._device_at(workload, layers, first))
        host = self._host.predict(self._host_at(workload, layers, first))
        parts: list[tuple[Prediction, Sequence[Array]]] = [(device, self._device_runs)]
        if host.value > 0:  # below zero: all of it hides behind the device
            parts.append((host, self._host_runs))
        return parts

    def predict(self, workload: Workload, layers: float, first: bool) -> Interval:
        """A prefill (``first``) or a decode step of ``layers`` layers, in a load of its own."""
        parts = self.parts(workload, layers, first)
        shared, once_more = self.between_loads(parts, first)
        return combine(parts, at_least=shared, also=once_more)

    def between_loads(
        self, parts: Sequence[tuple[Prediction, Sequence[Array]]], first: bool
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Variance, with its degrees of freedom, that loads bring into the sum of ``parts``: the fingerprints' own
        loads, and the one that will be served.

        A load's level is shared by all points of its fingerprint, so their contributions add before they are
        squared.
        """
        spread = self._spread.first if first else self._spread.next
        each = np.zeros(len(self.points))
        for prediction, runs in parts:
            each += prediction.shares / prediction.misfit * np.array([values.mean() for values in runs])
        shared = 0.0
        for counts in sorted({point.layer_counts for point in self.points}):
            own = [i for i, point in enumerate(self.points) if point.layer_counts == counts]
            shared += float(each[own].sum()) ** 2 * share_of_loads([self.points[i] for i in own])
        value, variance = sum(prediction.value for prediction, _ in parts), spread.relative**2
        return (variance * shared, spread.dof), (variance * value**2, spread.dof)

    def floor_s(self, workload: Workload, first: bool) -> float:
        """Low end of what the deepest fingerprint took: more layers never take less. 0 when not determined."""
        deepest = self.depths[-1]
        if not self._device.reaches(self._device_at(workload, deepest, first)):
            return 0.0
        parts = self.parts(workload, deepest, first)[:1]
        shared, once_more = self.between_loads(parts, first)
        return combine(parts, at_least=shared, also=once_more).low

    def handover_parts(self, workload: Workload, first: bool) -> tuple[Prediction, list[Array]] | None:
        """Return one stage boundary's part of a step; None when it was not measured there."""
        if self.handover is None:
            return None
        model, runs = self.handover
        row = _handover_row(workload.batch, workload.input_tokens, 0 if first else 1, prefill=1 if first else 0)
        return (model.predict(row), runs) if model.reaches(row) else None

    def _device_at(self, workload: Workload, layers: float, first: bool) -> Array:
        steps, context = (0, 0.0) if first else (1, _mean_context(workload))
        return self._mixed_row(layers, workload.batch, workload.input_tokens, steps, context, prefill=1 - steps)

    def _host_at(self, workload: Workload, layers: float, first: bool) -> Array:
        steps = 0 if first else 1
        row = _host_row(layers, workload.batch, workload.input_tokens, steps, prefill=1 - steps)
        return row[self._host_columns]

    def _extrapolated(self, workload: Workload, first: bool) -> Quantity:
        whole = self.predict(workload, self.num_layers, first)
        low = max(whole.low, self.floor_s(workload, first)) if self.depths[-1] < self.num_layers else whole.low
        return quantity(Interval(whole.value, low, whole.high), Source.EXTRAPOLATED)

    def _measured(self, workload: Workload) -> Latency | None:
        """Equation 1 of the paper solved on the full model itself, if it ran this workload."""
        runs = {
            p.output_tokens: np.array([run.e2e_s for run in p.runs])
            for p in self.points
            if (p.num_layers, p.batch, p.input_tokens) == (self.num_layers, workload.batch, workload.input_tokens)
        }
        if workload.output_tokens not in runs or len(runs) < 2:
            return None
        (short, short_runs), (long, long_runs) = min(runs.items()), max(runs.items())
        pair = [short_runs, long_runs]
        design = np.array([[1.0, short - 1.0], [1.0, long - 1.0]])
        model = LinearModel(design, pair, non_negative=True)
        share = share_of_loads([point for point in self.points if point.num_layers == self.num_layers])

        def solved(row: list[float], spread: Spread) -> Interval:
            prediction = model.predict(np.array(row))
            one = (spread.relative * prediction.value) ** 2
            return combine([(prediction, pair)], at_least=(one * share, spread.dof), also=(one, spread.dof))

        ttft, tpot = solved([1.0, 0.0], self._spread.first), solved([0.0, 1.0], self._spread.next)
        return Latency(quantity(ttft, Source.MEASURED), quantity(tpot, Source.MEASURED))

    def _longest_output(self) -> int:
        return max(p.output_tokens for p in self.points)


class L2:
    """All fits of a profile; not looked at are points whose forward was repeated, and TP ranks run alone."""

    name = "L2"

    def __init__(self, profile: Profile) -> None:
        grouped: dict[MeasuredKey, list[TimingPoint]] = {}
        for point in profile.timing:
            if point.runs and point.repeat == 1 and not point.shard:
                grouped.setdefault(point.key, []).append(point)
        spreads = _spreads(profile.timing)
        self.fits = {
            key: TimingFit(key, profile.spec, points, spreads[key.tp, key.pp]) for key, points in grouped.items()
        }

    @property
    def layer_effects(self) -> tuple[LayerEffect, ...]:
        """Effects of one layer in every fit that determines one, at its largest point."""
        return tuple(fit.layer_effect() for fit in self.fits.values() if fit.tells_layer_effect)

    def latency(self, config: DeploymentConfig, workload: Workload) -> Latency:
        """Return the latency of the full model under ``config``.

        A (tp, pp) that was run is extrapolated from its own fingerprints. Another pp, at batch 1, is pp = 1 of the
        same tp plus the measured hand-over at every further stage (the paper; stages work one after the other).

        Raises:
            NotMeasuredError: neither is possible, for this configuration or this workload.
        """
        if config.pruning is not Pruning.NONE:
            raise NotMeasuredError(f"no pruned fingerprint was run, {config} is asked")
        fit = self.fits.get(key_of(config))
        if fit is not None and (len(fit.depths) > 1 or config.pp == 1):
            return fit.latency(workload)
        if config.pp == 1 or workload.batch != 1:
            raise NotMeasuredError(f"no fingerprint was run at {config}")
        return self._with_handovers(config, workload)

    def _with_handovers(self, config: DeploymentConfig, workload: Workload) -> Latency:
        base = self.fits.get(replace(key_of(config), pp=1))
        staged = [
            fit for key, fit in self.fits.items() if fit.handover is not None and key.weights == config.weights
        ]
        staged.sort(key=lambda fit: (fit.key.tp != config.tp, fit.key))
        if base is None or not base.reaches(workload) or not staged:
            raise NotMeasuredError(f"{config} needs fingerprints at tp={config.tp}, pp=1 and at some pp above 1")
        quantities = []
        for first in (True, False):
            hop = staged[0].handover_parts(workload, first)
            if hop is None:
                raise NotMeasuredError(f"{workload}: the stage hand-over was not measured at such lengths")
            prediction, runs = hop
            boundaries = config.pp - 1
            hops = Prediction(prediction.value * boundaries, prediction.shares * boundaries)
            parts = base.parts(workload, base.num_layers, first)
            shared, once_more = base.between_loads(parts, first)
            whole = combine(parts, [(hops, runs)], at_least=shared, also=once_more)
            low = max(whole.low, base.floor_s(workload, first))
            quantities.append(quantity(Interval(whole.value, low, whole.high), Source.EXTRAPOLATED))
        return Latency(quantities[0], quantities[1])


def _spreads(points: Sequence[TimingPoint]) -> dict[tuple[int, int], LoadSpread]:
    """Return the spread between loads of every (tp, pp); that of all points where none was loaded twice."""
    everywhere, found = load_spread(points), {}
    for degree in {(point.tp, point.pp) for point in points}:
        own = load_spread([point for point in points if (point.tp, point.pp) == degree])
        found[degree] = own if own.is_measured else everywhere
    return found


def _mean_context(at: TimingPoint | Workload) -> float:
    """Tokens cached at the mean decode step: steps 2..m attend to n+1..n+m-1 cached tokens."""
    return at.input_tokens + at.output_tokens / 2


def _within(value: float, measured: Sequence[float]) -> bool:
    return min(measured) / MAX_EXTRAPOLATION <= value <= max(measured) * MAX_EXTRAPOLATION


def _distance(point: tuple[int, int], workload: Workload) -> tuple[float, tuple[int, int]]:
    batch, prompt = point
    apart = abs(np.log(batch / workload.batch)) + abs(np.log(prompt / workload.input_tokens))
    return float(apart), point


def quantity(interval: Interval, source: Source) -> Quantity:
    """Times are positive: what noise put below zero is the smallest time a clock shows."""
    value = max(interval.value, 1e-9)
    return Quantity(value, min(max(interval.low, 0.0), value), max(interval.high, value), source)
