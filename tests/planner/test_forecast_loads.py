"""Waits for loads next to the steps in forecasts: means, percentiles, and rows that have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.load_columns import load_wait_at
from fingerprint.load_waits import OFFERED, LoadWaits
from planner.adapter_slots import VariantLoad
from planner.attainment import Attainment, Metric
from planner.constraints import told_of
from planner.costs import figures
from planner.intent import Intent, Traffic
from planner.rate_profile import moving_rate
from tests.planner.candidates import full_and_alone

TRAFFIC = Traffic(input_cv=0.0)
METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2e")


def constant(share: float, load_s: float) -> LoadWaits:
    """Return waits of one load each, whatever the rate."""
    each = len(OFFERED)
    alike = {"means": (1.0,) * each, "least": (1.0,) * each, "shorter": (0.0,) * each}
    return LoadWaits(load_s=load_s, shares=(share,) * each, **alike)


def attainment(*loads: LoadWaits | None, spread: float = 0.0, traffic: Traffic = TRAFFIC) -> Attainment:
    """A row for each of ``loads``: 0.4 s of prompt and 20 ms a step alone, four at once at most."""
    full, alone = full_and_alone(4, spread=spread)
    fulls = [replace(full, load_waits=one) for one in loads]
    return Attainment.of_estimates(figures(fulls), [replace(alone, load_waits=one) for one in loads], traffic)


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.01, 1.0), spread=st.sampled_from([0.0, 0.2]), limit=st.floats(0.3, 20))
def test_a_row_without_such_loads_is_the_same_to_the_bit(rate: float, spread: float, limit: float) -> None:
    alone, mixed = attainment(None, None, spread=spread), attainment(None, constant(0.3, 5.0), spread=spread)
    assert mixed.mean_e2e(rate)[0] == alone.mean_e2e(rate)[0]
    for metric in METRICS:
        assert mixed.misses(metric, limit, rate)[0] == alone.misses(metric, limit, rate)[0]
    assert alone.load_wait(rate) is None


def test_means_rise_by_the_share_times_the_wait() -> None:
    none, some = attainment(None, constant(0.1, 5.0)).mean_e2e(0.3)
    assert some - none == pytest.approx(0.5)
    assert attainment(constant(0.1, 5.0)).mean_e2e(100.0)[0] == np.inf


def test_a_miss_probability_of_3_percent_moves_p99_and_not_p95() -> None:
    """At hardly any load a first token takes 0.4 s, or 5.4 s behind a load."""
    found = attainment(constant(0.03, 5.0))
    assert found.quantile("ttft", 95, 1e-9)[0] == pytest.approx(0.4, rel=1e-3)
    assert found.quantile("ttft", 99, 1e-9)[0] == pytest.approx(5.4, rel=1e-3)


@pytest.mark.parametrize("metric", ["ttft", "e2e"])
def test_the_share_that_waits_has_so_much_less_time(metric: Metric) -> None:
    none, some = attainment(None), attainment(constant(0.25, 2.0))
    for limit in (1.0, 2.5, 3.0, 4.0, 8.0):
        late = none.misses(metric, limit - 2.0, 0.4)[0] if limit > 2 else 1.0
        by_hand = 0.75 * none.misses(metric, limit, 0.4)[0] + 0.25 * late
        assert some.misses(metric, limit, 0.4)[0] == pytest.approx(by_hand, abs=0.01)


@pytest.mark.parametrize("load_s", [0.01, 0.1, 0.5, 2.0, 20.0])
@pytest.mark.parametrize("rate", [0.05, 0.4])
@pytest.mark.parametrize("metric", ["ttft", "e2e"])
def test_percentiles_are_those_of_sums_of_both_times(metric: Metric, load_s: float, rate: float) -> None:
    """Each time without a load is added to each wait for one, by 1,000 quantiles of both laws."""
    loads = VariantLoad(64, 1.0).load_waits(8, 8, load_s)
    assert loads is not None
    some, even, limits_s = attainment(loads), (np.arange(1_000) + 0.5) / 1_000, np.geomspace(0.1, 500, 20_000)
    wait = some.load_wait(rate)
    assert wait is not None
    share, waits_s = wait.share[0], np.array([wait.quantile_s(one)[0] for one in even])
    own_s = np.interp(even, 1 - attainment(*[None] * len(limits_s)).misses(metric, limits_s, rate), limits_s)
    sums_s = np.sort((own_s[:, None] + waits_s).ravel())
    for percentile in (50, 95, 99):
        found_s = some.quantile(metric, percentile, rate)[0]
        below, above = (
            (1 - share) * (own_s <= of * found_s).mean()
            + share * np.searchsorted(sums_s, of * found_s) / len(sums_s)
            for of in (0.96, 1.04)
        )
        assert below <= percentile / 100 <= above


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(0.01, 1.0), limit=st.floats(0.3, 20), spread=st.sampled_from([0.0, 0.2]))
def test_loads_make_no_token_later_than_the_first(rate: float, limit: float, spread: float) -> None:
    """TPOT is as without loads to the bit; TTFT and E2E are late no less often."""
    none, some = attainment(None, VariantLoad(64, 1.0).load_waits(8, 8, 1.5), spread=spread).misses(
        "tpot", limit, rate
    )
    assert none == some
    both = attainment(None, VariantLoad(64, 1.0).load_waits(8, 8, 1.5), spread=spread)
    for metric in ("ttft", "e2e"):
        none, some = both.misses(metric, limit, rate)
        assert some >= none - 1e-9


def test_a_forecast_says_what_is_waited_for() -> None:
    intent = Intent(rate_per_s=0.3, traffic=TRAFFIC)
    found = told_of(attainment(constant(0.1, 5.0)), 0, intent)
    assert found.load_wait is not None
    assert (found.load_wait.share, found.load_wait.mean_s) == pytest.approx((0.1, 5.0))
    assert told_of(attainment(None), 0, intent).load_wait is None
    assert told_of(attainment(None, constant(0.1, 5.0)), 0, intent).load_wait is None


def test_a_moving_rate_has_the_waits_of_its_levels() -> None:
    moving = Traffic(input_cv=0.0, relative_rates=(0.0, 2.0) * 20, window_s=600.0)
    loads = VariantLoad(64, 0.0).load_waits(8, 8, 1.0)
    assert loads is not None
    none, some = attainment(None, loads, traffic=moving).mean_e2e(0.2)
    levels = [
        (level.share, *load_wait_at(loads, 0.2 * level.relative_rate))
        for level in moving_rate(moving.relative_rates).levels
    ]
    assert some - none == pytest.approx(sum(of * share * mean_s for of, share, mean_s in levels), rel=1e-6)
