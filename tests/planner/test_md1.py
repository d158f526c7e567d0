"""The reference of M/D/1 waits against its closed forms, an exact sum of positive terms, and a simulated queue."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.md1 import md1_wait_cdf, md1_wait_quantile


def cdf(u: float, x: float) -> float:
    return float(md1_wait_cdf(np.array([u]), np.array([x]))[0])


def quantile(u: float, percentile: float) -> float:
    return float(md1_wait_quantile(np.array([u]), percentile)[0])


def exact_cdf(u: float, x: float) -> float:
    """Franx (2001), one server: every term is positive, so nothing cancels.

    ``p`` is the number in the system, from the balance of steps up and down across each level.
    """
    arrivals = [math.exp(-u) * u**k / math.factorial(k) for k in range(60)]
    at_least = [max(0.0, 1 - math.fsum(arrivals[:k])) for k in range(60)]
    upper = math.floor(x) + 1
    p = [1 - u]
    for j in range(1, upper + 1):
        up = p[0] * at_least[j] + math.fsum(p[i] * at_least[j - i + 1] for i in range(1, j))
        p.append(up / arrivals[0])
    left = u * (upper - x)
    return math.fsum(
        math.fsum(p[: upper + 1 - j]) * math.exp(-left) * left**j / math.factorial(j) for j in range(upper)
    )


@pytest.mark.parametrize(
    ("u", "x", "expected"),
    [
        pytest.param(0.5, 0.0, 0.5, id="idle-server"),
        pytest.param(0.5, 0.5, 0.5 * math.exp(0.25), id="within-one-service"),
        pytest.param(0.5, 1.5, 0.5 * (math.exp(0.75) - 0.25 * math.exp(0.25)), id="within-two"),
        pytest.param(0.8, 2.0, 0.2 * (math.exp(1.6) - 0.8 * math.exp(0.8)), id="two"),
    ],
)
def test_cdf_closed_forms(u: float, x: float, expected: float) -> None:
    assert cdf(u, x) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("u", [0.05, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("x", [0.0, 0.3, 1.0, 2.5, 3.9, 4.0, 4.5, 7.2, 12.0])
def test_cdf_is_exact_to_what_it_says(u: float, x: float) -> None:
    assert cdf(u, x) == pytest.approx(exact_cdf(u, x), abs=1e-5)


@pytest.mark.parametrize("u", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_mean_wait_is_pollaczek_khinchine(u: float) -> None:
    """The area above the distribution is u / (2 (1 - u)) service times."""
    x = np.linspace(0, 40 / (1 - u), 400_001)
    area = float(np.trapezoid(1 - md1_wait_cdf(np.full_like(x, u), x), x))
    assert area == pytest.approx(u / (2 * (1 - u)), rel=2e-3)


@pytest.mark.parametrize("u", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("percentile", [50.0, 90.0, 95.0, 99.0])
def test_quantile_against_a_simulated_queue(u: float, percentile: float) -> None:
    """Lindley's recursion over 4 million arrivals; the tolerance is its own sampling error at u = 0.9."""
    gaps = np.random.default_rng(20261121).exponential(1 / u, 4_000_000)
    walk = np.cumsum(1.0 - gaps)
    waits = walk - np.minimum(np.minimum.accumulate(walk), 0.0)
    assert quantile(u, percentile) == pytest.approx(float(np.percentile(waits, percentile)), abs=0.02, rel=0.02)


@given(u=st.floats(0.001, 0.999), percentile=st.floats(1.0, 99.9))
def test_quantile_is_the_inverse(u: float, percentile: float) -> None:
    x = quantile(u, percentile)
    if x == 0:
        assert cdf(u, 0.0) >= percentile / 100 - 1e-12, "that many find the server idle"
    else:
        assert cdf(u, x - 0.003) <= percentile / 100 + 1e-9
        assert cdf(u, x + 0.003) >= percentile / 100 - 1e-9


@given(percentile=st.floats(1.0, 99.9))
def test_more_load_never_waits_less(percentile: float) -> None:
    waits = md1_wait_quantile(np.linspace(0.001, 0.999, 500), percentile)
    assert np.all(np.diff(waits) >= -0.003)


@pytest.mark.parametrize("u", [math.nextafter(1.0, 0.0), 1.0, 1.5, 1e9])
def test_a_full_queue_has_no_end(u: float) -> None:
    assert quantile(u, 50.0) == math.inf


@pytest.mark.parametrize("below", [1e-3, 1e-6, 1e-9, 1e-11])
def test_a_nearly_full_queue_waits_as_heavy_traffic_says(below: float) -> None:
    """Kingman's limit: exponential with mean u / (2 (1 - u)), so ln(20) / (2 (1 - u)) at 95%."""
    assert quantile(1 - below, 95.0) == pytest.approx(math.log(20) / (2 * below), rel=1e-3)
