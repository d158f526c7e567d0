"""Laws of what variants add: bursts of fingerprints, and single steps of fingerprints whose forward is repeated.

Both are fitted to differences from the base, in relative terms of what was run; no part is below zero. Next to
what rows of variants add, each has what an engine with variants adds to all steps: with variants loaded, or with
slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from fingerprint.estimators.linear import Array, LinearModel, Prediction
from fingerprint.variant_measurements import VariantMeasurement, VariantRuns, VariantSteps

__all__ = ["Added", "VariantLaw", "law_of"]

Group = Sequence[tuple[Prediction, Sequence[Array]]]
"""Predictions with the runs that they were fitted to, which they share (``linear.combine``)."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """Step or prompts whose added time is asked for."""

    num_layers: int
    is_prompt: bool
    active: float  # distinct variants, where there is one
    rows: float  # of variants: sequences, or tokens of prompts
    sequences: float  # of variants
    share: float  # of the steps: those with a variant
    all_rows: float  # of the base too
    all_sequences: float
    slots: float


class VariantLaw(ABC):
    """Fit of one measurement."""

    @abstractmethod
    def added(self, asked: Added) -> Sequence[Group]:
        """Return what variants add, and what an engine with variants adds to all steps."""


def law_of(measured: VariantMeasurement) -> VariantLaw:
    """Return the law of what was measured: steps where there are some, else bursts."""
    return StepLaw(measured.steps) if measured.steps else BurstLaw(measured.runs)


class BurstLaw(VariantLaw):
    """Whole bursts: prompts, and so many decode steps."""

    def __init__(self, runs: Sequence[VariantRuns]) -> None:
        self._of_variants = _of_bursts([one for one in runs if one.active], _burst_row)
        self._of_loaded = _of_bursts([one for one in runs if not one.active], _loaded_row)

    def added(self, asked: Added) -> Sequence[Group]:
        prefill, steps = (1.0, 0.0) if asked.is_prompt else (0.0, 1.0)
        parts = asked.share * _variant_parts(asked.num_layers, asked.active, asked.rows)
        loaded = _loaded_parts(asked.num_layers)
        return (
            self._of_variants.at(_columns(parts, parts, prefill, steps)),
            self._of_loaded.at(_columns(loaded, loaded, prefill, steps)),
        )


class StepLaw(VariantLaw):
    """Forwards of single steps, repeated, and what is outside of them; prompts and decode steps apart.

    A layer has a part of its own, and a row of it one for each slot where engines with several numbers of slots
    were measured.
    """

    def __init__(self, steps: Sequence[VariantSteps]) -> None:
        self._has_slots = len({one.slots for one in steps if one.active}) > 1
        self._of = {is_prompt: self._fits(steps, is_prompt) for is_prompt in (True, False)}

    def added(self, asked: Added) -> Sequence[Group]:
        forward, rest, base_forward, base_rest = self._of[asked.is_prompt]
        slots = asked.slots if self._has_slots else 0.0
        of_forward = _slotted_parts(asked.num_layers, asked.active, asked.rows, slots)
        of_rest = _rest_parts(asked.active, asked.sequences, slots)
        base = np.array([asked.num_layers, asked.num_layers * asked.all_rows])
        return (
            (*forward.at(asked.share * of_forward), *rest.at(asked.share * of_rest)),
            (*base_forward.at(base), *base_rest.at(np.array([1.0, asked.all_sequences]))),
        )

    def _fits(self, steps: Sequence[VariantSteps], is_prompt: bool) -> tuple[_Fit[VariantSteps], ...]:
        alike = [one for one in steps if one.is_prompt == is_prompt]
        of_variants, of_base = [one for one in alike if one.active], [one for one in alike if not one.active]
        return (
            _of_forwards(of_variants, self._forward_row),
            _of_rests(of_variants, self._rest_row),
            _of_forwards(of_base, _base_row),
            _of_rests(of_base, lambda one: np.array([1.0, one.sequences])),
        )

    def _forward_row(self, one: VariantSteps) -> Array:
        slots = one.slots if self._has_slots else 0.0
        return one.repeat * _slotted_parts(one.num_layers, one.active, one.tokens, slots)

    def _rest_row(self, one: VariantSteps) -> Array:
        return _rest_parts(one.active, one.sequences, one.slots if self._has_slots else 0.0)


def _variant_parts(num_layers: float, active: float, rows: float) -> Array:
    once = 1.0 if active else 0.0
    return np.array([num_layers * active, num_layers * rows, once, active])


def _slotted_parts(num_layers: float, active: float, rows: float, slots: float) -> Array:
    """Return the parts of a forward: a layer with variants starts its kernels whatever there is to compute, and
    they have programs for each slot and so many rows.
    """
    return np.concatenate(
        [
            _variant_parts(num_layers, active, rows),
            [num_layers * rows * slots, num_layers if active else 0.0],
        ]
    )


def _rest_parts(active: float, sequences: float, slots: float) -> Array:
    return np.array([1.0 if active else 0.0, active, sequences, sequences * slots])


def _loaded_parts(num_layers: float) -> Array:
    return np.array([num_layers, 1.0])


def _base_row(one: VariantSteps) -> Array:
    layers = one.repeat * one.num_layers
    return np.array([layers, layers * one.tokens])


def _columns(of_prompts: Array, of_steps: Array, prefill: float, steps: float) -> Array:
    """Return a row of the fit: a prefill, or none, and so many decode steps."""
    return np.concatenate([prefill * of_prompts, steps * of_steps])


def _burst_row(runs: VariantRuns) -> Array:
    of_prompts = _variant_parts(runs.num_layers, runs.active, runs.batch * runs.input_tokens)
    of_steps = _variant_parts(runs.num_layers, runs.active, runs.batch)
    return _columns(of_prompts, of_steps, 1.0, runs.output_tokens - 1)


def _loaded_row(runs: VariantRuns) -> Array:
    parts = _loaded_parts(runs.num_layers)
    return _columns(parts, parts, 1.0, runs.output_tokens - 1)


class _Fit(Generic[_T]):
    """Fit of differences. Noise is a part of all that was run, by which each is weighted."""

    def __init__(
        self,
        points: Sequence[_T],
        row: Callable[[_T], Array],
        added: Callable[[_T], Array],
        size: Callable[[_T], float],
    ) -> None:
        self._added = [added(one) for one in points]
        self._model: LinearModel | None = None
        if points:
            design, scale = np.array([row(one) for one in points]), np.array([size(one) for one in points])
            self._model = LinearModel(design, self._added, scale, non_negative=True)

    def at(self, features: Array) -> Group:
        """Return the prediction; none, where nothing was measured."""
        return () if self._model is None else ((self._model.predict(features), self._added),)


def _of_bursts(points: Sequence[VariantRuns], row: Callable[[VariantRuns], Array]) -> _Fit[VariantRuns]:
    return _Fit(
        points,
        row,
        lambda one: np.array(one.runs_s) - np.array(one.base_runs_s),
        lambda one: float(np.mean(one.runs_s)),
    )


def _of_forwards(points: Sequence[VariantSteps], row: Callable[[VariantSteps], Array]) -> _Fit[VariantSteps]:
    return _Fit(points, row, lambda one: np.array(one.forwards_s) - np.array(one.base_forwards_s), _step_s)


def _of_rests(points: Sequence[VariantSteps], row: Callable[[VariantSteps], Array]) -> _Fit[VariantSteps]:
    return _Fit(points, row, lambda one: np.array(one.rests_s) - np.array(one.base_rests_s), _step_s)


def _step_s(one: VariantSteps) -> float:
    return float(np.mean(one.forwards_s) + np.mean(one.rests_s))
