"""Generated streams: one seed, one stream; each law has random numbers of its own; memory stays."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from traces.arrivals import ArrivalProcess, Diurnal, Drifting, Gamma, OnOff, Poisson, RateSeries
from traces.generate import generate
from traces.lengths import EmpiricalLengths, FixedLengths, LognormalLengths
from traces.popularity import Distinct, Identical, Zipf
from traces.reading import open_trace
from traces.request import Request

PAGE = Path(__file__).parents[2] / "docs/traces.md"
LENGTHS = LognormalLengths(6.0, 1.0, 4.0, 0.8)
PROCESSES = st.sampled_from(
    [
        Poisson(3.0),
        Gamma(50.0, 5.0),
        OnOff(30.0, 2.0, 5.0),
        Drifting(4.0, 0.4, 60.0),
        Diurnal(4.0, 1.0, 100.0),
        RateSeries(7.0, (3.0, 0.0, 9.0)),
    ]
)


@settings(max_examples=30, deadline=None)
@given(process=PROCESSES, seed=st.integers(0, 2**32), duration_s=st.floats(1, 300))
def test_streams_ascend_end_and_repeat(process: ArrivalProcess, seed: int, duration_s: float) -> None:
    def stream(until_s: float) -> list[Request]:
        return list(generate(process, LENGTHS, seed=seed, duration_s=until_s, models="abc", popularity=Zipf()))

    requests = stream(duration_s)
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert all(0 <= time < duration_s for time in times)
    assert all(request.input_tokens >= 1 and request.output_tokens >= 1 for request in requests)
    assert requests == stream(duration_s)
    assert requests == stream(2 * duration_s)[: len(requests)]  # a longer trace only goes on


@settings(max_examples=30, deadline=None)
@given(process=PROCESSES, seed=st.integers(0, 2**32), count=st.integers(1, 60))
def test_a_number_of_requests_is_the_beginning_of_the_stream(
    process: ArrivalProcess, seed: int, count: int
) -> None:
    counted = list(generate(process, LENGTHS, seed=seed, num_requests=count, duration_s=50.0))
    assert counted == list(islice(generate(process, LENGTHS, seed=seed, duration_s=50.0), count))


def test_one_law_changed_leaves_what_the_others_give() -> None:
    def stream(lengths: object, popularity: object) -> list[Request]:
        return list(
            generate(Poisson(9.0), lengths, seed=4, duration_s=60.0, models="abc", popularity=popularity)  # type: ignore[arg-type]
        )

    base, fixed, one = stream(LENGTHS, Zipf()), stream(FixedLengths(1, 1), Zipf()), stream(LENGTHS, Identical())
    assert [(r.arrival_s, r.model) for r in base] == [(r.arrival_s, r.model) for r in fixed]
    assert [(r.arrival_s, r.input_tokens) for r in base] == [(r.arrival_s, r.input_tokens) for r in one]


def test_the_laws_share_no_random_numbers() -> None:
    """Two lengths and two models, each drawn by a coin: from one generator they would be the same coin."""
    lengths = EmpiricalLengths(np.array([1, 2]), np.array([1, 1]))
    pairs = Counter(
        (request.input_tokens, request.model)
        for request in generate(Poisson(9.0), lengths, seed=2, num_requests=8000, models="ab")
    )
    assert [pairs[length, model] / 8000 for length in (1, 2) for model in "ab"] == pytest.approx(
        [0.25] * 4, abs=0.02
    )


def test_models_follow_their_law_across_chunks() -> None:
    names = [f"m{index}" for index in range(7)]
    requests = generate(
        OnOff(30.0, 1.0, 1.0), LENGTHS, seed=0, num_requests=700, models=names, popularity=Distinct()
    )
    assert [request.model for request in requests] == names * 100


def test_memory_does_not_grow_with_the_stream() -> None:
    tracemalloc.start()
    try:
        for _ in generate(Poisson(100.0), LENGTHS, seed=0, num_requests=100_000):
            pass
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_uniform_is_the_popularity_that_is_meant() -> None:
    drawn = Counter(r.model for r in generate(Poisson(9.0), LENGTHS, seed=1, num_requests=8000, models=("a", "b")))
    assert drawn["a"] / 8000 == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param({}, id="endless"),
        pytest.param({"duration_s": 0.0}, id="no-time"),
        pytest.param({"duration_s": math.nan}, id="nan"),
        pytest.param({"num_requests": 0}, id="no-requests"),
        pytest.param({"num_requests": 1, "seed": -1}, id="negative-seed"),
    ],
)
def test_what_cannot_be_generated(bounds: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        generate(Poisson(1.0), LENGTHS, **{"seed": 0, **bounds})  # type: ignore[arg-type]


def test_the_example_of_the_docs_runs_and_makes_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models, the first with 2^1.5 times the other's requests; of a sine's quarters the mean is 2/pi off."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    requests = list(open_trace(tmp_path / "day.csv.gz"))
    assert len(requests) == pytest.approx(0.5 * 86_400, rel=0.03)
    named = Counter(request.model for request in requests)
    assert named["llama"] / named["falcon"] == pytest.approx(2**1.5, rel=0.06)
    quarters = Counter(int(request.arrival_s // 21_600) for request in requests)
    assert quarters[1] / quarters[0] == pytest.approx((1 + 1.6 / math.pi) / (1 - 1.6 / math.pi), rel=0.06)
