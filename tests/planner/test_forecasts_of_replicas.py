"""Forecasts of several replicas that share variants: between those with all loads and those with the fewest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.attainment import Attainment, Metric
from planner.costs import figures
from planner.intent import Traffic
from planner.normal_distribution import Z_OF_INTERVAL
from tests.planner.candidates import full_and_alone

TRAFFIC, BATCH = Traffic(input_cv=0.0), 4
SPARED_S = (0.0, 0.05, 0.08)  # of prompts of 0.4 s, of which further ones add 0.1
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2e")
RATES, TRUTHS = st.floats(1e-6, 2.0), st.sampled_from([None, -Z_OF_INTERVAL, 0.0, Z_OF_INTERVAL])


def attainment(
    replicas: int, *, fewer_s: float = 0.0, spread: float = 0.0, traffic: Traffic = TRAFFIC, tables: int = 1
) -> Attainment:
    """A row for each of ``tables``, with prompts that are shorter by ``fewer_s``."""
    full, alone = full_and_alone(BATCH, spread=spread)
    less = [
        replace(one, ttft_s=replace(one.ttft_s, **shorter(one.ttft_s, fewer_s * size)), spared_loads_s=SPARED_S)
        for one, size in ((full, BATCH), (alone, 1))
    ]
    return Attainment.of_estimates(figures(less[:1] * tables), less[1:] * tables, traffic, replicas)


def shorter(time: object, by_s: float) -> dict[str, float]:
    return {name: getattr(time, name) - by_s for name in ("value", "low", "high")}


@settings(max_examples=30, deadline=None)
@given(rate=RATES, limit=st.floats(0.3, 20), z=TRUTHS)
def test_one_replica_is_as_without_to_the_bit(rate: float, limit: float, z: float | None) -> None:
    full, alone = full_and_alone(BATCH, spread=0.2)
    plain = Attainment.of_estimates(figures([full]), [alone], TRAFFIC)
    one = attainment(1, spread=0.2)
    assert one.mean_e2e(rate, z or 0.0).tolist() == plain.mean_e2e(rate, z or 0.0).tolist()
    for metric in METRICS:
        assert one.misses(metric, limit, rate, z).tolist() == plain.misses(metric, limit, rate, z).tolist()


@settings(max_examples=40, deadline=None)
@given(rate=RATES, replicas=st.sampled_from([2, 3, 9]), limit=st.floats(0.3, 20))
def test_times_are_between_those_with_all_loads_and_those_with_the_places_of_all(
    rate: float, replicas: int, limit: float
) -> None:
    apart, shared = attainment(1), attainment(replicas)
    together = attainment(1, fewer_s=SPARED_S[min(replicas, 3) - 1])
    means = [float(one.mean_e2e(rate)[0]) for one in (together, shared, apart)]
    assert means[0] <= means[1] * (1 + 1e-9)
    assert means[1] <= means[2] * (1 + 1e-9)
    for metric in METRICS:
        missed = [float(one.misses(metric, limit, rate)[0]) for one in (together, shared, apart)]
        assert missed[0] <= missed[1] + 1e-9
        assert missed[1] <= missed[2] + 1e-9


@settings(max_examples=40, deadline=None)
@given(rate=RATES, replicas=st.sampled_from([2, 9]), limit=st.floats(0.3, 20), spread=st.sampled_from([0.0, 0.2]))
def test_times_grow_with_the_rate_and_first_tokens_are_late_no_more_often_than_answers(
    rate: float, replicas: int, limit: float, spread: float
) -> None:
    """But for a thousandth of the answers: of a replica alone, with nothing spared, the law of late ones already
    falls by up to 3e-4 where the rate rises by a tenth.
    """
    shared = attainment(replicas, spread=spread)
    slow, fast = (float(shared.mean_e2e(one)[0]) for one in (rate, 1.1 * rate))
    assert fast >= slow * (1 - 1e-6)
    late = {metric: float(shared.misses(metric, limit, rate)[0]) for metric in METRICS}
    assert late["ttft"] <= late["e2e"]
    assert float(shared.misses("e2e", limit, 1.1 * rate)[0]) >= late["e2e"] - 1e-3


def test_next_to_no_load_all_that_can_be_is_spared_but_of_first_tokens_none() -> None:
    """Their mean prompt says too little of the few that wait for a load: 0.4 s stay 0.4 s."""
    shared = attainment(2)
    assert shared.mean_e2e(1e-9)[0] == pytest.approx(0.35 + 100 * 0.02)
    assert attainment(9).mean_e2e(1e-9)[0] == pytest.approx(0.32 + 100 * 0.02)
    assert shared.quantile("ttft", 50, 1e-9)[0] == pytest.approx(0.4, rel=1e-3)


def test_the_rate_that_is_served_is_that_with_all_loads() -> None:
    """A queue that has tipped over has all loads, and would stay."""
    apart, shared = attainment(1), attainment(9)
    assert shared.service_s.tolist() == apart.service_s.tolist()
    most_per_s = 1 / float(apart.service_s[0])
    assert shared.mean_e2e(1.001 * most_per_s)[0] == np.inf
    assert shared.mean_e2e(0.999 * most_per_s)[0] < np.inf


def test_an_interval_keeps_a_lower_end_that_has_no_load() -> None:
    """E2E is 2.4 s, from 2.3 s without a load; spared 50 ms, it is still no less at the lower end."""
    full, alone = full_and_alone(1)
    low = [replace(one, ttft_s=replace(one.ttft_s, low=0.3), spared_loads_s=SPARED_S) for one in (full, alone)]
    found = Attainment.of_estimates(figures(low[:1]), low[1:], TRAFFIC, 2)
    assert found.mean_e2e(1e-9)[0] == pytest.approx(2.35)
    assert found.mean_e2e(1e-9, -Z_OF_INTERVAL)[0] == pytest.approx(2.3, rel=1e-3)


def test_a_row_is_the_same_among_more() -> None:
    many = attainment(2, tables=3)
    rates = np.array([0.1, 0.4, 0.7])
    for row in range(3):
        one = many.take(np.array([row]))
        assert one.mean_e2e(rates[row])[0] == pytest.approx(many.mean_e2e(rates)[row], rel=1e-9)
        assert one.misses("e2e", 4.0, rates[row])[0] == pytest.approx(
            many.misses("e2e", 4.0, rates)[row], rel=1e-9
        )


def test_a_rate_that_moves_has_the_loads_of_its_mean() -> None:
    """Levels of half and one and a half times the rate: between all loads and the fewest."""
    moving = replace(TRAFFIC, relative_rates=(0.5, 1.5), window_s=60.0)
    means = [
        float(one.mean_e2e(0.5)[0])
        for one in (
            attainment(1, fewer_s=SPARED_S[1], traffic=moving),
            attainment(2, traffic=moving),
            attainment(1, traffic=moving),
        )
    ]
    assert means == sorted(means)
    assert means[0] < means[1] < means[2]


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_a_truth_under_which_all_loads_are_not_served_is_not_served(spread: float) -> None:
    """At the estimate's value the rate is, and there loads are spared."""
    apart, shared = attainment(1, spread=spread), attainment(9, spread=spread)
    rate = 1.01 / float(apart.service_s[0] * (1 + spread))
    assert apart.mean_e2e(rate, Z_OF_INTERVAL)[0] == shared.mean_e2e(rate, Z_OF_INTERVAL)[0] == np.inf
    assert shared.mean_e2e(rate)[0] < apart.mean_e2e(rate)[0] < np.inf


def test_what_misses_under_a_truth_has_the_loads_of_that_truth() -> None:
    """At the estimate's value loads are spared, so that the rate would be served under the truth as well."""
    apart, shared = attainment(1, spread=0.3), attainment(9, spread=0.3)
    rate = 1.001 / float(apart.service_s[0] * 1.3)
    assert shared.misses("e2e", 1e6, rate, Z_OF_INTERVAL)[0] == 1.0
    assert shared.misses("e2e", 1e6, rate, 0.0)[0] < 1.0


def test_a_first_token_that_is_the_answer_is_late_no_more_often_than_it() -> None:
    """A prompt of 0.4 s with all loads, 0.35 s with those that are left: the only token."""
    one_token = [
        replace(one, workload=replace(one.workload, output_tokens=1), spared_loads_s=SPARED_S)
        for one in full_and_alone(BATCH)
    ]
    shared = Attainment.of_estimates(figures(one_token[:1]), one_token[1:], TRAFFIC, 2)
    assert shared.misses("e2e", 0.38, 1e-9)[0] == pytest.approx(0.0, abs=1e-6)
    assert shared.misses("ttft", 0.38, 1e-9)[0] <= shared.misses("e2e", 0.38, 1e-9)[0]
