"""What variants take, extrapolated from fingerprints with slots filled (``fingerprint.variant_profile``).

A burst for ``a`` distinct variants takes longer than the same burst for the base by
``prompt + (output_tokens - 1) * step``; of k layers, with n rows (of prompts: tokens, of steps: sequences) each is
``k * (per variant * a + per row * n) + (once + once per variant * a)``. All bursts are fitted at once, so that N
layers follow from one and two; what variants that are loaded add to bursts of the base (``k * a layer + once``) is
fitted apart. No part is below zero. The interval is the noise of the differences and what the fit leaves
(``estimators.linear``).

Ranks and tensor-parallel degrees that were not measured lie between no change and proportion: half-way, with both
in the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.linear import Array, Interval, LinearModel, Prediction, combine
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.variant_measurements import VariantLoads, VariantMeasurement, VariantRuns, kind_of

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
    if kind.is_delta:
        found = min(usable, key=lambda one: (one.kind != kind, str(one.kind)))
        return MeasuredVariantCost(found, num_layers, tp=config.tp)
    found = min(usable, key=lambda one: abs(np.log2(one.kind.rank / kind.rank)))
    return MeasuredVariantCost(found, num_layers, of_rank=kind.rank / found.kind.rank, tp=config.tp)


class MeasuredVariantCost(VariantCost):
    """Time that variants add to a model of ``num_layers`` layers.

    Args:
        of_rank: rank that is asked for over the rank that was measured.
        tp: degree that is asked for.
    """

    def __init__(
        self, measured: VariantMeasurement, num_layers: int, *, of_rank: float = 1.0, tp: int = 1
    ) -> None:
        self.measured, self.is_exact = measured, of_rank == 1 and tp == 1
        self._layers = num_layers
        self._bounds = sorted((1.0, of_rank / tp))
        self._of_variants = _fit([one for one in measured.runs if one.active], _variant_row)
        self._of_loaded = _fit([one for one in measured.runs if not one.active], _loaded_row)
        self.prompt_s = self._one_variant_s

    def step_s(self, rows: float, active: float) -> Quantity:
        used, share = max(1.0, active), min(1.0, active)
        return self._added(_variant_parts(self._layers, used, rows), share, prefill=0.0, steps=1.0)

    def prompts_s(self, workload: Workload, ttft_s: float, base_share: float, distinct: float) -> Quantity:
        rows = (1 - base_share) * workload.batch
        share = 1 - base_share**workload.batch
        if share <= 0:
            return self._added(_variant_parts(self._layers, 0, 0), 0.0, prefill=1.0, steps=0.0)
        used = max(1.0, distinct / share)
        tokens = rows / share * workload.input_tokens
        return self._added(_variant_parts(self._layers, used, tokens), share, prefill=1.0, steps=0.0)

    def load_s(self, num_bytes: int) -> float:
        """Return the time of a load, which goes by layers as what is loaded does."""
        return self.load.value

    @property
    def load(self) -> Quantity:
        """Time of a load from the page cache."""
        return self._by_layers([one.loads_s for one in self._loads])

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
        parts = _variant_parts(self._layers, 1, tokens)
        return self._added(parts, 1.0, prefill=1.0, steps=0.0).value if tokens else 0.0

    def _added(self, parts: Array, share: float, *, prefill: float, steps: float) -> Quantity:
        """Return the time of variants in ``share`` of the steps, and of loaded ones in all."""
        of_variants = _predict(self._of_variants, share * _both(parts, prefill, steps))
        loaded = _predict(self._of_loaded, _both(np.array([self._layers, 1.0]), prefill, steps))
        found = _sum(of_variants, loaded)
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


def _both(parts: Array, prefill: float, steps: float) -> Array:
    """Return the columns of a prefill and of decode steps."""
    return np.concatenate([prefill * parts, steps * parts])


def _variant_row(runs: VariantRuns) -> Array:
    of_prompts = _variant_parts(runs.num_layers, runs.active, runs.batch * runs.input_tokens)
    of_steps = _variant_parts(runs.num_layers, runs.active, runs.batch)
    return np.concatenate([of_prompts, (runs.output_tokens - 1) * of_steps])


def _loaded_row(runs: VariantRuns) -> Array:
    parts = np.array([runs.num_layers, 1.0])
    return np.concatenate([parts, (runs.output_tokens - 1) * parts])


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
