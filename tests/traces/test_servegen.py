"""ServeGen's series and folder made into requests: they have the published rates and lengths."""

from __future__ import annotations

import json
import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fingerprint.errors import BadInputError, ConfigError
from tests.golden_words import Golden
from traces.arrivals import RateSeries
from traces.formats.servegen_folder import read_folder
from traces.formats.servegen_series import read_clients, read_length_windows, read_rate_series
from traces.lengths import FixedLengths
from traces.reading import open_trace
from traces.servegen import Client, ClientSlot, GapLaw, LengthWindow, client_requests, series_requests
from traces.statistics import statistics_of
from traces.transforms import clip

CLIENTS = (
    "client_id,rate_rps,cv_interarrival,pattern,shape,scale,"
    "in_mean,in_p50,in_p95,in_p99,out_mean,out_p50,out_p95,out_p99\n"
)
RATE = "t_s,rate_rps,active_clients,rate_weighted_client_cv,top_client_share\n"
LENGTHS = "window_start_s,field,window_mean_rate_rps,rate_coverage,mean,p1,p5,p10,p25,p50,p75,p90,p95,p99,p99.9\n"
LENGTH_ROW = "209.87,0.8,300,1,3,3,42,427,458,481,496,567,912\n"


def slot(start_s: float, rate_per_s: float, law: GapLaw = "Gamma", shape: float = 0.8) -> ClientSlot:
    return ClientSlot(start_s, 600.0, rate_per_s, law, shape, FixedLengths(5, 2))


