"""The mean E2E at a rate: closed forms, laws, and simulations (how far it is off is part of what it says)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from planner.attainment import Attainment
from planner.intent import Intent, IntentKind, Slo, Traffic
from planner.plan import Candidate, LimitKind
from planner.rank import rank
from tests.bench.risk import GRIDS, Case, prediction, simulated, varied
from tests.fingerprint.test_queueing import erlang_c
from tests.planner.candidates import estimate, everything_fits
from tests.planner.test_attainment import MOVING, SHORT_S, attainment, capacity
from traces.arrivals import Gamma
from traces.generate import generate


def mean_s(found: Attainment, rate_per_s: float) -> float:
    return float(found.mean_e2e(rate_per_s)[0])


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("traffic", [Traffic(), Traffic(burstiness=2.0), Traffic(relative_rates=MOVING)], ids=repr)
def test_at_next_to_no_rate_it_is_a_request_alone(batch: int, traffic: Traffic) -> None:
    assert mean_s(attainment(batch=batch, traffic=traffic), 1e-12) == pytest.approx(2.4, rel=3e-3), (
        "bursts never get thinner than the queue's table"
    )


@pytest.mark.parametrize("utilisation", [0.1, 0.5, 0.8, 0.95])
def test_one_at_a_time_it_is_pollaczek_and_khinchines(utilisation: float) -> None:
    """Constant services of 2.4 s."""
    found = attainment()
    expected = 2.4 * (1 + utilisation / (2 * (1 - utilisation)))
    assert mean_s(found, utilisation / 2.4) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("utilisation", [0.3, 0.8])
def test_a_batch_has_its_mean_size_and_its_waits(utilisation: float) -> None:
    """The batch of 4 that take 2.4 + 0.6 (n - 1) s has the mean ``T(1) / (1 - rate B)`` by Little's law.

    It is at most a full batch; the wait is shorter than where all run as slowly as a full batch.
    """
    found = attainment(batch=4)
    rate = utilisation * capacity(found)
    running = min(2.4 / (1 - 0.6 * rate), 4.2)
    waits = (erlang_c(4, utilisation) + 0.02) * 4.2 / 8 / (1 - utilisation)  # 2 points: Sakasegawa's
    assert running - 0.02 <= mean_s(found, rate) <= running + waits + 0.02


@given(
    batch=st.sampled_from([1, 4, 16]),
    busy=st.floats(0.01, 0.9),
    more=st.floats(1.01, 1.1),
    burstiness=st.sampled_from([0.5, 1.0, 2.0]),
    rates=st.sampled_from([(), MOVING]),
)
def test_it_rises_with_the_rate_and_with_bursts(
    batch: int, busy: float, more: float, burstiness: float, rates: tuple[float, ...]
) -> None:
    found = attainment(batch=batch, traffic=Traffic(burstiness=burstiness, relative_rates=rates))
    rate = busy * capacity(found)
    here = mean_s(found, rate)
    assert 2.4 - 1e-9 <= here <= mean_s(found, rate * more) * (1 + 1e-6)
    wilder = attainment(batch=batch, traffic=Traffic(burstiness=2 * burstiness, relative_rates=rates))
    assert here <= mean_s(wilder, rate) * 1.01


def test_a_path_that_is_over_at_once_is_its_mean_and_a_rate_that_is_not_served_has_no_end() -> None:
    steady, moving = (attainment(traffic=t) for t in (Traffic(), Traffic(relative_rates=MOVING, window_s=SHORT_S)))
    rate = 0.7 * capacity(steady)
    assert mean_s(moving, rate) == pytest.approx(mean_s(steady, rate), rel=1e-4)
    assert np.isinf(mean_s(steady, 1.0001 * capacity(steady)))
    assert np.isfinite(mean_s(steady, 0.9999 * capacity(steady)))


@pytest.mark.parametrize(
    ("window_s", "utilisation"), list(itertools.product((10.0, 30.0, 300.0), (0.3, 0.6, 0.8)))
)
def test_a_moving_rate_against_lindleys_recursion(window_s: float, utilisation: float) -> None:
    """Within 5% below and 25% above: work that is left and a queue of the moment are added."""
    rates = tuple(np.random.default_rng(3).permutation([0.1] * 12 + [1.0] * 4 + [3.0] * 2 + [4.4] * 2).tolist())
    found = attainment(traffic=Traffic(relative_rates=rates, window_s=window_s))
    rate, rng = utilisation / 2.4, np.random.default_rng(7)
    turns = int(40_000 / (rate * window_s * len(rates))) + 1
    counts = rng.poisson(np.tile(rates, turns) * rate * window_s)
    starts = np.repeat(np.arange(len(counts)) * window_s, counts)
    arrivals = np.sort(starts + rng.random(len(starts)) * window_s)
    work = 2.4 * np.arange(len(arrivals))
    told = float((2.4 + np.maximum.accumulate(arrivals - work) - (arrivals - work)).mean())
    assert 0.95 * told <= mean_s(found, rate) <= 1.25 * told


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("cv", [0.0, 1.0])
def test_against_the_simulator_of_continuous_batching(slots: int, utilisation: float, cv: float) -> None:
    """Llama-2-7B's steps on an A6000."""
    traffic, grid = Traffic(input_cv=cv, output_cv=cv), GRIDS["built"]
    case = Case("", slots, utilisation, traffic, Workload(slots, grid.input_tokens, grid.output_tokens))
    found = prediction(case)
    rate = utilisation / float(found.service_s[0])
    requests = generate(Gamma(rate, 1.0), varied(grid, cv), seed=1, num_requests=3000, models=["0"])
    outcomes, _ = simulated(case, requests)
    assert mean_s(found, rate) == pytest.approx(float(np.mean(outcomes.e2e_s)), rel=0.1)


