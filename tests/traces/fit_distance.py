"""Distance of a length model from a trace, as docs/traces.md tabulates it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fingerprint.errors import BadInputError
from traces.lengths import LengthModel, Tokens
from traces.request import Request
from traces.request_arrays import blocks, count_values

__all__ = ["FitDistance", "fit_distance"]


@dataclass(frozen=True)
class FitDistance:
    """Kolmogorov-Smirnov distance of the model's lengths from the trace's: 0 the same, 1 nothing in common."""

    input_ks: float
    output_ks: float
    compared: int  # requests of the trace


def fit_distance(
    model: LengthModel, requests: Iterable[Request], *, samples: int = 100_000, seed: int = 0
) -> FitDistance:
    """Return the distance of a length model from a trace, length by length (not of their correlation).

    Two-sample: the model's ``samples`` draws carry an error of about ``1 / sqrt(samples)``.
    """
    inputs, outputs = model.sample(np.random.default_rng(seed), samples)
    seen: tuple[dict[int, int], dict[int, int]] = ({}, {})
    count = 0
    for block in blocks(requests):
        count += len(block.tokens)
        for column, histogram in enumerate(seen):
            count_values(block.tokens[:, column], histogram)
    if count == 0:
        raise BadInputError("a model cannot be compared with a trace without requests")
    return FitDistance(_ks(inputs, seen[0], count), _ks(outputs, seen[1], count), count)


def _ks(drawn: Tokens, histogram: dict[int, int], count: int) -> float:
    values = np.array(sorted(histogram))
    shares = np.cumsum([histogram[value] for value in values.tolist()]) / count
    points = np.union1d(values, drawn)
    at = np.searchsorted(values, points, side="right")
    trace_cdf = np.concatenate([[0.0], shares])[at]
    model_cdf = np.searchsorted(np.sort(drawn), points, side="right") / len(drawn)
    return float(np.abs(trace_cdf - model_cdf).max())
