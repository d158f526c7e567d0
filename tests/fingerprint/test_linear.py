"""Intervals of linear fits: rounding decides nothing, and spread of runs is counted as it is."""

from __future__ import annotations

import numpy as np
import pytest

from fingerprint.estimators.linear import Interval, LinearModel, combine

DESIGN = np.array([[1.0, x] for x in (0.0, 1.0, 2.0, 3.0, 4.0)])
CURVED = np.array([1.0, 1.1, 1.4, 1.9, 2.6])  # no line meets it
AT = np.array([1.0, 5.0])


def interval(runs: list[np.ndarray]) -> Interval:
    model = LinearModel(DESIGN, runs, non_negative=False)
    return combine([(model.predict(AT), runs)])


@pytest.mark.parametrize("rounded", [(), (0,), (4,), (1, 3), (0, 1, 2, 3, 4)])
def test_runs_that_differ_by_rounding_have_the_interval_of_runs_that_agree(rounded: tuple[int, ...]) -> None:
    agreeing = [np.full(3, value) for value in CURVED]
    runs = [own.copy() for own in agreeing]
    for observation in rounded:
        runs[observation][0] = np.nextafter(runs[observation][0], np.inf)
    found, expected = interval(runs), interval(agreeing)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-6)
    assert expected.high - expected.low > 0.1  # as far as the line misses


def test_agreeing_runs_on_a_line_leave_no_doubt() -> None:
    found = interval([np.full(3, value) for value in DESIGN @ np.array([2.0, 0.5])])
    assert found.value == pytest.approx(4.5)
    assert found.high - found.low < 1e-6
