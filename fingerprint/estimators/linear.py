"""Repeated timings as a linear function of features, with an honest interval for every prediction.

Decides how noise of the runs reaches a prediction; knows nothing of layers, tokens or configurations.

The value comes from least squares in relative terms (a short run counts as much as a long one), with no
coefficient below zero where time cannot be negative. The interval is the exact linear propagation of the spread
of every observation's own runs (Student's t, Welch-Satterthwaite degrees of freedom), widened by the factor by
which the residuals exceed what that spread explains: a feature set that does not fit shows as a wider interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fingerprint.trimmed_mean import Location, locate, t_quantile_95

__all__ = ["Interval", "LinearModel", "Prediction", "combine", "sizes_of"]

Array = NDArray[np.float64]

# Spread of one run when nothing was run twice: the top of what is seen on a busy CPU (2 to 20%).
_UNKNOWN_RELATIVE_SPREAD = 0.2
# Least relative spread of an observation: runs that differ by rounding must not decide, differently on each
# processor, what a misfit does to an interval.
_LEAST_RELATIVE_SPREAD = 1e-9
_ESTIMABLE = 1e-6  # relative distance from the row space of the design up to which a prediction is defined


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 90% interval; unlike a ``Quantity`` it may lie on both sides of zero."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A value and the share of every observation in its error."""

    value: float
    shares: Array  # [observations]: d value / d observation, misfit factor included
    misfit: float = 1.0


class LinearModel:
    """Linear least-squares fit. Observation i is the trimmed mean of ``runs[i]``.

    Args:
        design: [observations, features].
        runs: repeated values of each observation, at least one.
        scale: [observations] the size of each observation, residuals and noise count relative to it; None: by its
            runs.
        non_negative: no coefficient below zero.
    """

    def __init__(
        self, design: Array, runs: Sequence[Array], scale: Array | None = None, *, non_negative: bool
    ) -> None:
        scale = sizes_of(runs) if scale is None else scale
        self._observed = np.array([locate(values).value for values in runs])
        errors = standard_errors(runs, scale)
        size = np.abs(design).max(axis=0)
        self._size = np.where(size > 0, size, 1.0)
        weighted = design / self._size / scale[:, None]
        inverse = np.linalg.pinv(weighted, rcond=1e-9)
        self._projector = inverse @ weighted  # onto the row space
        self._solve = inverse / scale  # [features, observations], on scaled features
        plain = self._solve @ self._observed
        self._plain = plain
        self._coefficients = plain
        if non_negative and (plain < 0).any():
            from scipy.optimize import nnls  # takes longer to load than most fits, and few of them need it

            self._coefficients = nnls(weighted, self._observed / scale)[0]
        self.misfit = self._misfit_factor(weighted, plain, scale, errors)

    def _misfit_factor(self, weighted: Array, plain: Array, scale: Array, errors: Array) -> float:
        """Return the factor by which residuals exceed what the runs' spread explains, at least 1 (Birge ratio)."""
        relative = errors / scale
        residual = self._observed / scale - weighted @ plain
        hat = weighted @ np.linalg.pinv(weighted, rcond=1e-9)
        left = np.eye(len(scale)) - hat
        expected = float(((left * relative) ** 2).sum())
        if np.trace(left) < 0.5 or expected <= 0:
            return 1.0
        return math.sqrt(max(1.0, float((residual**2).sum()) / expected))

    def reaches(self, features: Array) -> bool:
        """Return whether the observations determine the prediction at ``features``."""
        scaled = features / self._size
        distance = np.abs(scaled - scaled @ self._projector).max()
        return bool(distance <= _ESTIMABLE * max(float(np.abs(scaled).max()), 1e-300))

    def predict(self, features: Array, *, constrained: bool = True) -> Prediction:
        """Prediction at ``features`` [features]; ``constrained=False`` lets the value be negative."""
        scaled = features / self._size
        coefficients = self._coefficients if constrained else self._plain
        return Prediction(float(scaled @ coefficients), scaled @ self._solve * self.misfit, self.misfit)


def sizes_of(runs: Sequence[Array]) -> Array:
    """Return the size of each observation."""
    return np.array([max(float(np.abs(values).mean()), 1e-9) for values in runs])


def standard_errors(runs: Sequence[Array], scale: Array) -> Array:
    """Return each observation's standard error; one run once gets the other observations' pooled spread."""
    located = [locate(values) for values in runs]
    return np.array([loc.standard_error for loc in _filled(located, runs, np.abs(scale))])


def _filled(located: list[Location], runs: Sequence[Array], scale: Array) -> list[Location]:
    spreads = [
        (loc.standard_error * math.sqrt(values.size) / size) ** 2
        for loc, values, size in zip(located, runs, scale, strict=True)
        if loc.dof and size > 0
    ]
    pooled = math.sqrt(sum(spreads) / len(spreads)) if spreads else _UNKNOWN_RELATIVE_SPREAD
    return [
        Location(loc.value, max(loc.standard_error, _LEAST_RELATIVE_SPREAD * float(size)), loc.dof)
        if loc.dof
        else Location(loc.value, pooled * float(size), max(1, len(spreads)))
        for loc, size in zip(located, scale, strict=True)
    ]


def combine(
    *groups: Sequence[tuple[Prediction, Sequence[Array]]],
    at_least: tuple[float, float] = (0.0, math.inf),
    also: tuple[float, float] = (0.0, math.inf),
) -> Interval:
    """Sum of predictions, with what their runs share counted once.

    Args:
        groups: predictions with the runs they were fitted to. Within a group, run j of observation i is the same
            run in all (the device's and the host's part of it, say); groups are independent of each other.
        at_least: variance of the sum, and its degrees of freedom, when runs are not as independent as they look;
            it counts where it is the larger.
        also: variance of a further, independent error, and its degrees of freedom.
    """
    value = 0.0
    located: list[Location] = []
    for parts in groups:
        value += sum(prediction.value for prediction, _ in parts)
        mixed = [
            np.sum([prediction.shares[i] * runs[i] for prediction, runs in parts], axis=0)
            for i in range(len(parts[0][1]))
        ]
        sizes = np.sum(
            [np.abs(p.shares) * np.array([np.abs(run).mean() for run in runs]) for p, runs in parts], axis=0
        )
        located += _filled([locate(values) for values in mixed], mixed, sizes)
    errors = [(loc.standard_error**2, float(loc.dof)) for loc in located]
    if at_least[0] > sum(variance for variance, _ in errors):
        errors = [at_least]
    errors.append(also)
    total = sum(variance for variance, _ in errors)
    if total <= 0:
        return Interval(value, value, value)
    doubt = sum(variance**2 / dof for variance, dof in errors)  # Welch-Satterthwaite
    dof = total**2 / doubt if doubt > 0 else math.inf
    half = t_quantile_95(dof) * math.sqrt(total)
    return Interval(value, value - half, value + half)
