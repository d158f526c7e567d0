"""Written traces: csv keeps everything, what a format cannot hold is refused, a failure leaves nothing."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import BadInputError
from tests.golden_words import Golden
from tests.traces.format_conformance import BLOCKS, MODELS, streams
from traces.reading import open_trace
from traces.request import Request
from traces.writing import write_trace


@settings(deadline=None)
@given(requests=streams(models=MODELS, blocks=BLOCKS), suffix=st.sampled_from([".csv", ".csv.gz"]))
def test_csv_keeps_everything(
    requests: list[Request], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("csv") / f"trace{suffix}"
    assert write_trace(path, requests) == len(requests)
    assert list(open_trace(path)) == requests


def test_a_published_trace_is_the_same_in_both_formats(reference_traces: Path, tmp_path: Path) -> None:
    """The README's seven decimals are Azure's 100 ns steps: nothing is lost either way."""
    original = list(open_trace(reference_traces / "azure_llm_2023_code.csv.gz"))
    write_trace(tmp_path / "azure.csv", original, "azure")
    assert list(open_trace(tmp_path / "azure.csv", strict=True)) == original


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        pytest.param("azure", Request(0, 1, 1, "m"), id="azure-model"),
        pytest.param("csv", Request(0, 1, 1, "a\nb"), id="csv-model-with-a-line-end"),
        pytest.param("burstgpt", Request(0, 1, 1, "a\0"), id="burstgpt-nul"),
        pytest.param("azure", Request(0, 1, 1, "", (1,)), id="azure-blocks"),
        pytest.param("mooncake", Request(0, 1, 1, "m"), id="mooncake-model"),
        pytest.param("burstgpt", Request(0, 1, 1), id="burstgpt-no-model"),
        pytest.param("burstgpt", Request(0, 1, 1, "m", (1,)), id="burstgpt-blocks"),
        pytest.param("csv", Request(0, 1, 1, "", (10**6,) * 20_000), id="too-long"),
        pytest.param("servegen", Request(0, 1, 1), id="servegen"),
        pytest.param("parquet", Request(0, 1, 1), id="unknown"),
    ],
)
def test_what_cannot_be_said_is_refused_and_the_old_file_stays(
    name: str, request_: Request, tmp_path: Path, golden: Golden
) -> None:
    path = tmp_path / "trace"
    path.write_text("as it was")
    with golden.raises("traces", BadInputError):
        write_trace(path, [request_], name)
    golden("traces", [file.read_text() for file in tmp_path.iterdir()])


def test_a_stream_that_fails_half_way_leaves_nothing(tmp_path: Path, golden: Golden) -> None:
    def failing() -> Iterator[Request]:
        yield Request(0.0, 1, 1)
        raise BadInputError("the source broke")

    with golden.raises("traces", BadInputError):
        write_trace(tmp_path / "trace.csv.gz", failing())
    assert not list(tmp_path.iterdir())
    with golden.raises("traces", BadInputError):
        write_trace(tmp_path / "no" / "folder.csv", [])


def test_an_empty_stream_makes_no_file(tmp_path: Path, golden: Golden) -> None:
    with golden.raises("traces", BadInputError):
        write_trace(tmp_path / "trace.csv", [])
    assert not list(tmp_path.iterdir())


def test_equal_traces_make_equal_files(tmp_path: Path) -> None:
    for name in ("a.csv.gz", "b.csv.gz"):
        write_trace(tmp_path / name, [Request(0.5, 1, 2)])
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()
    text = gzip.decompress((tmp_path / "a.csv.gz").read_bytes()).decode()
    assert text == "arrival_s,input_tokens,output_tokens,model,prefix_block_ids\n0.5,1,2,,\n"
