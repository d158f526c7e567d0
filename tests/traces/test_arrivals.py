"""Arrival processes: laws for every one, and each one's own figures against theory, by fixed seeds."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from traces.arrivals import ArrivalProcess, Diurnal, Drifting, Gamma, OnOff, Poisson, RateSeries, Seconds

PROCESSES: dict[str, ArrivalProcess] = {
    "poisson": Poisson(5.0),
    "regular": Gamma(5.0, cv=0.2),
    "bursty": Gamma(5.0, cv=8.0),
    "on-off": OnOff(20.0, on_s=3.0, off_s=9.0),
    "on-off, never silent": OnOff(20.0, on_s=3.0, off_s=9.0, off_rate_per_s=1.0, cv=2.0, rate_cv=0.5, off_cv=2.0),
    "drifting": Drifting(5.0, modulation_cv=0.5, correlation_s=30.0),
    "diurnal": Diurnal(5.0, amplitude=1.0, period_s=600.0),
    "series": RateSeries(2.5, (0.0, 9.0, 1e-3, 0.0, 4.0), repeats=True),
}
RATES = dict.fromkeys(PROCESSES, 5.0) | {"on-off, never silent": 5.75, "series": 13.001 / 5}
every_process = pytest.mark.parametrize("name", PROCESSES)


def times_until(process: ArrivalProcess, end_s: float, seed: int = 0) -> Seconds:
    found: list[Seconds] = []
    for times in process.arrivals(np.random.default_rng(seed)):
        found.append(times)
        if times[-1] >= end_s:
            break
    every = np.concatenate(found)
    return every[every < end_s]


def gaps_cv(times: Seconds) -> float:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean())


@every_process
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_times_ascend_from_0_and_follow_from_the_seed(name: str, seed: int) -> None:
    times = times_until(PROCESSES[name], 200.0, seed)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert np.isfinite(times).all()
    assert (times == times_until(PROCESSES[name], 200.0, seed)).all()
    assert times[0] != times_until(PROCESSES[name], 200.0, seed + 1)[0]


@every_process
def test_the_mean_rate_is_what_was_asked_for(name: str) -> None:
    """20,000 s: the slowest to settle (on-off with its rates) is within 5% of theory at four sigma."""
    assert len(times_until(PROCESSES[name], 20_000.0)) / 20_000 == pytest.approx(RATES[name], rel=0.05)


@pytest.mark.parametrize("cv", [0.25, 1.0, 3.0])
def test_gamma_gaps_have_the_cv_asked_for(cv: float) -> None:
    times = times_until(Gamma(10.0, cv), 20_000.0)
    assert gaps_cv(times) == pytest.approx(cv, rel=0.03)


def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov-Smirnov, 100,000 gaps: 1.63 / sqrt(n) is passed once in a hundred."""
    gaps = np.sort(np.diff(times_until(Poisson(5.0), 20_000.0)))
    cdf = 1 - np.exp(-5.0 * gaps)
    seen = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(cdf - seen).max() < 1.63 / math.sqrt(len(gaps))


