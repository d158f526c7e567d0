"""The stand-ins against the traces that they imitate, and a trace by what a person types."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from fingerprint.errors import NotFoundError
from tests.golden_words import Golden
from tests.traces.fit_distance import fit_distance
from traces.arrivals import OnOff
from traces.reading import open_trace
from traces.statistics import TraceStatistics, statistics_of
from traces.synthetic import STANDINS, standin
from traces.trace_argument import requests_of

SEEDS = range(16)


@pytest.fixture(scope="module")
def synthetic() -> dict[str, list[TraceStatistics]]:
    return {name: [statistics_of(standin(name).requests(seed=seed)) for seed in SEEDS] for name in STANDINS}


@pytest.mark.parametrize("name", STANDINS)
def test_a_stand_in_is_like_its_trace(
    name: str, synthetic: dict[str, list[TraceStatistics]], reference_traces: Path
) -> None:
    """Medians of seeds: rate within 5%, CV 10%, IoD at 1, 10 and 60 s 20%; lengths' p50 and p95 3%, mean 6%."""
    real = statistics_of(open_trace(reference_traces / f"{name.replace('-', '_llm_2023_')}.csv.gz"))
    made = synthetic[name]
    assert np.median([one.rate_per_s for one in made]) == pytest.approx(real.rate_per_s, rel=0.05)
    assert np.median([one.cv for one in made]) == pytest.approx(real.cv, rel=0.1)
    for index, bins in enumerate(real.bins):
        assert np.median([one.bins[index].iod for one in made]) == pytest.approx(bins.iod, rel=0.2)
    for side in ("input_tokens", "output_tokens"):
        for level in ("p50", "p95"):
            found = np.median([getattr(getattr(one, side), level) for one in made])
            assert found == pytest.approx(getattr(getattr(real, side), level), rel=0.03)
        assert np.median([getattr(one, side).mean for one in made]) == pytest.approx(
            getattr(real, side).mean, rel=0.06
        )


@pytest.mark.parametrize("name", STANDINS)
def test_its_lengths_are_the_traces(name: str, reference_traces: Path) -> None:
    path = reference_traces / f"{name.replace('-', '_llm_2023_')}.csv.gz"
    distance = fit_distance(standin(name).lengths, open_trace(path))
    assert max(distance.input_ks, distance.output_ks) < 0.04


def test_codes_parameters_are_measured_as_stated(reference_traces: Path) -> None:
    times = np.array([r.arrival_s for r in open_trace(reference_traces / "azure_llm_2023_code.csv.gz")])
    gaps = np.diff(times)
    cuts = np.flatnonzero(gaps > 3)
    starts, ends = np.r_[0, cuts + 1], np.r_[cuts, len(times) - 1]
    lasted, counts = times[ends] - times[starts], ends - starts + 1
    rates = counts[counts > 20] / lasted[counts > 20]
    within, silences = gaps[gaps <= 3], gaps[cuts]
    source = STANDINS["azure-code"].arrivals
    assert isinstance(source, OnOff)
    assert source.on_s == pytest.approx(lasted.mean(), rel=1e-3)
    assert source.off_s == pytest.approx(silences.mean(), rel=1e-3)
    assert source.off_cv == pytest.approx(silences.std() / silences.mean(), rel=1e-3)
    assert source.rate_per_s == pytest.approx(len(times) / lasted.sum(), rel=1e-3)
    assert source.cv == pytest.approx(within.std() / within.mean(), rel=1e-3)
    assert source.rate_cv == pytest.approx(rates.std() / rates.mean(), rel=1e-3)


def test_code_comes_in_bursts_and_conv_does_not(synthetic: dict[str, list[TraceStatistics]]) -> None:
    """Recorded of the real ones: over half of code's 10-second bins are empty, none of conv's."""
    for code, conv in zip(synthetic["azure-code"], synthetic["azure-conv"], strict=True):
        assert code.bins[1].empty_fraction is not None
        assert 0.4 < code.bins[1].empty_fraction < 0.75
        assert conv.bins[1].empty_fraction is not None
        assert conv.bins[1].empty_fraction < 0.01


def test_a_stand_in_by_name(golden: Golden) -> None:
    stream = list(standin("azure-conv").requests(seed=3, duration_s=60.0))
    assert stream == list(standin("azure-conv").requests(seed=3, duration_s=60.0))
    assert stream != list(standin("azure-conv").requests(seed=4, duration_s=60.0))
    assert stream == list(islice(requests_of("synthetic:azure-conv", seed=3), len(stream)))
    with golden.raises("traces", NotFoundError):
        requests_of("synthetic:azure")


def test_a_file_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,1,2\n")
    assert [request.output_tokens for request in requests_of(str(path))] == [2]
    with pytest.raises(NotFoundError):
        requests_of(str(tmp_path / "none.csv"))
