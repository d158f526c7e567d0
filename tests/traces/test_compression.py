"""The paper's compression: another rate, the same pattern."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from traces.compression import compress
from traces.reading import open_trace
from traces.request import Request
from traces.statistics import statistics_of

STREAMS = st.lists(st.floats(0, 1000), min_size=1, max_size=60).map(
    lambda times: [Request(t, index + 1, 1) for index, t in enumerate(sorted(times))]
)


@given(
    stream=STREAMS,
    rate_factor=st.floats(0.05, 1),
    interval_s=st.floats(0.1, 100),
    aggregate=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_counts_never_stray_by_a_whole_request(
    stream: list[Request], rate_factor: float, interval_s: float, aggregate: int, seed: int
) -> None:
    """Up to the end of every interval: f times what came in by then, less than one request short."""
    kept = list(compress(stream, rate_factor=rate_factor, interval_s=interval_s, aggregate=aggregate, seed=seed))
    assert [r.arrival_s for r in kept] == sorted(r.arrival_s for r in kept)
    for last in range(int(stream[-1].arrival_s // (interval_s * aggregate)) + 1):
        came = sum(int(r.arrival_s // (interval_s * aggregate)) <= last for r in stream)
        # A request placed on an interval's very end by rounding may belong to either side.
        stays = sum(r.arrival_s <= (last + 1) * interval_s for r in kept)
        assert -1e-6 <= rate_factor * came - stays < 1 + 1e-6
    # Who is kept is kept whole and in order.
    inputs = [request.input_tokens for request in kept]
    assert inputs == sorted(set(inputs))


def test_a_small_trace_by_hand() -> None:
    """Counts per second 2, 0, 1, 1, 4, 0; pairs 2, 2, 4; half of them 1, 1, 2; in the seconds 0, 1, 2."""
    times = [0.1, 0.9, 2.5, 3.5, 4.0, 4.1, 4.2, 4.3]
    stream = [Request(t, index, 1) for index, t in enumerate(times)]
    kept = list(compress(stream, rate_factor=0.5, interval_s=1.0, aggregate=2, seed=0))
    assert [int(request.arrival_s) for request in kept] == [0, 1, 2, 2]
    assert kept[0].input_tokens in (0, 1)
    assert kept[1].input_tokens in (2, 3)
    assert {request.input_tokens for request in kept[2:]} < {4, 5, 6, 7}
    assert kept == list(compress(stream, rate_factor=0.5, interval_s=1.0, aggregate=2, seed=0))
    assert kept != list(compress(stream, rate_factor=0.5, interval_s=1.0, aggregate=2, seed=1))


def test_what_rounding_takes_is_carried() -> None:
    """One request a second at a factor of 0.3: one every three or four seconds, not none."""
    stream = [Request(t + 0.5, 1, 1) for t in range(100)]
    kept = [int(r.arrival_s) for r in compress(stream, rate_factor=0.3, interval_s=1.0, aggregate=1, seed=0)]
    assert len(kept) == 30
    assert set(np.diff(kept)) == {3, 4}


@pytest.mark.parametrize("name", ["azure_llm_2023_conv", "azure_llm_2023_code"])
@pytest.mark.parametrize("rate_factor", [0.1, 0.4])
def test_real_traces_keep_their_pattern(name: str, rate_factor: float, reference_traces: Path) -> None:
    """The mean rate is f times what it was; every minute's count is f times its own within rounding."""
    original = list(open_trace(reference_traces / f"{name}.csv.gz"))
    kept = list(compress(original, rate_factor=rate_factor, interval_s=1.0, aggregate=1, seed=0))
    assert len(kept) == int(rate_factor * len(original))
    before, after = (
        np.bincount([int(request.arrival_s // 60) for request in requests], minlength=60)
        for requests in (original, kept)
    )
    assert np.abs(after - rate_factor * before).max() < 2


def test_burstiness_is_kept_where_thinning_would_lose_it(reference_traces: Path) -> None:
    """Counts scaled by f have f times the IoD; dropping requests one by one would add 1 - f, Poisson's own."""
    path = reference_traces / "azure_llm_2023_code.csv.gz"
    before = statistics_of(open_trace(path))
    after = statistics_of(compress(open_trace(path), rate_factor=0.4, interval_s=1.0, aggregate=1, seed=0))
    for then, now in zip(before.bins[1:], after.bins[1:], strict=True):
        assert then.iod is not None
        assert now.iod == pytest.approx(0.4 * then.iod, rel=0.03)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate_factor": 0.0},
        {"rate_factor": 1.1},
        {"rate_factor": math.nan},
        {"interval_s": 0.0},
        {"interval_s": math.inf},
        {"aggregate": 0},
    ],
    ids=str,
)
def test_what_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        compress([], **{"rate_factor": 0.4, "interval_s": 1.0, "aggregate": 1, "seed": 0, **wrong})  # type: ignore[arg-type]