@settings(max_examples=20, deadline=None)
@example(
    laws=[("Weibull", 0.002, 1.0), ("Gamma", 1e-4, 1.0)], seed=0
)  # gaps beyond what a float holds, either way
@given(
    laws=st.lists(
        st.tuples(st.sampled_from(["Gamma", "Weibull"]), st.floats(0.001, 5), st.floats(0, 3)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
def test_clients_merge_in_order_each_with_its_rate(laws: list[tuple[GapLaw, float, float]], seed: int) -> None:
    """However wild the gaps' law, a slot holds its rate's number of requests, rounded up or down by chance."""
    clients = [
        Client(str(index), (slot(0, rate, law, shape), slot(600, 2 * rate, law, shape)))
        for index, (law, shape, rate) in enumerate(laws)
    ]
    requests = list(client_requests(clients, seed=seed))
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert all(0 <= time <= 1200 for time in times)
    assert requests == list(client_requests(clients, seed=seed))
    expected = sum(600 * rate for _, _, rate in laws)
    assert abs(sum(time < 600 for time in times) - expected) <= len(laws) + 1
    assert abs(sum(time >= 600 for time in times) - 2 * expected) <= len(laws) + 1


def test_gaps_have_the_shape_of_their_law() -> None:
    """Gamma of shape k has cv 1/sqrt(k); Weibull of shape k has Gamma(1+2/k)/Gamma(1+1/k)^2 - 1, squared."""
    for law, shape in (("Gamma", 0.25), ("Weibull", 0.6)):
        client = Client("one", (slot(0, 100.0, law, shape),))  # type: ignore[arg-type]
        gaps = np.diff([request.arrival_s for request in client_requests([client], seed=0)])
        if law == "Gamma":
            cv = 1 / math.sqrt(shape)
        else:
            cv = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_a_slow_client_keeps_its_rate_by_chance() -> None:
    """A request in ten slots on average: 100 of 1,000 slots have one, within four sigma."""
    slots = tuple(slot(600.0 * index, 0.1 / 600) for index in range(1000))
    assert abs(sum(1 for _ in client_requests([Client("slow", slots)], seed=1)) - 100) < 4 * math.sqrt(90)


def test_impossible_clients(golden: Golden) -> None:
    with pytest.raises(ConfigError):
        slot(0, -1.0)
    with pytest.raises(ConfigError):
        slot(0, 1.0, "Gamma", 0.0)
    with golden.raises("traces", BadInputError):
        next(client_requests([Client("x", (slot(0, 1e9),))], seed=0))


@pytest.mark.parametrize(
    ("model", "clients", "slots", "mean_rate", "peak_rate"),
    [
        ("m-large", 50, 2016, 195.8, 583.0),
        ("m-mid", 67, 2016, 1790.1, 3444.8),
        ("m-small", 20, 2016, 1174.4, 3879.5),
    ],
)
def test_the_published_table(
    model: str, clients: int, slots: int, mean_rate: float, peak_rate: float, reference_traces: Path
) -> None:
    """The README's numbers; its mean rate leaves out the slots with rate 0, which are gaps in the source."""
    series = read_rate_series(reference_traces / f"servegen_{model}_rate.csv.gz")
    assert (series.slot_s, len(series.rates_per_s)) == (600, slots)
    assert round(max(series.rates_per_s), 1) == peak_rate
    assert sum(series.rates_per_s) / slots == pytest.approx(mean_rate, abs=0.06)
    peak = read_clients(reference_traces / f"servegen_{model}_clients_peak.csv.gz")
    assert len(peak) == clients
    assert sum(client.slots[0].rate_per_s for client in peak) == pytest.approx(peak_rate, rel=1e-3)
    windows = read_length_windows(reference_traces / f"servegen_{model}_lengths.csv.gz")
    assert [window.start_s for window in windows] == [21_600.0 * index for index in range(56)]


def test_requests_of_the_busiest_slot(reference_traces: Path) -> None:
    """The clients' rates add up to the slot's; the biggest one's requests have its own lengths."""
    path = reference_traces / "servegen_m-large_clients_peak.csv.gz"
    found = statistics_of(clip(open_trace(path), 0, 60))
    assert found.rate_per_s == pytest.approx(583.0, rel=0.05)
    biggest = read_clients(path)[0]
    own = statistics_of(client_requests([biggest], seed=0))
    assert own.rate_per_s == pytest.approx(465.448, rel=1e-3)
    assert own.cv == pytest.approx(1.1421, rel=0.02)
    assert own.input_tokens.mean == pytest.approx(713.07, rel=0.01)
    assert (own.input_tokens.p50, own.output_tokens.p99) == (pytest.approx(824, abs=2), pytest.approx(156, abs=2))


def test_requests_of_the_first_two_slots(reference_traces: Path) -> None:
    """The series' first two rates; lengths of the first window, medians 77 and 427.

    On one side of each median the quantiles are far apart: a thousandth of the requests is two tokens.
    """
    path = reference_traces / "servegen_m-large_rate.csv.gz"
    for first, rate in ((0, 212.78), (600, 179.698)):
        found = statistics_of(clip(open_trace(path), first, first + 200))
        assert found.rate_per_s == pytest.approx(rate, rel=0.02)
        assert found.input_tokens.p50 == pytest.approx(77, abs=20)
        assert found.output_tokens.p50 == pytest.approx(427, abs=20)


def test_lengths_change_with_the_window() -> None:
    windows = [LengthWindow(0.0, FixedLengths(1, 1)), LengthWindow(100.0, FixedLengths(2, 2))]
    requests = list(series_requests(RateSeries(50.0, (2.0, 2.0, 3.0, 0.0)), windows, seed=0))
    assert {(request.arrival_s >= 100, request.input_tokens) for request in requests} == {(False, 1), (True, 2)}
    assert max(request.arrival_s for request in requests) <= 150
    for wrong in ([], windows[1:], windows[::-1], [windows[0], LengthWindow(70.0, FixedLengths(1, 1))]):
        with pytest.raises(BadInputError, match="windows of lengths"):
            series_requests(RateSeries(50.0, (2.0, 2.0)), wrong, seed=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("x_rate.csv", RATE + "0,1,1,1,1\n", id="one-slot"),
        pytest.param("x_rate.csv", RATE + "0,1,1,1,1\n600,1,1,1,1\n700,1,1,1,1\n", id="uneven"),
        pytest.param("x_rate.csv", RATE + "0,-1,1,1,1\n", id="negative-rate"),
        pytest.param("x_rate.csv", RATE + "0,nan,1,1,1\n", id="nan-rate"),
        pytest.param("series.csv", RATE + "0,1,1,1,1\n", id="no-name-for-lengths"),
        pytest.param("x.csv", CLIENTS + "1,1,1,Pareto,1,1,1,1,1,1,1,1,1,1\n", id="law"),
        pytest.param("x.csv", CLIENTS + "1,1,1,Gamma,0,1,1,1,1,1,1,1,1,1\n", id="shape"),
        pytest.param("x.csv", CLIENTS + "1,1,1,Gamma,1,1,,,,,,,,\n", id="no-lengths"),
        pytest.param("x.csv", CLIENTS + "1,1,1,Gamma,1,1,5,9,8,9,1,1,1,1\n", id="quantiles"),
    ],
)
def test_bad_series(name: str, content: str, tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "x_lengths.csv").write_text(
        LENGTHS + "0,input_tokens," + LENGTH_ROW + "0,output_tokens," + LENGTH_ROW
    )
    (tmp_path / name).write_text(content)
    with golden.raises("traces", BadInputError):
        list(open_trace(tmp_path / name))


def test_bad_length_windows(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "x_rate.csv").write_text(RATE + "0,1,1,1,1\n600,1,1,1,1\n")
    with golden.raises("traces", BadInputError):
        list(open_trace(tmp_path / "x_rate.csv"))
    (tmp_path / "x_lengths.csv").write_text(LENGTHS + "0,input_tokens," + LENGTH_ROW)
    with golden.raises("traces", BadInputError):
        list(open_trace(tmp_path / "x_rate.csv"))
    (tmp_path / "x_lengths.csv").write_text(LENGTHS + "0,input_tokens," + LENGTH_ROW.replace("427", "4"))
    with golden.raises("traces", BadInputError):
        list(open_trace(tmp_path / "x_rate.csv"))


def write_client(folder: Path, number: int, trace: str, dataset: object) -> None:
    (folder / f"chunk-{number}-trace.csv").write_text(trace)
    if dataset is not None:
        (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(dataset))


def test_a_folder_as_published(tmp_path: Path) -> None:
    """An idle slot, lengths that change, a window without lengths, a client without any."""
    lengths = {
        "0": {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{3: 1.0}"},
        "600": {"input_tokens": "{}", "output_tokens": "{}"},
        "1200": {"input_tokens": "{30: 1.0}", "output_tokens": "{4: 2.5e-1, 5: 0.75}"},
    }
    write_client(tmp_path, 1, "0,2.0,1.0,Gamma,1.0,0.5\n600,0,0,,0,0\n1200,4.0,1.0,Weibull,1.0,0.25\n", lengths)
    write_client(tmp_path, 2, "0,1.0,1.0,Gamma,1.0,1.0\n600,1.0,1.0,Gamma,1.0,1.0\n1200,0,0,,0,0\n", None)
    first, second = read_folder(tmp_path)
    assert [(part.start_s, part.duration_s, part.rate_per_s) for part in first.slots] == [
        (0, 600, 2),
        (1200, 600, 4),
    ]
    requests = list(client_requests([first], seed=0))
    early = [request for request in requests if request.arrival_s < 600]
    late = [request for request in requests if request.arrival_s >= 1200]
    assert (len(early), len(late)) == (pytest.approx(1200, abs=1), pytest.approx(2400, abs=1))
    assert {request.input_tokens for request in early} == {10, 20}
    assert {request.output_tokens for request in late} == {4, 5}
    assert np.mean([request.output_tokens == 4 for request in late]) == pytest.approx(0.25, abs=0.04)
    # The second client's lengths are the first one's, by the rates of its two slots: 2 to 4.
    borrowed = [request.input_tokens for request in client_requests([second], seed=0)]
    assert np.mean([length == 30 for length in borrowed]) == pytest.approx(4 / 6, abs=0.05)
    opened = open_trace(tmp_path)
    assert opened.format.name == "servegen"
    assert len(list(islice(opened, 100))) == 100


@pytest.mark.parametrize(
    ("trace", "dataset"),
    [
        pytest.param("0,1,1,Gamma,1\n", {}, id="short-row"),
        pytest.param("0,x,1,Gamma,1,1\n", {}, id="rate"),
        pytest.param("600,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", {}, id="unsorted"),
        pytest.param("", {}, id="empty"),
        pytest.param("0,1,1,Gamma,1,1\n", [], id="list"),
        pytest.param("0,1,1,Gamma,1,1\n", {"0": {"input_tokens": "{1: 1}"}}, id="one-side"),
        pytest.param(
            "0,1,1,Gamma,1,1\n",
            {"0": {"input_tokens": "{1: 1, 'a': 2}", "output_tokens": "{1: 1}"}},
            id="histogram",
        ),
        pytest.param(
            "0,1,1,Gamma,1,1\n", {"0": {"input_tokens": "__import__('os')", "output_tokens": "{1: 1}"}}, id="code"
        ),
        pytest.param("0,1,1,Gamma,1,1\n", {}, id="no-lengths"),
    ],
)
def test_a_bad_folder(trace: str, dataset: object, tmp_path: Path, golden: Golden) -> None:
    write_client(tmp_path, 1, trace, dataset)
    with golden.raises("traces", BadInputError):
        list(open_trace(tmp_path))
