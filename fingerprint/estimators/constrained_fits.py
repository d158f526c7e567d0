"""Two fits of few unknowns by their textbook algorithms: non-negative least squares, least absolute deviations.

In numpy, because the libraries that have them take longer to load than a plan takes: 0.6 s of SciPy's optimizers
and 1.3 s of scikit-learn, in each process that estimates.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

__all__ = ["least_absolute", "non_negative_least_squares"]

Array = npt.NDArray[np.float64]

_SINGULAR = 1e-9  # of the product of two columns' largest values: rows that tell two unknowns apart
_ROUNDING = 1e-12


def non_negative_least_squares(design: Array, observed: Array) -> Array:
    """Solve for the coefficients, none below zero, with the least sum of squared residuals.

    Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23: the active set method.

    Args:
        design: [observations, unknowns].
        observed: [observations].
    """
    unknowns = design.shape[1]
    found, free = np.zeros(unknowns), np.zeros(unknowns, dtype=bool)
    useless = np.zeros(unknowns, dtype=bool)  # by rounding: freed they would turn negative at once
    zero = 10 * max(design.shape) * np.finfo(float).eps * float(np.abs(design).sum(axis=0).max(initial=0.0))
    for _ in range(30 * unknowns):  # never reached but by rounding: each round lowers the sum
        gradient = np.where(free | useless, -np.inf, design.T @ (observed - design @ found))
        steepest = int(gradient.argmax())
        if gradient[steepest] <= zero:
            break
        free[steepest] = True
        tried = _solved(design, observed, free)
        if tried[steepest] <= 0:
            free[steepest], useless[steepest] = False, True
            continue
        while (negative := free & (tried <= 0)).any():
            step = float((found[negative] / (found[negative] - tried[negative])).min())
            found = found + step * (tried - found)
            free &= found > zero
            found[~free] = 0.0
            tried = _solved(design, observed, free)
        found = tried
        useless[:] = False
    return found


def least_absolute(design: Array, observed: Array, weight: Array) -> Array:
    """Solve for the one or two coefficients with the least weighted sum of absolute residuals.

    A solution of this linear program is at one of its corners, where the function goes through as many
    observations as it has unknowns: all are tried, and of those that are as good the last is taken. Columns of
    zeros get no coefficient.

    Args:
        design: [observations, unknowns].
        observed, weight: [observations].
    """
    found, used = np.zeros(design.shape[1]), design.any(axis=0)
    corners = _corners(design[:, used], observed)
    if len(corners):
        losses = np.abs(observed - corners @ design[:, used].T) @ weight
        found[used] = corners[losses <= losses.min() * (1 + _ROUNDING)][-1]
    return found


def _solved(design: Array, observed: Array, free: npt.NDArray[np.bool_]) -> Array:
    """Return the least squares of the free unknowns, zero for the rest."""
    found = np.zeros(design.shape[1])
    if free.any():
        found[free] = np.linalg.lstsq(design[:, free], observed, rcond=None)[0]
    return found


def _corners(design: Array, observed: Array) -> Array:
    """Return the coefficients [corners, unknowns] that meet as many observations as there are unknowns."""
    if design.shape[1] < 2:
        met = design.any(axis=1)
        return observed[met][:, None] / design[met] if design.shape[1] else np.empty((0, 0))
    pairs = np.array(list(combinations(range(len(design)), 2)), dtype=int).reshape(-1, 2)
    (a, b), (c, d) = design[pairs[:, 0]].T, design[pairs[:, 1]].T
    u, v = observed[pairs].T
    determinant = a * d - b * c
    met = np.abs(determinant) > _SINGULAR * float(np.prod(np.abs(design).max(axis=0)))
    corners = np.stack([u * d - b * v, a * v - u * c], axis=1)[met] / determinant[met, None]
    return np.asarray(corners, dtype=float)
