"""Costs of variants, extrapolated from fingerprints with slots filled (``fingerprint.variant_profile``).

A burst for ``a`` distinct variants takes longer than the same burst for the base by
``prompt + (output_tokens - 1) * step``; of k layers, with n rows (of prompts: tokens, of steps: sequences) each is
``k * (per variant * a + per row * n) + (once + once per variant * a)``. All bursts are fitted at once, so that N
layers follow from one and two; what variants that are loaded add to bursts of the base (``k * a layer + once``) is
fitted apart. No part is below zero. The interval is the noise of the differences and what the fit leaves
(``estimators.linear``).

Ranks, formats of deltas and tensor-parallel degrees that were not measured lie between no change and proportion:
half-way, with both in the interval. Loads go by the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.delta.formats import FORMATS
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.linear import Array, Interval, LinearModel, Prediction, combine
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.variant_measurements import VariantKind, VariantLoads, VariantMeasurement, VariantRuns, kind_of

__all__ = ["MeasuredVariantCost", "measured_cost"]

_Fit = tuple[LinearModel, Sequence[Array]]


def measured_cost(
    measurements: Sequence[VariantMeasurement], num_layers: int, config: DeploymentConfig
) -> MeasuredVariantCost | None:
    """Return what variants in the slots of ``config`` take, by the nearest kind that was measured; None: none was.

    Deltas do not tell of adapters, nor adapters of deltas. Slots that hold both count as slots of deltas.
    """
    kind = kind_of(config)
    if kind is None:
        return None
    usable = [one for one in measurements if one.runs and one.kind.is_delta == kind.is_delta]
    if not usable:
        return None
    found = min(usable, key=lambda one: abs(np.log2(_size(one.kind) / _size(kind))))
    return MeasuredVariantCost(found, num_layers, kind=kind, tp=config.tp)


def _size(kind: VariantKind) -> float:
    """Return what the bytes of a variant go by: the rank of an adapter, the bits of a delta's weight."""
    return FORMATS[kind.delta_format].bits_per_weight if kind.is_delta else kind.rank


