"""The paper's compression: another rate, the same pattern."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from traces.arrivals import Poisson
from traces.generate import generate
from traces.lengths import FixedLengths
from traces.rate_scaling import compress
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
def test_requests_stay_in_their_interval_whole_and_in_order(
    stream: list[Request], rate_factor: float, interval_s: float, aggregate: int, seed: int
) -> None:
    kept = list(compress(stream, rate_factor=rate_factor, interval_s=interval_s, aggregate=aggregate, seed=seed))
    assert [r.arrival_s for r in kept] == sorted(r.arrival_s for r in kept)
    inputs = [request.input_tokens for request in kept]
    assert inputs == sorted(set(inputs))
    for request in kept:
        was = stream[request.input_tokens - 1]
        index = was.arrival_s // (interval_s * aggregate)
        assert index * interval_s <= request.arrival_s <= (index + 1) * interval_s
    if rate_factor == 1:
        assert len(kept) == len(stream)


def test_a_small_trace_by_hand() -> None:
    """Counts per second 2, 0, 1, 1, 4, 0; of pairs of seconds 2, 2, 4, in the seconds 0, 1 and 2."""
    times = [0.1, 0.9, 2.5, 3.5, 4.0, 4.1, 4.2, 4.3]
    stream = [Request(t, index, 1) for index, t in enumerate(times)]
    all_of_it = compress(stream, rate_factor=1.0, interval_s=1.0, aggregate=2, seed=0)
    assert [(int(r.arrival_s), r.input_tokens) for r in all_of_it] == [
        *[(0, 0), (0, 1), (1, 2), (1, 3)],
        *[(2, 4), (2, 5), (2, 6), (2, 7)],
    ]
    half = list(compress(stream, rate_factor=0.5, interval_s=1.0, aggregate=2, seed=0))
    assert half == list(compress(stream, rate_factor=0.5, interval_s=1.0, aggregate=2, seed=0))
    assert half != list(compress(stream, rate_factor=0.5, interval_s=1.0, aggregate=2, seed=1))


def test_a_part_of_poisson_arrivals_is_poisson() -> None:
    """Rounding to whole requests would break this: one in ten, spaced almost evenly (CV 0.5)."""
    poisson = generate(Poisson(10.0), FixedLengths(1, 1), seed=0, duration_s=20_000.0)
    kept = list(compress(poisson, rate_factor=0.1, interval_s=1.0, aggregate=1, seed=1))
    places, _ = np.histogram([request.arrival_s % 1 for request in kept], bins=10, range=(0, 1))
    assert np.abs(places - len(kept) / 10).max() < 4 * math.sqrt(len(kept) / 10)  # evenly in the interval
    found = statistics_of(kept)
    assert found.rate_per_s == pytest.approx(1.0, rel=0.03)
    assert found.cv == pytest.approx(1.0, rel=0.03)
    assert [one.iod for one in found.bins] == pytest.approx([1.0, 1.0, 1.0], rel=0.15)


@pytest.mark.parametrize("aggregate", [1, 3])
@pytest.mark.parametrize("rate_factor", [0.1, 0.4])
@pytest.mark.parametrize("name", ["azure_llm_2023_conv", "azure_llm_2023_code"])
def test_real_traces_keep_their_pattern(
    name: str, rate_factor: float, aggregate: int, reference_traces: Path
) -> None:
    """k minutes of the original are one of the result, with f times their requests, within five sigma."""
    original = list(open_trace(reference_traces / f"{name}.csv.gz"))
    kept = list(compress(original, rate_factor=rate_factor, interval_s=1.0, aggregate=aggregate, seed=0))
    before = np.bincount([int(r.arrival_s // (60 * aggregate)) for r in original], minlength=59)
    after = np.bincount([int(r.arrival_s // 60) for r in kept], minlength=59)
    spread = np.sqrt(before * rate_factor * (1 - rate_factor))
    assert (np.abs(after - rate_factor * before) <= 5 * spread).all()
    assert abs(len(kept) - rate_factor * len(original)) < 5 * math.sqrt(len(original) * 0.25)


def test_burstiness_is_kept(reference_traces: Path) -> None:
    """IoD above Poisson's 1 scales with the rate; conv's gaps stay near Poisson's (docs/decisions/0013)."""
    conv, code = (reference_traces / f"azure_llm_2023_{name}.csv.gz" for name in ("conv", "code"))
    before = statistics_of(open_trace(code))
    after = statistics_of(compress(open_trace(code), rate_factor=0.4, interval_s=1.0, aggregate=1, seed=0))
    for then, now in zip(before.bins[1:], after.bins[1:], strict=True):
        assert then.iod is not None
        assert now.iod == pytest.approx(1 + 0.4 * (then.iod - 1), rel=0.1)
    steady = statistics_of(compress(open_trace(conv), rate_factor=0.1, interval_s=1.0, aggregate=1, seed=0))
    assert steady.cv == pytest.approx(1.06, abs=0.05)


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
