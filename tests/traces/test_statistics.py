"""Statistics against the published table, small traces worked out by hand, and laws."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import BadInputError
from traces.reading import open_trace
from traces.request import Request
from traces.statistics import TraceStatistics, statistics_of

# The README of the traces: rows; span, rate, CV; peaks and IoD at 1, 10, 60 s; mean, p50, p95, max of each.
PUBLISHED = {
    "azure_llm_2023_conv": (
        *(19_366, 3501.7, 5.530, 1.09),
        *((16, 9.8, 8.45), (1.4, 3.9, 16.1)),
        *((1154.7, 1020, 4083, 14_050), (211.1, 129, 451, 1000)),
    ),
    "azure_llm_2023_code": (
        *(8819, 3435.9, 2.566, 13.15),
        *((67, 32.7, 10.53), (13.2, 71.6, 164)),
        *((2047.8, 1469, 7302, 7437), (27.9, 13, 90, 1899)),
    ),
    "mooncake_synthetic": (
        *(3993, 1022.0, 3.906, 1.01),
        *((13, 5.5, 4.55), (1.1, 1.2, 1.2)),
        *((15_325.5, 11_587, 48_835, 191_378), (149.1, 69, 519, 893)),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_table(name: str, reference_traces: Path) -> None:
    rows, span_s, rate, cv, peaks, iods, inputs, outputs = PUBLISHED[name]
    found = statistics_of(open_trace(reference_traces / f"{name}.csv.gz"))
    assert found.requests == rows
    assert found.rate_per_s is not None
    assert found.cv is not None
    # Every figure exactly as it was rounded there.
    assert (round(found.span_s, 1), round(found.rate_per_s, 3), round(found.cv, 2)) == (span_s, rate, cv)
    assert [rounded_like(one.peak_per_s, seen) for one, seen in zip(found.bins, peaks, strict=True)] == list(peaks)
    assert [rounded_like(one.iod, seen) for one, seen in zip(found.bins, iods, strict=True)] == list(iods)
    for side, seen in ((found.input_tokens, inputs), (found.output_tokens, outputs)):
        assert (round(side.mean, 1), side.p50, side.p95, side.max) == seen


def rounded_like(value: float | None, shown: float) -> float:
    """To as many decimals as ``shown`` has."""
    assert value is not None
    _, _, decimals = str(shown).partition(".")
    return round(value, len(decimals))


def test_what_the_readme_says_in_words(reference_traces: Path) -> None:
    code = statistics_of(open_trace(reference_traces / "azure_llm_2023_code.csv.gz"))
    assert code.bins[1].empty_fraction == pytest.approx(0.56, abs=0.005)
    assert code.longest_gap_s == pytest.approx(217, abs=0.5)
    correlations = {"azure_llm_2023_conv": -0.11, "azure_llm_2023_code": 0.00, "mooncake_synthetic": -0.37}
    for name, correlation in correlations.items():
        found = statistics_of(open_trace(reference_traces / f"{name}.csv.gz"))
        assert found.correlation == pytest.approx(correlation, abs=0.005)
        assert found.same_times == (11 if name == "mooncake_synthetic" else 0)


def test_four_requests_by_hand() -> None:
    """Gaps 1, 1, 2: mean 4/3, deviation sqrt(2)/3. Full seconds hold 1, 1, 1, 0."""
    found = statistics_of(Request(5 + t, 10 * (t + 1), 5, "m") for t in (0, 1, 2, 4))
    assert (found.requests, found.span_s, found.rate_per_s, found.longest_gap_s) == (4, 4, 0.75, 2)
    assert found.cv == pytest.approx(math.sqrt(2) / 4)
    second, ten, _ = found.bins
    assert (second.peak_per_s, second.empty_fraction) == (1, 0.25)
    assert second.iod == pytest.approx(0.1875 / 0.75)
    assert (ten.peak_per_s, ten.iod, ten.empty_fraction) == (0.4, None, None)
    assert (found.input_tokens.mean, found.input_tokens.p50, found.input_tokens.max) == (27.5, 20, 50)
    assert found.correlation == 0
    assert found.models == (("m", 4),)


@pytest.mark.parametrize("times", [[3.0], [3.0, 3.0, 3.0]], ids=["one", "all-at-once"])
def test_no_time_passes(times: list[float]) -> None:
    found = statistics_of(Request(t, 1, 1) for t in times)
    assert (found.span_s, found.rate_per_s, found.cv) == (0, None, None)
    assert found.curve.rates_per_s == (len(times) / found.curve.slot_s,)


def test_nothing_has_no_statistics() -> None:
    with pytest.raises(BadInputError, match="without requests"):
        statistics_of([])


def reference(times: list[float]) -> tuple[float, list[float]]:
    """Gaps' CV and the three IoDs with everything in memory."""
    at = np.array(times) - times[0]
    gaps = np.diff(at)
    iods = []
    for width in (1, 10, 60):
        full = int(at[-1] // width)
        counts = np.bincount((at // width).astype(int), minlength=full)[:full]
        iods.append(counts.var() / counts.mean())
    return gaps.std() / gaps.mean(), iods


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([5000, 8192, 8193, 20_000]))
def test_one_pass_agrees_with_all_in_memory(seed: int, count: int) -> None:
    """Across the edges of blocks too."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.gamma(0.3, 0.3, count)).tolist()
    found = statistics_of(Request(t, 1, 1) for t in times)
    cv, iods = reference(times)
    assert found.cv == pytest.approx(cv, rel=1e-9)
    assert [one.iod for one in found.bins] == pytest.approx(iods, rel=1e-9)


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=50).map(sorted))
def test_the_curve_loses_no_request(times: list[float]) -> None:
    found: TraceStatistics = statistics_of(Request(t, 1, 1) for t in times)
    curve = found.curve
    assert sum(curve.rates_per_s) * curve.slot_s == pytest.approx(len(times))
    assert len(curve.rates_per_s) <= 512
    assert len(curve.rates_per_s) * curve.slot_s >= found.span_s