class MeasuredVariantCost(VariantCost):
    """Time that variants add to a model of ``num_layers`` layers.

    Args:
        kind: that is asked for; None: as measured.
        tp: degree that is asked for.
    """

    def __init__(
        self, measured: VariantMeasurement, num_layers: int, *, kind: VariantKind | None = None, tp: int = 1
    ) -> None:
        kind = kind or measured.kind
        self.measured, self.is_exact = measured, kind == measured.kind and tp == 1
        self._layers = num_layers
        self._bounds = sorted((1.0, _size(kind) / _size(measured.kind) / tp))
        self._of_variants = _fit([one for one in measured.runs if one.active], _variant_row)
        self._of_loaded = _fit([one for one in measured.runs if not one.active], _loaded_row)
        self._known: dict[tuple[float, float, float, bool], Quantity] = {}
        self.prompt_s = self._one_variant_s

    def step_s(self, rows: float, active: float) -> Quantity:
        used, share = max(1.0, active), min(1.0, active)
        return self._added(used, rows, share, is_prompt=False)

    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        rows = (1 - base_share) * workload.batch
        share = 1 - base_share**workload.batch
        if share <= 0:
            return self._added(0.0, 0.0, 0.0, is_prompt=True)
        used = max(1.0, distinct / share)
        return self._added(used, rows / share * workload.input_tokens, share, is_prompt=True)

    def load_s(self, num_bytes: int) -> float:
        """Return the time of a load, in proportion to the bytes of those measured; 0 bytes: as large as these."""
        of_bytes = num_bytes / self.file_bytes if num_bytes and self.file_bytes else 1.0
        return self.load.value * of_bytes

    @property
    def load(self) -> Quantity:
        """Time of a load from the page cache."""
        return self._by_layers([one.loads_s for one in self._loads])

    @property
    def file_bytes(self) -> float:
        """Bytes of the tensors of a variant of the kind that was measured."""
        return self._by_layers([(float(one.file_bytes),) * 2 for one in self._loads]).value

    @property
    def held_bytes(self) -> float:
        """Bytes that a loaded variant takes; 0: not known."""
        return self._by_layers([(float(one.held_bytes),) * 2 for one in self._loads]).value

    @property
    def _loads(self) -> Sequence[VariantLoads]:
        return () if self.measured is None else self.measured.loads

    def _by_layers(self, values: Sequence[Sequence[float]]) -> Quantity:
        """Return what each fingerprint's repeated ``values`` say of the whole model."""
        runs = [np.array(one) for one in values]
        fit = LinearModel(np.array([[one.num_layers, 1.0] for one in self._loads]), runs, non_negative=True)
        found = combine([(fit.predict(np.array([self._layers, 1.0])), runs)])
        return Quantity(found.value, max(0.0, found.low), found.high, Source.EXTRAPOLATED)

    def _one_variant_s(self, tokens: int) -> float:
        return self._added(1.0, float(tokens), 1.0, is_prompt=True).value if tokens else 0.0

    def _added(self, active: float, rows: float, share: float, *, is_prompt: bool) -> Quantity:
        """Return the time of variants in ``share`` of the steps, and of loaded ones in all: a simulation asks for
        the same ones again and again.

        Args:
            rows: of prompts their tokens.
        """
        key = (active, rows, share, is_prompt)
        if key not in self._known:
            self._known[key] = self._predicted(*key)
        return self._known[key]

    def _predicted(self, active: float, rows: float, share: float, is_prompt: bool) -> Quantity:
        prefill, steps = (1.0, 0.0) if is_prompt else (0.0, 1.0)
        parts, loaded = share * _variant_parts(self._layers, active, rows), _loaded_parts(self._layers)
        found = _sum(
            _predict(self._of_variants, _columns(parts, parts, prefill, steps)),
            _predict(self._of_loaded, _columns(loaded, loaded, prefill, steps)),
        )
        low, high = self._bounds
        return Quantity(
            max(0.0, found.value * (low + high) / 2),
            max(0.0, found.low * low),
            max(0.0, found.high * high),
            Source.EXTRAPOLATED if self.is_exact else Source.SCALED,
        )


def _variant_parts(num_layers: float, active: float, rows: float) -> Array:
    once = 1.0 if active else 0.0
    return np.array([num_layers * active, num_layers * rows, once, active])


def _loaded_parts(num_layers: float) -> Array:
    return np.array([num_layers, 1.0])


def _columns(of_prompts: Array, of_steps: Array, prefill: float, steps: float) -> Array:
    """Return a row of the fit: a prefill, or none, and so many decode steps."""
    return np.concatenate([prefill * of_prompts, steps * of_steps])


def _variant_row(runs: VariantRuns) -> Array:
    of_prompts = _variant_parts(runs.num_layers, runs.active, runs.batch * runs.input_tokens)
    of_steps = _variant_parts(runs.num_layers, runs.active, runs.batch)
    return _columns(of_prompts, of_steps, 1.0, runs.output_tokens - 1)


def _loaded_row(runs: VariantRuns) -> Array:
    parts = _loaded_parts(runs.num_layers)
    return _columns(parts, parts, 1.0, runs.output_tokens - 1)


def _fit(points: Sequence[VariantRuns], row: Callable[[VariantRuns], Array]) -> _Fit | None:
    """Return the fit of the differences. Noise is a part of the whole burst, by which each is weighted."""
    if not points:
        return None
    added = [np.array(one.runs_s) - np.array(one.base_runs_s) for one in points]
    scale = np.array([float(np.mean(one.runs_s)) for one in points])
    return LinearModel(np.array([row(one) for one in points]), added, scale, non_negative=True), added


def _predict(fit: _Fit | None, features: Array) -> tuple[Prediction, Sequence[Array]] | None:
    return None if fit is None else (fit[0].predict(features), fit[1])


def _sum(*parts: tuple[Prediction, Sequence[Array]] | None) -> Interval:
    return combine(*([part] for part in parts if part is not None))