def test_an_on_off_source_disperses_as_theory_says() -> None:
    """Rates r and 0, windows w: IoD = 1 + 2 s^2 T / m (1 - T/w (1 - e^(-w/T))).

    s^2 = p (1 - p) r^2 is the rate's variance, T = 1 / (1/on + 1/off) its correlation time, m = p r its mean: the
    rate's covariance s^2 e^(-t/T) integrated over the window twice, and 1 for Poisson arrivals.
    """
    on_s, off_s, rate, window_s = 3.0, 9.0, 20.0, 10.0
    share, correlation_s = on_s / (on_s + off_s), 1 / (1 / on_s + 1 / off_s)
    decay = 1 - correlation_s / window_s * (1 - math.exp(-window_s / correlation_s))
    iod = 1 + 2 * share * (1 - share) * rate**2 * correlation_s / (share * rate) * decay
    counts = np.bincount((times_until(OnOff(rate, on_s, off_s), 200_000.0) // window_s).astype(int))
    assert counts.var() / counts.mean() == pytest.approx(iod, rel=0.05)


def test_silence_is_silent_and_bursts_have_their_rate() -> None:
    """Gaps past 2 s are silences: at 20 a second a burst has one in e^40. Exponential, so off_s + 2 on average."""
    gaps = np.diff(times_until(OnOff(20.0, on_s=3.0, off_s=9.0), 100_000.0))
    assert gaps[gaps > 2].mean() == pytest.approx(11.0, rel=0.05)
    assert 1 / gaps[gaps < 0.5].mean() == pytest.approx(20.0, rel=0.05)


def test_an_on_off_source_begins_on_as_often_as_it_is_on() -> None:
    """A quarter of 400 seeds, within four sigma: at 100 a second one that is on shows it in the first 0.1 s."""
    source = OnOff(100.0, on_s=30.0, off_s=90.0)
    began_on = sum(float(next(source.arrivals(np.random.default_rng(seed)))[0]) < 0.1 for seed in range(400))
    assert abs(began_on - 100) < 4 * math.sqrt(75)


def test_a_drifting_rate_has_its_modulation() -> None:
    """Counts per minute have variance = mean + (mean * cv)^2 while a minute is short next to the correlation."""
    counts = np.bincount((times_until(Drifting(10.0, 0.3, 3000.0), 600_000.0) // 60).astype(int))
    assert math.sqrt(counts.var() - counts.mean()) / counts.mean() == pytest.approx(0.3, rel=0.12)


def test_a_day_is_lowest_at_its_start_and_highest_after_half() -> None:
    """Quarters of a period: the sine's means are 1 -+ 0.8 * 2 / pi around the trough and the crest."""
    times = times_until(Diurnal(5.0, amplitude=0.8, period_s=800.0), 80_000.0)
    phase = (times % 800.0) / 800.0
    trough = ((phase < 0.125) | (phase >= 0.875)).mean() * 4
    crest = ((phase >= 0.375) & (phase < 0.625)).mean() * 4
    swing = 0.8 * 4 / math.pi * math.sin(math.pi / 4)
    assert trough == pytest.approx(1 - swing, abs=0.02)
    assert crest == pytest.approx(1 + swing, abs=0.02)
    assert sum(Diurnal(5.0, 0.8).series.rates_per_s) / 288 == pytest.approx(5.0)


@given(
    rates=st.lists(st.floats(0, 50), min_size=1, max_size=6).filter(lambda r: sum(r) > 1), seed=st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_a_series_keeps_to_its_slots_and_ends(rates: list[float], seed: int) -> None:
    series = RateSeries(10.0, tuple(rates))
    chunks = list(series.arrivals(np.random.default_rng(seed)))
    times = np.concatenate(chunks) if chunks else np.empty(0)
    assert ((times >= 0) & (times <= 10.0 * len(rates))).all()
    counts, _ = np.histogram(times, bins=[10.0 * index for index in range(len(rates) + 1)])
    for rate, count in zip(rates, counts, strict=True):
        assert abs(count - 10 * rate) <= 6 + 6 * math.sqrt(10 * rate)  # over six sigma of a Poisson count


def test_regular_gaps_stay_regular_through_a_changing_clock() -> None:
    """Gaps of cv 0.01 at rate 1, then 10: each is as long as its slot says."""
    times = np.concatenate(list(RateSeries(100.0, (1.0, 10.0), cv=0.01).arrivals(np.random.default_rng(0))))
    first, second = np.diff(times[times < 100]), np.diff(times[times > 100])
    assert first == pytest.approx(np.ones(len(first)), rel=0.06)
    assert second == pytest.approx(np.full(len(second), 0.1), rel=0.06)


def test_chunks_do_not_overlap() -> None:
    for earlier, later in pairwise(RateSeries(5.0, (900.0, 0.0, 5000.0)).arrivals(np.random.default_rng(1))):
        assert earlier[-1] <= later[0]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Poisson(0), id="no-rate"),
        pytest.param(lambda: Poisson(math.nan), id="nan"),
        pytest.param(lambda: Gamma(1, -1), id="negative-cv"),
        pytest.param(lambda: Gamma(math.inf, 1), id="infinite-rate"),
        pytest.param(lambda: Gamma(1, 1e6), id="cv-beyond-floats"),
        pytest.param(lambda: OnOff(1, 0, 1), id="never-on"),
        pytest.param(lambda: OnOff(1, 1, 1, off_rate_per_s=-1), id="negative-off-rate"),
        pytest.param(lambda: Drifting(1, 0.1, 0), id="no-correlation-time"),
        pytest.param(lambda: Diurnal(1, 1.5), id="negative-trough"),
        pytest.param(lambda: Diurnal(1, 0.5, phase=math.nan), id="nan-phase"),
        pytest.param(lambda: RateSeries(60, ()), id="no-slots"),
        pytest.param(lambda: RateSeries(60, (0.0, 0.0)), id="all-silent"),
        pytest.param(lambda: RateSeries(60, (1.0, -1.0)), id="negative-slot"),
        pytest.param(lambda: RateSeries(0, (1.0,)), id="no-width"),
    ],
)
def test_what_no_process_can_have(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
