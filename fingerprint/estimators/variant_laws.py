"""Laws of what variants add: bursts of fingerprints, and single steps of fingerprints whose forward is repeated.

Both are fitted to differences from the base, in relative terms of what was run; no part is below zero. Next to
what rows of variants add, each has what an engine with variants adds to all steps: with variants loaded, or with
slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from fingerprint.errors import NotMeasuredError
from fingerprint.estimators.linear import Array, LinearModel, Prediction, standard_errors
from fingerprint.estimators.prompt_curve import PromptCurve, lengths_alone
from fingerprint.variant_measurements import LONG_TOKENS, VariantMeasurement, VariantRuns, VariantSteps

__all__ = ["Added", "VariantLaw", "law_of"]

Group = Sequence[tuple[Prediction, Sequence[Array]]]
"""Predictions with the runs that they were fitted to, which they share (``linear.combine``)."""
Reading = Sequence[Group]
"""Groups whose sum is the added time."""
_T = TypeVar("_T")
_LEAST_NOISE = 0.01  # of a step's time


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

    has_prompts: bool = True
    """Whether prompts were measured that are long enough."""

    @abstractmethod
    def added(self, asked: Added) -> Sequence[Reading]:
        """Return what variants add with what an engine with variants adds to all steps, and further readings of
        the measurement that the interval holds too.
        """


def law_of(measured: VariantMeasurement) -> VariantLaw:
    """Return the law of what was measured: steps where there are some, else bursts."""
    return StepLaw(measured.steps) if measured.steps else BurstLaw(measured.runs)


class BurstLaw(VariantLaw):
    """Whole bursts: prompts, and so many decode steps."""

    def __init__(self, runs: Sequence[VariantRuns]) -> None:
        self._of_variants = _of_bursts([one for one in runs if one.active], _burst_row)
        self._of_loaded = _of_bursts([one for one in runs if not one.active], _loaded_row)

    def added(self, asked: Added) -> Sequence[Reading]:
        prefill, steps = (1.0, 0.0) if asked.is_prompt else (0.0, 1.0)
        parts = asked.share * _variant_parts(asked.num_layers, asked.active, asked.rows)
        loaded = _loaded_parts(asked.num_layers)
        of_variants = self._of_variants.at(_columns(parts, parts, prefill, steps))
        return ((of_variants, self._of_loaded.at(_columns(loaded, loaded, prefill, steps))),)


class StepLaw(VariantLaw):
    """Forwards of single steps, repeated, and what is outside of them; prompts and decode steps apart.

    A layer has a part of its own, and a row of it one for each slot where engines with several numbers of slots
    were measured. Forwards of prompts go by the lengths that were measured (``estimators.prompt_curve``).
    """

    def __init__(self, steps: Sequence[VariantSteps]) -> None:
        self._has_slots = len({one.slots for one in steps if one.active}) > 1
        decoding, base = (
            [one for one in steps if not one.is_prompt and bool(one.active) is of] for of in (True, False)
        )
        self._forward = _of_forwards(decoding, self._forward_row)
        self._base_forward = _of_forwards(base, _base_row)
        self._rests = {is_prompt: self._rests_of(steps, is_prompt) for is_prompt in (True, False)}
        self._prompts = self._prompt_law([one for one in steps if one.is_prompt])
        self.has_prompts = self._prompts is not None

    def added(self, asked: Added) -> Sequence[Reading]:
        """Raises NotMeasuredError: prompts were not measured, and are asked for."""
        slots = asked.slots if self._has_slots else 0.0
        rest, base_rest = self._rests[asked.is_prompt]
        of_rest = rest.at(asked.share * _rest_parts(asked.active, asked.sequences, slots))
        of_base_rest = base_rest.at(np.array([1.0, asked.all_sequences]))
        if not asked.is_prompt:
            parts = _slotted_parts(asked.num_layers, asked.active, asked.rows, slots)
            base = np.array([asked.num_layers, asked.num_layers * asked.all_rows])
            of_forward, of_base = self._forward.at(asked.share * parts), self._base_forward.at(base)
            return (((*of_forward, *of_rest), (*of_base, *of_base_rest)),)
        if self._prompts is None:
            raise NotMeasuredError(
                f"prompts of one request with variants were not measured at two lengths of {LONG_TOKENS:,} tokens "
                "or more"
            )
        return [(*groups, of_rest, of_base_rest) for groups in self._prompts.forwards(asked, slots)]

    def _prompt_law(self, prompts: Sequence[VariantSteps]) -> _PromptLaw | None:
        of_variants = [one for one in prompts if one.active]
        long = [tokens for tokens in lengths_alone(of_variants) if tokens >= LONG_TOKENS]
        if len(long) < 2:
            return None
        once, each = np.eye(len(_slotted_parts(0, 0, 0, 0)))[2:4]
        return _PromptLaw(prompts, self._forward.value_at(once), self._forward.value_at(each), self._has_slots)

    def _rests_of(
        self, steps: Sequence[VariantSteps], is_prompt: bool
    ) -> tuple[_Fit[VariantSteps], _Fit[VariantSteps]]:
        alike = [one for one in steps if one.is_prompt == is_prompt]
        return (
            _of_rests([one for one in alike if one.active], self._rest_row),
            _of_rests([one for one in alike if not one.active], lambda one: np.array([1.0, one.sequences])),
        )

    def _forward_row(self, one: VariantSteps) -> Array:
        slots = one.slots if self._has_slots else 0.0
        return one.repeat * _slotted_parts(one.num_layers, one.active, one.tokens, slots)

    def _rest_row(self, one: VariantSteps) -> Array:
        return _rest_parts(one.active, one.sequences, one.slots if self._has_slots else 0.0)


class _PromptLaw:
    """Forwards of prompts.

    A step of several distinct variants takes what one of a single variant does, and for each further one what it
    adds between steps of one composition, whatever their length.

    Args:
        once_s, each_s: outside the layers of a forward, by decode steps: launches, which prompts hide in noise.
    """

    def __init__(self, prompts: Sequence[VariantSteps], once_s: float, each_s: float, has_slots: bool) -> None:
        self._once_s, self._each_s = once_s, each_s
        of_one = [one for one in prompts if one.active == 1]
        of_base = [one for one in prompts if not one.active]
        self._of_variants = PromptCurve(of_one, lambda _: once_s + each_s, has_slots=has_slots)
        self._of_base = PromptCurve(of_base, lambda _: 0.0, has_slots=False) if lengths_alone(of_base) else None
        self._further = self._further_variants([one for one in prompts if one.active])

    def forwards(self, asked: Added, slots: float) -> Sequence[Reading]:
        """Return what is added to prompts: their time, the device's alone, and the interpolated one."""
        steps = self._of_variants.steps_of(asked.rows)
        active = min(asked.active, max(1.0, asked.sequences / steps))
        outside_s = steps * (self._once_s + self._each_s * active)
        further = asked.share * steps * asked.num_layers * max(0.0, active - 1)
        of_further = self._further.at(np.append(np.zeros(self._num_compositions), further)) if further else ()
        readings: list[Reading] = []
        mine = self._of_variants.readings(asked.num_layers, asked.rows, slots)
        base = self._of_base.readings(asked.num_layers, asked.all_rows, 0.0) if self._of_base else (None,) * 3
        for number in range(1 if mine[0] is mine[2] and base[0] is base[2] else 3):
            found, of_base = mine[number], base[number]
            added = replace(
                found, value=asked.share * (found.value + outside_s), shares=asked.share * found.shares
            )
            base_group = ((of_base, self._of_base.runs),) if self._of_base and of_base else ()
            readings.append((((added, self._of_variants.runs),), of_further, base_group))
        return readings

    def _further_variants(self, steps: Sequence[VariantSteps]) -> _Fit[VariantSteps]:
        """Fit a layer's time of a further variant, next to one of each composition that several numbers had."""
        actives: dict[tuple[int, ...], set[int]] = {}
        for one in steps:
            actives.setdefault(_composition(one), set()).add(one.active)
        several = [key for key, found in actives.items() if len(found) > 1]
        self._num_compositions = len(several)
        points = [one for one in steps if _composition(one) in several]

        def row(one: VariantSteps) -> Array:
            own = np.eye(len(several))[several.index(_composition(one))]
            return np.append(own, one.repeat * one.num_layers * (one.active - 1))

        def added(one: VariantSteps) -> Array:
            return _added_forwards(one) - one.repeat * (self._once_s + self._each_s * one.active)

        return _Fit(points, row, added, _noise_s(points))


