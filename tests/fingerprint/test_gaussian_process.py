"""The Gaussian process against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from fingerprint.estimators.gaussian_process import smooth_at

LENGTH, SPREAD = 2.5, 0.2


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("points", [1, 2, 9, 40])
def test_mean_and_deviation_are_scikit_learns(points: int, seed: int) -> None:
    draw = np.random.default_rng((points, seed))
    where = draw.integers(0, 12, (points, 2)).astype(float)  # some of them the same
    values, noise = draw.normal(0, SPREAD, points), draw.uniform(0.003, 0.1, points) ** 2
    process = GaussianProcessRegressor(ConstantKernel(SPREAD**2) * RBF(LENGTH), alpha=noise, optimizer=None)
    process.fit(where, values)
    for asked in (where[0], draw.uniform(-3, 15, 2), np.array([60.0, 0.0])):
        (mean,), (deviation,) = process.predict(asked[None], return_std=True)
        found = smooth_at(asked, where, values, noise, length=LENGTH, spread=SPREAD)
        assert found == pytest.approx((mean, deviation), rel=1e-6, abs=1e-9)
