"""Added time of a prompt's forward by its tokens, between the lengths that were measured with one request alone.

A short prompt takes the time of its host, which launches kernel by kernel, a long one that of its device: the
larger of the two. No line over all lengths holds, so each length is governed by the measured ones next to it:

* Between two lengths, V, the time with variants, is that of the shorter one until the line through the next two
  longer ones reaches it. Where the shorter one lies below that line, and between the longest two, V is
  interpolated. B, the base's time, likewise. V - B is added.
* Up to ``GRAPH_TOKENS`` the engine launches graphs: V and B are interpolated. From there to the next length they
  are that one's, for the host begins to launch every kernel.
* Below the shortest length they are that of the shortest: kernels are launched whatever there is to compute.
* Above the longest length a prompt is so many steps of the longest, as an engine divides it whose step takes no
  more.

Where two depths were measured with the same slots, as of deltas, a forward has a part of its own for each of its
rows, such as embeddings, which a fingerprint repeats and the model has once. The two longest lengths, which take
their device's time, tell it and the layers' part apart, and have it alone.

The interval is that of the measured lengths. Where the host is slower it reaches from what the device needs by
itself, the line through the two longest lengths, to the interpolation: a host's pace changes by half within
seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fingerprint.engines import GRAPH_TOKENS
from fingerprint.estimators.linear import Array, LinearModel, Prediction
from fingerprint.variant_measurements import VariantSteps

__all__ = ["PromptCurve", "lengths_alone"]


def lengths_alone(steps: Sequence[VariantSteps]) -> tuple[int, ...]:
    """Return the lengths of one request's prompt that were measured on each of the engines of ``steps``."""
    by_engine: dict[tuple[int, int], set[int]] = {}
    for one in steps:
        found = by_engine.setdefault((one.num_layers, one.slots), set())
        if one.sequences == 1:
            found.add(one.tokens)
    return tuple(sorted(set.intersection(*by_engine.values()))) if by_engine else ()


class PromptCurve:
    """Added forwards of prompts by their tokens.

    Args:
        steps: prompts with one distinct variant, or of the base in an engine with slots.
        outside_s: what is added to each repeat outside its layers; of a step.
        has_slots: whether engines with several numbers of slots were measured: a length has a part for each slot.
    """

    def __init__(
        self, steps: Sequence[VariantSteps], outside_s: Callable[[VariantSteps], float], *, has_slots: bool
    ) -> None:
        self.lengths = lengths_alone(steps)
        self._has_slots = has_slots
        alone = [one for one in steps if one.sequences == 1 and one.tokens in self.lengths]
        self._has_depths = not has_slots and len({one.num_layers for one in alone}) > 1
        self.runs = [
            np.array(one.forwards_s) - np.array(one.base_forwards_s) - one.repeat * outside_s(one) for one in alone
        ]
        units = np.eye(len(self.lengths))
        design = np.array(
            [
                one.repeat * self._forward(units[self.lengths.index(one.tokens)], one.num_layers, one.slots)
                for one in alone
            ]
        )
        self._model = LinearModel(
            design, self.runs, np.array([np.mean(one.forwards_s) for one in alone]), non_negative=True
        )
        self._added_s: dict[tuple[int, float], Array] = {}  # of a layer, by layers and slots
        deepest = max(one.num_layers for one in alone)
        self._base_s = np.array(
            [
                np.mean([_base_layer_s(one) for one in alone if (one.num_layers, one.tokens) == (deepest, length)])
                for length in self.lengths
            ]
        )

    def steps_of(self, tokens: float) -> float:
        """Return the steps of the longest measured length that so many tokens take, at least one."""
        return max(1.0, tokens / self.lengths[-1])

    def readings(self, num_layers: int, tokens: float, slots: float) -> tuple[Prediction, Prediction, Prediction]:
        """Return the added time of ``tokens``, the device's alone, and the interpolated one; they are one object
        where nothing tells them apart.
        """
        steps = self.steps_of(tokens)
        at = tokens / steps
        way, line, chord = _between(at, self.lengths, self._base_s + self._layer_s(num_layers, slots))
        base_way, _, base_chord = _between(at, self.lengths, self._base_s)

        def predicted(weights: Array) -> Prediction:
            return self._model.predict(steps * self._forward(weights, num_layers, slots))

        found = predicted(way)
        if way is chord and line is chord and base_way is base_chord:
            return found, found, found
        # where one of the two is at its host's pace
        later_s = steps * num_layers * float((way - base_way) @ self._base_s)
        return replace(found, value=max(0.0, found.value + later_s)), predicted(line), predicted(chord)

    def _layer_s(self, num_layers: int, slots: float) -> Array:
        """Return what a layer of so many takes longer at each length."""
        key = num_layers, slots
        if key not in self._added_s:
            units = np.eye(len(self.lengths))
            found = [self._model.predict(self._forward(unit, num_layers, slots)).value for unit in units]
            self._added_s[key] = np.array(found) / num_layers
        return self._added_s[key]

    def _forward(self, weights: Array, num_layers: int, slots: float) -> Array:
        """Return the parts of one forward whose layers have ``weights`` of the lengths."""
        of_layers = num_layers * weights
        if self._has_slots:
            return np.concatenate([of_layers, slots * of_layers])
        of_rows = weights[-2:] @ np.array(self.lengths[-2:])
        return np.append(of_layers, of_rows) if self._has_depths else of_layers


def _base_layer_s(one: VariantSteps) -> float:
    return float(np.mean(one.base_forwards_s)) / (one.repeat * one.num_layers)


def _between(at: float, lengths: Sequence[int], times_s: Array) -> tuple[Array, Array, Array]:
    """Return the weights of measured lengths in the time of ``at`` tokens: by the larger of host and device, by
    the device alone, and interpolated.
    """
    units = list(np.eye(len(lengths)))
    if len(lengths) == 1 or at <= lengths[0]:
        return units[0], units[0], units[0]
    first = min(bisect_right(lengths, at) - 1, len(lengths) - 2)
    shorter, longer = lengths[first], lengths[first + 1]
    share = (at - shorter) / (longer - shorter)
    chord = (1 - share) * units[first] + share * units[first + 1]

    def line(tokens: float, number: int) -> Array:
        """Return the weights of the line through length ``number`` and the next."""
        along = (tokens - lengths[number]) / (lengths[number + 1] - lengths[number])
        weights: Array = (1 - along) * units[number] + along * units[number + 1]
        return weights

    device = line(at, len(lengths) - 2)
    if shorter <= GRAPH_TOKENS:
        return (units[first + 1], device, chord) if at > GRAPH_TOKENS else (chord, chord, chord)
    if first + 2 == len(lengths):
        return chord, chord, chord
    way, later = chord, line(at, first + 1)
    if line(shorter, first + 1) @ times_s <= times_s[first]:  # the shorter one may be at its host's pace
        of_either = units[first] if times_s[first] > later @ times_s else later
        way = of_either if of_either @ times_s < chord @ times_s else chord
    return way, device, chord