def _composition(one: VariantSteps) -> tuple[int, ...]:
    return one.num_layers, one.slots, one.tokens, one.sequences


def _noise_s(points: Sequence[VariantSteps]) -> Callable[[VariantSteps], float]:
    """Return what a step is weighted by: its noise, since steps at their host's pace scatter by half."""
    sizes = np.array([_step_s(one) for one in points])
    errors = standard_errors([_added_forwards(one) for one in points], sizes) if points else sizes
    found = {
        id(one): float(np.hypot(error, _LEAST_NOISE * size))
        for one, error, size in zip(points, errors, sizes, strict=True)
    }
    return lambda one: found[id(one)]


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

    def value_at(self, features: Array) -> float:
        """Return the value alone; 0, where nothing was measured."""
        return 0.0 if self._model is None else self._model.predict(features).value


def _of_bursts(points: Sequence[VariantRuns], row: Callable[[VariantRuns], Array]) -> _Fit[VariantRuns]:
    return _Fit(
        points,
        row,
        lambda one: np.array(one.runs_s) - np.array(one.base_runs_s),
        lambda one: float(np.mean(one.runs_s)),
    )


def _of_forwards(points: Sequence[VariantSteps], row: Callable[[VariantSteps], Array]) -> _Fit[VariantSteps]:
    return _Fit(points, row, _added_forwards, _step_s)


def _of_rests(points: Sequence[VariantSteps], row: Callable[[VariantSteps], Array]) -> _Fit[VariantSteps]:
    return _Fit(points, row, lambda one: np.array(one.rests_s) - np.array(one.base_rests_s), _step_s)


def _added_forwards(one: VariantSteps) -> Array:
    added: Array = np.array(one.forwards_s) - np.array(one.base_forwards_s)
    return added


def _step_s(one: VariantSteps) -> float:
    return float(np.mean(one.forwards_s) + np.mean(one.rests_s))
