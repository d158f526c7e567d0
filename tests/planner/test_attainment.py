"""The probability of missing a limit: laws, and integrals done by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from planner.attainment import Attainment, Metric
from planner.costs import figures
from planner.intent import Traffic
from tests.planner.candidates import estimate, full_and_alone

POISSON = Traffic()
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2e")


def attainment(*, batch: int = 1, spread: float = 0.0, traffic: Traffic = POISSON) -> Attainment:
    full, alone = full_and_alone(batch, spread=spread)
    return Attainment.of_estimates(figures([full]), [alone], traffic)


def misses(found: Attainment, metric: Metric, limit_s: float, rate: float) -> float:
    return float(found.misses(metric, limit_s, rate)[0])


def capacity(found: Attainment) -> float:
    return float(1 / found.service_s[0])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("percentile", [80.0, 95.0, 99.0])
def test_without_load_it_is_the_law_of_the_truth(metric: Metric, percentile: float) -> None:
    """Lognormal above the value, its 95th percentile the interval's upper end."""
    value = {"ttft": 0.4, "tpot": 0.02, "e2e": 2.4}[metric]
    z = NormalDist().inv_cdf(percentile / 100) / NormalDist().inv_cdf(0.95)
    found = float(attainment(spread=0.1).quantile(metric, percentile, 1e-12)[0])
    assert found == pytest.approx(value * 1.1**z, rel=2e-4)


@pytest.mark.slow
def test_the_uncertain_truth_is_integrated_over() -> None:
    """The mean over the truth of M/M/1's ``u exp(-(1 - u) wait / T)``, by hand: one slot, exponential answers."""
    found, rate, limit = attainment(spread=0.2, traffic=Traffic(input_cv=0.0)), 0.15, 4.0
    total, points = 0.0, 20_000
    for i in range(points):
        z = NormalDist().inv_cdf((i + 0.5) / points)
        high, low = 1.2, 0.8
        slower = (high if z > 0 else 1 / low) ** (z / NormalDist().inv_cdf(0.95))
        certain = attainment()
        scaled_limit, scaled_rate = limit / slower, rate * slower
        # a machine that is slower by a factor is the same machine with another clock
        total += (
            (1.0 if scaled_rate >= capacity(certain) else misses(certain, "e2e", scaled_limit, scaled_rate))
            if i % 100 == 50
            else 0.0
        )
    assert misses(found, "e2e", limit, rate) == pytest.approx(total / (points / 100), abs=0.01)


@given(
    most=st.sampled_from([1, 2, 8, 64]),
    output_tokens=st.sampled_from([1, 2, 10, 100]),
    prompt_s=st.floats(0.01, 3.0),
    step_s=st.floats(0.003, 0.1),
    busy=st.floats(0.05, 0.95),
    limit=st.floats(0.3, 30.0),
    traffic=st.builds(
        Traffic,
        burstiness=st.sampled_from([1.0, 2.0, 4.0]),
        input_cv=st.sampled_from([0.2, 1.0]),
        output_cv=st.sampled_from([0.2, 1.0]),
    ),
)
def test_an_answer_is_late_where_its_first_token_is(
    most: int, output_tokens: int, prompt_s: float, step_s: float, busy: float, limit: float, traffic: Traffic
) -> None:
    work = Workload(batch=most, input_tokens=512, output_tokens=output_tokens)
    full, alone = (
        estimate(
            DeploymentConfig(),
            ttft_s=prompt_s * (1 + 0.7 * (batch - 1)),
            tpot_s=step_s * (1 + 0.02 * (batch - 1)),
            workload=replace(work, batch=batch),
        )
        for batch in (most, 1)
    )
    found = Attainment.of_estimates(figures([full]), [alone], traffic)
    limit_s, rate = limit * (prompt_s + output_tokens * step_s), busy * capacity(found)
    assert misses(found, "ttft", limit_s, rate) <= misses(found, "e2e", limit_s, rate) + 1e-3


cases = {
    "batch": st.sampled_from([1, 4, 16]),
    "busy": st.floats(0.05, 0.9),
    "spread": st.sampled_from([0.0, 0.1, 0.4]),
    "burstiness": st.sampled_from([1.0, 2.0, 4.0]),
    "cv": st.sampled_from([0.0, 1.0]),
    "metric": st.sampled_from(METRICS),
    "limit": st.floats(1.1, 20.0),
}
SLACK = 0.01  # of the sums in place of integrals
BURSTY_SLACK = 0.03  # of the scaling by Hayward, whose slots are no whole number


