"""A smooth function through noisy points, with how well it is known away from them: a Gaussian process."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["smooth_at"]

Array = npt.NDArray[np.float64]


def smooth_at(
    asked: Array, where: Array, values: Array, noise: Array, *, length: float, spread: float
) -> tuple[float, float]:
    """Mean and standard deviation at ``asked`` (Rasmussen and Williams, 2006, algorithm 2.1).

    Args:
        asked: [dimensions].
        where: [points, dimensions].
        values: [points], of zero mean before anything is known.
        noise: [points], variances above 0.
        length: distance over which the function keeps its value.
        spread: its standard deviation before anything is known.
    """

    def covariance(a: Array, b: Array) -> Array:
        squares = ((a[:, None] - b[None]) ** 2).sum(axis=-1)
        shared: Array = spread**2 * np.exp(-squares / (2 * length**2))
        return shared

    known = covariance(where, where) + np.diag(noise)
    there = covariance(where, asked[None])[:, 0]
    of_values, of_there = np.linalg.solve(known, np.stack([values, there], axis=1)).T
    return float(there @ of_values), math.sqrt(max(0.0, spread**2 - float(there @ of_there)))
