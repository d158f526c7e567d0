"""The statistic of repeated timings."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.trimmed_mean import locate, t_quantile_95

TIMES = st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=40)


@pytest.mark.parametrize(
    ("dof", "expected"),
    [(1, 6.314), (4, 2.132), (7, 1.895), (12, 1.782), (40, 1.684), (1e9, 1.645), (0.3, 6.314)],
)
def test_t_quantiles_are_the_table_s(dof, expected):
    assert t_quantile_95(dof) == pytest.approx(expected, rel=0.01)


def test_one_run_of_five_at_each_end_is_left_out():
    """(2 + 3 + 4) / 3 = 3; winsorized 2 2 3 4 4 has a standard deviation of 1, over (1 - 2/5) sqrt(5)."""
    location = locate([1.0, 2.0, 3.0, 4.0, 100.0])
    assert location.value == 3.0
    assert location.standard_error == pytest.approx(1 / (0.6 * math.sqrt(5)))
    assert location.dof == 2


def test_fewer_than_five_are_a_plain_mean():
    location = locate([1.0, 2.0, 6.0])
    assert (location.value, location.dof) == (3.0, 2)
    assert location.standard_error == pytest.approx(math.sqrt(7 / 3))


def test_one_run_has_no_interval():
    assert locate([2.5]).half_width == math.inf


@given(TIMES, st.randoms())
def test_order_does_not_matter(times, random):
    shuffled = list(times)
    random.shuffle(shuffled)
    assert locate(shuffled) == locate(times)


@given(TIMES)
def test_the_value_lies_among_the_runs(times):
    assert min(times) * (1 - 1e-12) <= locate(times).value <= max(times) * (1 + 1e-12)


@pytest.mark.parametrize("repeats", [3, 5, 8, 15])
def test_the_interval_covers_nine_times_in_ten(repeats):
    random = np.random.default_rng(repeats)
    located = [locate(random.normal(10.0, 1.0, repeats)) for _ in range(2000)]
    assert np.mean([abs(loc.value - 10.0) <= loc.half_width for loc in located]) == pytest.approx(0.9, abs=0.04)
