"""The queue that a variable rate leaves behind: against the path followed request by request, and laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.rate_profile import Level, moving_rate

paths = st.lists(st.floats(0.0, 10.0), min_size=2, max_size=40).filter(lambda rates: sum(rates) > 0.1)


def over_mean(rates: list[float]) -> tuple[float, ...]:
    return tuple((np.array(rates) / np.mean(rates)).tolist())


def found_by_hand(rates: tuple[float, ...], utilisation: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows of work left and the arrivals in each small piece of a turn that follows another."""
    left, found, come, pieces = 0.0, [], [], 200
    for turn in range(2):
        for times in rates:
            for _ in range(pieces):
                if turn:
                    found.append(left)
                    come.append(times)
                left = max(left + (utilisation * times - 1) / pieces, 0.0)
    return np.array(found), np.array(come)


@pytest.mark.parametrize("utilisation", [0.2, 0.5, 0.8, 0.95])
def test_what_is_found_is_what_the_path_leaves(utilisation: float) -> None:
    rates = over_mean([0.1, 4, 5, 0, 0, 1, 3, 0.5, 0.2, 8, 0, 0, 0, 0, 2, 1])
    moving = moving_rate(rates)
    found, come = found_by_hand(rates, utilisation)
    for windows in (0.0, 0.3, 1.0, 3.0):
        told = sum(
            level.share * moving.left_beyond(number, np.array([utilisation]), np.array([windows]))[0]
            for number, level in enumerate(moving.levels)
        )
        assert told == pytest.approx(come[found > windows].sum() / come.sum(), abs=0.04)


@given(paths)
def test_levels_keep_the_requests_and_the_time(rates: list[float]) -> None:
    levels = moving_rate(over_mean(rates)).levels
    assert sum(level.share for level in levels) == pytest.approx(1)
    assert sum(level.share / level.relative_rate for level in levels if level.relative_rate) <= 1 + 1e-6
    assert [level.relative_rate for level in levels] == sorted(level.relative_rate for level in levels)


@given(paths, st.floats(0.0, 0.99), st.floats(0.0, 5.0), st.floats(0.0, 5.0))
def test_fewer_find_more_left(rates: list[float], utilisation: float, wait: float, more: float) -> None:
    moving = moving_rate(over_mean(rates))
    load = np.array([utilisation])
    for level in range(len(moving.levels)):
        here = moving.left_beyond(level, load, np.array([wait]))
        assert 0 <= here <= 1
        assert moving.left_beyond(level, load, np.array([wait + more])) <= here + 1e-9


def test_a_rate_that_never_exceeds_what_is_served_leaves_nothing() -> None:
    moving = moving_rate((0.5, 1.5))
    assert moving.left_beyond(1, np.array([0.65]), np.array([0.0]))[0] == 0
    assert moving.left_beyond(1, np.array([0.7]), np.array([0.0]))[0] > 0.5


def test_no_path_is_one_level() -> None:
    assert moving_rate(()).levels == (Level(1.0, 1.0),)


@pytest.mark.parametrize(("run", "stays"), [(1, 1.0), (5, 5.0), (20, 20.0)])
def test_a_rate_stays_as_long_as_it_does(run: int, stays: float) -> None:
    """Levels drawn anew every ``run`` windows: long sums vary ``run`` times as much as they would."""
    drawn = np.repeat(np.random.default_rng(1).exponential(size=2000 // run), run)
    assert moving_rate(over_mean(drawn.tolist())).stays == pytest.approx(stays, rel=0.3)
