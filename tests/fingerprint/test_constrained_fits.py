"""Fits of few unknowns against SciPy's and scikit-learn's, which solve the same problems."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls
from sklearn.linear_model import QuantileRegressor

from fingerprint.estimators.constrained_fits import least_absolute, non_negative_least_squares


@pytest.mark.parametrize("seed", range(200))
def test_least_squares_without_negatives_are_scipys(seed: int) -> None:
    draw = np.random.default_rng(seed)
    observations, unknowns = draw.integers(1, 20), draw.integers(1, 9)
    design = draw.normal(size=(observations, unknowns)) if seed % 2 else draw.random((observations, unknowns))
    if seed % 5 == 0:
        design = np.round(2 * design)  # columns that are the same, or zero
    observed = draw.normal(size=observations) * 10 ** draw.uniform(-3, 3)
    found, theirs = non_negative_least_squares(design, observed), nnls(design, observed)[0]
    assert (found >= 0).all()
    left, left_theirs = (float(np.linalg.norm(design @ x - observed)) for x in (found, theirs))
    assert left == pytest.approx(left_theirs, rel=1e-9, abs=1e-9 * float(np.linalg.norm(observed)))
    if np.linalg.matrix_rank(design) == unknowns:  # else there are several
        assert found == pytest.approx(theirs, rel=1e-6, abs=1e-9 * float(np.abs(theirs).max()))


def test_weights_of_corners_find_what_lies_between_them() -> None:
    corners = np.array([[0.0, 4.0, 0.0, 4.0], [0.0, 0.0, 4.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    for at, within in (((2.0, 2.0), True), ((0.0, 4.0), True), ((4.0, 2.0), True), ((4.1, 2.0), False)):
        wanted = np.array([*at, 1.0])
        left = np.linalg.norm(corners @ non_negative_least_squares(corners, wanted) - wanted)
        assert (left < 1e-9) == within


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("used", [(1, 0), (0, 1), (1, 1)])
def test_least_absolute_deviations_are_scikit_learns(used: tuple[int, int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    observations = int(draw.integers(3, 25))
    passes, tokens = draw.integers(1, 5, observations), draw.integers(1, 2000, observations)
    design = np.stack([passes, tokens / 1000], axis=1) * used
    observed = design @ [0.3, 0.2] + draw.standard_t(2, observations) * 0.05
    weight = draw.uniform(0.2, 1.0, observations)
    theirs = QuantileRegressor(quantile=0.5, alpha=0.0, fit_intercept=False)
    theirs.fit(design, observed, sample_weight=weight)
    found = least_absolute(design, observed, weight)
    assert found == pytest.approx(np.where(used, theirs.coef_, 0.0), rel=1e-6)


def test_absolute_deviations_leave_an_outlier_out() -> None:
    design = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_absolute(design, np.array([1.0, 70.0, 5.0, 7.0]), np.ones(4)) == pytest.approx([1.0, 2.0])


def test_of_solutions_as_good_the_last_is_taken() -> None:
    """Shipped calibrations were fitted by a solver that does so: the median of an even number."""
    for observed, taken in (([1.07, 1.083, 1.664, 0.71], 1.083), ([1.083, 1.07, 1.664, 0.71], 1.07)):
        assert least_absolute(np.ones((4, 1)), np.array(observed), np.ones(4)) == pytest.approx([taken])


def test_nothing_to_fit_gives_no_coefficient() -> None:
    nothing = np.zeros((3, 2))
    assert least_absolute(nothing, np.ones(3), np.ones(3)).tolist() == [0.0, 0.0]
    assert non_negative_least_squares(nothing, np.ones(3)).tolist() == [0.0, 0.0]
    one = np.array([[1.0, 5.0]])  # which of the two it is, one observation does not tell
    assert least_absolute(one, np.ones(1), np.ones(1)).tolist() == [0.0, 0.0]