FAST_BATCH, FAST_ALONE = DeploymentConfig(tp=4), DeploymentConfig(tp=1)


def two() -> list[Candidate]:
    """Return two candidates: one twice as fast in a full batch of 8, the other a little faster alone."""
    found = []
    for config, alone_s, full_s in ((FAST_BATCH, 0.011, 0.015), (FAST_ALONE, 0.010, 0.030)):
        of_full, of_one = (
            estimate(
                config, ttft_s=10 * s, tpot_s=s, workload=Workload(batch=n, input_tokens=8, output_tokens=101)
            )
            for n, s in ((8, full_s), (1, alone_s))
        )
        found.append(Candidate(config, of_full, None, of_one))
    return found


@pytest.mark.parametrize(
    ("rate_per_s", "chosen", "unit"),
    [
        (None, FAST_BATCH, "s"),
        (0.01, FAST_ALONE, "s at 0.01 requests/s"),
        (2.2, FAST_BATCH, "s at 2.2 requests/s"),
    ],
)
def test_the_fastest_is_that_of_the_rate(rate_per_s: float | None, chosen: DeploymentConfig, unit: str) -> None:
    plan = rank(two(), Intent(kind=IntentKind.MIN_LATENCY, rate_per_s=rate_per_s), fits=everything_fits)
    assert plan.best is not None
    assert (plan.best.config, plan.objective_unit) == (chosen, unit)


def test_where_no_rate_is_served_the_batch_s_latency_orders_and_advice_is_of_the_rate_that_is() -> None:
    intent = Intent(kind=IntentKind.MIN_LATENCY, rate_per_s=100.0, slo=Slo(e2e_s=10.0))
    plan = rank(two(), intent, fits=everything_fits)
    assert plan.chosen is None
    assert [(one.config, one.objective) for one in plan.candidates] == [(FAST_BATCH, None), (FAST_ALONE, None)]
    (advice,) = plan.why_not.relaxations
    assert advice.limit is LimitKind.RATE
    slower = rank(two(), Intent(kind=IntentKind.MIN_LATENCY, rate_per_s=advice.needed), fits=everything_fits)
    assert slower.best is not None
    assert (slower.best.config, slower.best.objective) == (advice.config, advice.objective)