@given(**cases)
@example(batch=4, busy=0.25, spread=0.4, burstiness=2.0, cv=1.0, metric="tpot", limit=2.0)
def test_attainment_falls_with_load_burstiness_and_doubt_and_rises_with_the_limit(
    batch: int, busy: float, spread: float, burstiness: float, cv: float, metric: Metric, limit: float
) -> None:
    traffic = Traffic(burstiness=burstiness, input_cv=cv, output_cv=cv)
    found = attainment(batch=batch, spread=spread, traffic=traffic)
    rate, limit_s = busy * capacity(found), limit * {"ttft": 0.4, "tpot": 0.02, "e2e": 2.4}[metric]
    missed = misses(found, metric, limit_s, rate)
    assert 0 <= missed <= 1
    assert misses(found, metric, limit_s, rate * 1.1) >= missed - SLACK
    assert misses(found, metric, limit_s * 1.1, rate) <= missed + SLACK
    if missed < 0.5:
        wilder = Traffic(burstiness=burstiness * 2, input_cv=cv, output_cv=cv)
        burstier = attainment(batch=batch, spread=spread, traffic=wilder)
        assert misses(burstier, metric, limit_s, rate) >= missed - BURSTY_SLACK
    if missed < 0.3:  # up to a half by the truth alone; lengths and waits too make the share concave earlier
        wider = attainment(batch=batch, spread=spread + 0.1, traffic=traffic)
        assert misses(wider, metric, limit_s, rate) >= missed - SLACK


@pytest.mark.slow
@given(**{name: cases[name] for name in ("batch", "busy", "spread", "burstiness", "cv", "metric")})
def test_quantiles_rise_with_the_percentile_and_are_kept(
    batch: int, busy: float, spread: float, burstiness: float, cv: float, metric: Metric
) -> None:
    found = attainment(
        batch=batch, spread=spread, traffic=Traffic(burstiness=burstiness, input_cv=cv, output_cv=cv)
    )
    rate = busy * capacity(found)
    told = [float(found.quantile(metric, percentile, rate)[0]) for percentile in (50.0, 90.0, 99.0)]
    assert told[0] <= told[1] * 1.0002 <= told[2] * 1.0004, "each is found within 0.01%"
    for percentile, value in zip((50.0, 90.0, 99.0), told, strict=True):
        if math.isfinite(value):
            assert misses(found, metric, value, rate) <= 1 - percentile / 100 + 1e-12


@pytest.mark.parametrize("batch", [1, 16])
def test_beyond_capacity_every_request_misses(batch: int) -> None:
    found = attainment(batch=batch)
    assert misses(found, "e2e", 1e6, 1.001 * capacity(found)) == 1
    assert math.isinf(float(found.quantile("e2e", 95.0, 1.001 * capacity(found))[0]))


def test_truths_that_leave_no_queue_count_as_missed() -> None:
    """At 1.1 / 1.2 of what the value serves, the interval's end, a twentieth of the truths serve less."""
    found = attainment(spread=0.2)
    assert misses(found, "ttft", 1e9, capacity(found) / 1.2) == pytest.approx(0.05, abs=1e-4)


def test_the_highest_rate_keeps_the_limits_and_no_higher_one_does() -> None:
    found = attainment(batch=16, spread=0.1)
    limits: dict[Metric, np.ndarray] = {"ttft": np.array([2.0]), "e2e": np.array([20.0])}
    highest = float(found.highest_rate(limits, 95.0, np.array([capacity(found)]))[0])
    worst = [max(misses(found, m, float(limit[0]), rate) for m, limit in limits.items())
             for rate in (highest, highest * 1.001)]  # fmt: skip
    assert worst[0] <= 0.05 < worst[1]


def test_a_request_alone_in_a_large_batch_is_as_fast_as_alone() -> None:
    found = attainment(batch=16)
    for metric, value in (("ttft", 0.4), ("tpot", 0.02), ("e2e", 2.4)):
        assert float(found.quantile(metric, 95.0, 1e-9)[0]) == pytest.approx(value, rel=1e-3)  # type: ignore[arg-type]


MOVING = (0.5, 1.5)  # a quarter of the requests arrive at half the mean rate
LONG_S, SHORT_S = 1e12, 1e-6


@pytest.mark.parametrize("metric", METRICS)
def test_levels_that_last_are_loads_of_their_own(metric: Metric) -> None:
    """Three quarters of the requests meet one and a half times the rate."""
    steady, moving = (
        attainment(batch=4, spread=0.1),
        attainment(batch=4, spread=0.1, traffic=Traffic(relative_rates=MOVING, window_s=LONG_S)),
    )
    rate, limit = 0.5 * capacity(steady), 1.4 * {"ttft": 0.4, "tpot": 0.02, "e2e": 2.4}[metric]
    by_hand = 0.75 * misses(steady, metric, limit, 1.5 * rate) + 0.25 * misses(steady, metric, limit, 0.5 * rate)
    assert misses(moving, metric, limit, rate) == pytest.approx(by_hand, abs=1e-6)


