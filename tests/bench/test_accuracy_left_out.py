"""Predictions between measured points: what decision 58 says of them, and how its constants were chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fingerprint.estimators import between_points as places
from tests.bench import accuracy_left_out as bench

PAGE = (Path(__file__).parents[2] / "docs/decisions/0058-between-points.md").read_text()
CHOSEN = (places._TOKENS_OCTAVES, places._SHAPE_OCTAVES, places._LAUNCHED_APART, places.PROMPTS_SPREAD)


@pytest.mark.long
def test_the_decision_has_the_table_of_today() -> None:
    assert bench.table() in PAGE


@pytest.mark.long
def test_the_decision_has_the_table_of_recordings_made_later() -> None:
    assert bench.table(bench.LATER, later=True) in PAGE


@pytest.mark.long
def test_the_constants_are_the_most_likely_of_the_grid() -> None:
    assert bench.choose() == CHOSEN


def test_the_grid_has_what_was_chosen_and_not_at_its_edge() -> None:
    for axis, chosen in zip(zip(*bench.GRID, strict=True), CHOSEN, strict=True):
        assert min(axis) < chosen < max(axis)


def test_a_likelihood_is_that_of_each_point_under_the_rest() -> None:
    """Two points: each is known from the other by the covariance between them."""
    one = bench.Measured("a", np.array([[0.0, 10.0], [3.0, 7.0]]), np.array([0.4, 0.1]), np.array([0.01, 0.04]))
    spread, shape = 0.5, 4.0
    alike = spread**2 * np.exp(-((5.0 - -2.0 - 4.0) ** 2) / (2 * shape**2))  # (b - n) / 2: -5 and -2
    expected = 0.0
    for own, other, noise, others_noise in ((0.4, 0.1, 0.01, 0.04), (0.1, 0.4, 0.04, 0.01)):
        variance = spread**2 - alike**2 / (spread**2 + others_noise) + noise
        expected -= ((own - other) ** 2 / variance + np.log(variance)) / 2
    assert bench.log_likelihood([one], (2.5, shape, 1.0, spread)) == pytest.approx(expected)
    turned = replace(
        one, batch_and_input=one.batch_and_input[::-1], log_ratios=one.log_ratios[::-1], noise=one.noise[::-1]
    )
    assert bench.log_likelihood([turned], (2.5, shape, 1.0, spread)) == pytest.approx(expected)
