"""The planner's queue against closed forms: M/M/1, M/M/c, M/D/1, GI/M/1; and its laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.queueing import peakedness, wait_probability, wait_tail
from tests.planner.md1 import md1_wait_cdf

LOADS = [0.05, 0.3, 0.5, 0.8, 0.95, 0.9985]  # the last between the last two knots


def longer(u: float, x: float, *, slots: int = 1, arrival_cv: float = 1.0, service_cv: float = 1.0) -> float:
    """P(wait > x T / slots) where T does not depend on the batch."""
    load = np.array([u])
    often = wait_probability(load, np.ones(1), slots, arrival_cv, service_cv)
    return float(
        (often * wait_tail(load, arrival_cv, np.array([service_cv]), service_cv).beyond(np.array([x])))[0]
    )


def erlang_c(slots: int, u: float) -> float:
    offered = slots * u
    below = math.fsum(offered**k / math.factorial(k) for k in range(slots))
    top = offered**slots / math.factorial(slots) / (1 - u)
    return top / (below + top)


@pytest.mark.parametrize("u", LOADS)
@pytest.mark.parametrize("slots", [1, 2, 8, 32])
@pytest.mark.parametrize("x", [0.0, 0.5, 3.0])
def test_mmc(u: float, slots: int, x: float) -> None:
    expected = erlang_c(slots, u) * math.exp(-(1 - u) * x)
    assert longer(u, x, slots=slots) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("u", LOADS)
@pytest.mark.parametrize("x", [0.0, 0.2, 0.5, 1.0, 2.0, 5.0])
def test_md1(u: float, x: float) -> None:
    """The exact distribution is a sum of other exponentials; the mean and the tail are its own."""
    exact = 1 - float(md1_wait_cdf(np.array([u]), np.array([x]))[0])
    assert longer(u, x, service_cv=0.0) == pytest.approx(exact, abs=0.03)


@pytest.mark.parametrize("u", LOADS)
@pytest.mark.parametrize("service_cv", [0.0, 0.5, 1.0])
def test_mean_wait_is_pollaczek_khinchine(u: float, service_cv: float) -> None:
    x = np.linspace(0, 40 / (1 - u), 200_001)
    load = np.full_like(x, u)
    beyond = u * wait_tail(load, 1.0, np.full_like(x, service_cv), service_cv).beyond(x)
    assert np.trapezoid(beyond, x) == pytest.approx(u * (1 + service_cv**2) / 2 / (1 - u), rel=0.01)


@pytest.mark.parametrize("u", LOADS)
@pytest.mark.parametrize("arrival_cv", [0.5, 2.0, 4.0])
def test_gi_m_1(u: float, arrival_cv: float) -> None:
    """The share that waits is the root of s = E exp(-(1 - s) gap), and gives the length of waits: both exact."""
    low, high = 0.0, 1 - 1e-12
    for _ in range(200):
        s = (low + high) / 2
        beyond = (1 + arrival_cv**2 * (1 - s) / u) ** (-1 / arrival_cv**2) > s
        low, high = (s, high) if beyond else (low, s)
    for x in (0.0, 1.0, 10.0):
        assert longer(u, x, arrival_cv=arrival_cv) == pytest.approx(low * math.exp(-(1 - low) * x), abs=4e-3)


def test_a_chain_whose_rate_grows_with_the_batch() -> None:
    """Two slots, T(1) = 1 and T(2) = 1.5, one request a second: weights 1, 1, 0.75, then a quarter less each."""
    below, waiting = 1 + 1.0, 0.75 / (1 - 0.75)
    # T(n) = 0.5 + 0.5 n: a third of T(2) is fixed
    often = wait_probability(np.array([0.75]), np.array([1 / 3]), 2, 1.0, 1.0)
    assert often[0] == pytest.approx(waiting / (below + waiting), abs=1e-3)


@given(offered=st.floats(1e-6, 1e4), service_cv=st.floats(0, 3))
def test_poisson_arrivals_have_peakedness_one(offered: float, service_cv: float) -> None:
    assert peakedness(np.array([offered]), 1.0, service_cv)[0] == pytest.approx(1.0, abs=1e-4)


ROUNDING = 1e-15  # of a probability: much smaller ones result from a recursion in any order


@given(
    u=st.floats(0.01, 0.99),
    slots=st.sampled_from([1, 2, 8, 40]),
    share=st.floats(0, 1),
    arrival_cv=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    service_cv=st.sampled_from([0.0, 0.7, 1.5]),
)
def test_more_load_and_more_burstiness_wait_more(
    u: float, slots: int, share: float, arrival_cv: float, service_cv: float
) -> None:
    def often(load: float, cv: float) -> float:
        return float(wait_probability(np.array([load]), np.array([share]), slots, cv, service_cv)[0])

    assert 0 <= often(u, arrival_cv) <= often(min(u + 0.01, 1.0), arrival_cv) + ROUNDING
    assert often(min(u + 0.01, 1.0), arrival_cv) <= 1
    assert often(u, arrival_cv) <= often(u, 2 * arrival_cv) + 0.03, "Hayward's slots are no whole number"
    assert often(1.0, arrival_cv) == pytest.approx(1.0)
    tail = wait_tail(np.full(50, u), arrival_cv, np.full(50, service_cv), service_cv)
    beyond = tail.beyond(np.linspace(0, 30, 50))
    assert (np.diff(beyond) <= 1e-12).all()
    assert ((beyond >= 0) & (beyond <= 1)).all()