def test_an_overload_that_lasts_is_missed_and_so_is_what_follows() -> None:
    """At 0.8 on average: 1.2 for a window, which leaves a fifth of one: a third of the next, at 0.4."""
    moving = attainment(traffic=Traffic(relative_rates=MOVING, window_s=LONG_S))
    told = misses(moving, "e2e", 1e6, 0.8 * capacity(moving))
    assert told == pytest.approx(0.75 + 0.25 / 3, abs=0.25 / 16 + 1e-3), "asked at eight moments of a window"


def test_an_overload_that_is_over_at_once_is_the_mean_rate() -> None:
    steady, moving = (
        attainment(batch=4),
        attainment(batch=4, traffic=Traffic(relative_rates=MOVING, window_s=SHORT_S)),
    )
    rate = 0.8 * capacity(steady)
    for limit in (2.5, 3.0, 5.0, 10.0):
        assert misses(moving, "ttft", limit, rate) == pytest.approx(misses(steady, "ttft", limit, rate), abs=1e-6)


def test_a_path_that_does_not_move_is_a_steady_rate() -> None:
    one, none = (
        attainment(batch=4, traffic=Traffic(relative_rates=(1.0, 1.0), window_s=LONG_S)),
        attainment(batch=4),
    )
    assert misses(one, "e2e", 3.0, 0.5) == pytest.approx(misses(none, "e2e", 3.0, 0.5), abs=1e-6)


def test_a_moving_rate_against_lindleys_recursion() -> None:
    """Poisson at a rate that moves by a path of twenty windows of 4 services or more: simulated."""
    off = [
        error
        for window_s, utilisation in itertools.product((10.0, 30.0, 300.0), (0.3, 0.6, 0.8))
        for error in off_of_lindley(window_s, utilisation)
    ]
    assert max(off) < 0.12
    assert np.mean(off) < 0.05


def off_of_lindley(window_s: float, utilisation: float) -> list[float]:
    rates = tuple(np.random.default_rng(3).permutation([0.1] * 12 + [1.0] * 4 + [3.0] * 2 + [4.4] * 2).tolist())
    found = attainment(traffic=Traffic(relative_rates=rates, window_s=window_s))
    service_s = float(found.service_s[0])
    rate = utilisation / service_s
    rng = np.random.default_rng(7)
    turns = int(40_000 / (rate * window_s * len(rates))) + 1
    counts = rng.poisson(np.tile(rates, turns) * rate * window_s)
    starts = np.repeat(np.arange(len(counts)) * window_s, counts)
    arrivals = np.sort(starts + rng.random(len(starts)) * window_s)
    ends = service_s * np.arange(1, len(arrivals) + 1) + np.maximum.accumulate(
        arrivals - service_s * np.arange(len(arrivals))
    )
    return [
        abs(misses(found, "e2e", limit_s, rate) - float((ends - arrivals > limit_s).mean()))
        for limit_s in (2 * service_s, 5 * service_s, 20 * service_s)
    ]


@settings(max_examples=20)
@given(
    path=st.lists(st.floats(0.0, 5.0), min_size=2, max_size=12).filter(lambda rates: sum(rates) > 0.1),
    window_s=st.floats(0.1, 1e4),
    batch=st.sampled_from([1, 4, 32]),
    burstiness=st.sampled_from([0.5, 1.0, 3.0]),
    metric=st.sampled_from(METRICS),
    times=st.sampled_from([1.1, 2.0, 10.0]),
)
def test_of_a_rate_that_moves_a_higher_one_is_missed_more_often(
    path: list[float], window_s: float, batch: int, burstiness: float, metric: Metric, times: float
) -> None:
    """But for two points, by which the shares of a steady rate fall here and there too."""
    rates = tuple((np.array(path) / np.mean(path)).tolist())
    traffic = Traffic(relative_rates=rates, window_s=window_s, burstiness=burstiness)
    one = attainment(batch=batch, spread=0.1, traffic=traffic)
    rate = capacity(one) * np.linspace(0.05, 1.05, 9)
    found = one.take(np.zeros(len(rate), np.intp))
    limit = times * {"ttft": 0.4, "tpot": 0.02, "e2e": 2.4}[metric]
    missed = found.misses(metric, limit, rate)
    assert np.diff(missed).min() > -0.02


def test_nothing_to_judge() -> None:
    none = Attainment.of_estimates(figures([]), [], POISSON)
    assert none.misses("e2e", 1.0, 1.0).shape == (0,)
