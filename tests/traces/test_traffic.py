"""Traffic parameters that a queue is given of a trace."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fingerprint.errors import BadInputError
from planner.intent import MOST_WINDOWS, Traffic
from tests.golden_words import Golden
from traces.request import Request
from traces.traffic import traffic_of


def at_rates(rates: list[float], window_s: float, seed: int = 1) -> list[Request]:
    """Poisson, at each of ``rates`` for one window."""
    rng = np.random.default_rng(seed)
    found = []
    for window, rate in enumerate(rates):
        times = np.sort(rng.random(rng.poisson(rate * window_s))) * window_s + window * window_s
        found += [Request(float(t), 100 if t % 2 < 1 else 300, 50, "m") for t in times]
    return found


def test_a_steady_rate_hardly_moves() -> None:
    """Counts of 400 windows: what they vary beyond Poisson's is noise of a few percent."""
    told = traffic_of(at_rates([5.0] * 400, 10.0))
    assert told.burstiness == pytest.approx(1.0, abs=0.05)
    assert np.std(told.relative_rates or (1.0,)) < 0.05
    assert told.output_cv == 0
    assert told.input_cv == pytest.approx(0.5, abs=0.03), "100 and 300 equally often"


def test_a_rate_that_moves_between_two_is_found_at_both() -> None:
    """Nine fifths of its mean and one fifth, window by window as it was."""
    told = traffic_of(at_rates([9.0, 9.0, 1.0, 1.0] * 100, 10.0))
    assert told.burstiness == pytest.approx(1.0, abs=0.05)
    path = np.reshape(told.relative_rates, (100, 4)).mean(axis=0)
    assert path == pytest.approx([1.8, 1.8, 0.2, 0.2], abs=0.05)
    assert told.window_s == 10


def test_it_is_the_same_at_another_rate() -> None:
    """A trace with ten times the requests moves as much, for the noise of the counts is taken out."""
    pattern = [6.0, 1.0, 3.0, 2.0] * 150
    one, two = (traffic_of(at_rates([rate * times for rate in pattern], 10.0)) for times in (1, 10))

    def spread(told: Traffic) -> float:
        return float(np.mean(np.square(told.relative_rates)))

    assert spread(one) == pytest.approx(spread(two), rel=0.05)
    assert spread(two) == pytest.approx(float(np.mean(np.square(pattern)) / np.mean(pattern) ** 2), rel=0.05)


def test_a_long_trace_is_told_in_longer_windows() -> None:
    told = traffic_of(at_rates([1.0, 1.0, 3.0] * 1400, 10.0))
    assert told.window_s == 30
    assert len(told.relative_rates) <= MOST_WINDOWS
    assert np.std(told.relative_rates or (1.0,)) < 0.05, "three windows together are always as busy"


def test_bursts_within_a_window_are_burstiness() -> None:
    """Requests in pairs: the variance of counts is twice their mean."""
    single = at_rates([4.0] * 300, 10.0)
    pairs = list(itertools.chain.from_iterable(zip(single, single, strict=True)))
    assert traffic_of(pairs).burstiness == pytest.approx(2**0.5, rel=0.06)


@pytest.mark.parametrize("requests", [[], at_rates([2.0] * 7, 10.0)], ids=["empty", "short"])
def test_too_short_a_trace_is_refused(requests: list[Request], golden: Golden) -> None:
    with golden.raises("traces", BadInputError):
        traffic_of(requests)
