"""Trace files: every bad file as one line that names the file and the line, and what all formats share."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import BadInputError, NotFoundError
from tests.golden_words import Golden
from tests.traces.format_conformance import read_or_refused, write
from traces.reading import open_trace
from traces.request import Request
from traces.text_reader import MAX_BLANK_LINES, MAX_LINE_BYTES

CSV = "arrival_s,input_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_2 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("\n\n", id="blank"),
        pytest.param(CSV, id="header-only"),
        pytest.param("a,b,c\n1,2,3\n", id="unknown-header"),
        pytest.param("input_tokens,output_tokens\n1,2\n", id="lengths-only"),
        pytest.param("arrival_s,arrival_s,input_tokens,output_tokens\n", id="twice"),
        pytest.param(CSV + "0,1\n", id="short-row"),
        pytest.param(CSV + "0,1,1\n0,1,1,1\n", id="long-row"),
        pytest.param(CSV + "0,-1,1\n", id="negative-input"),
        pytest.param(CSV + "0,1,-5\n", id="negative-output"),
        pytest.param(CSV + "0,1,1.5\n", id="fraction"),
        pytest.param(CSV + "0,x,1\n", id="word"),
        pytest.param(CSV + "0,,1\n", id="missing"),
        pytest.param(CSV + "0,99999999999,1\n", id="too-many"),
        pytest.param(CSV + "0," + "9" * 5000 + ",1\n", id="very-many-digits"),
        pytest.param(CSV + "0,0,1\n", id="no-input"),
        pytest.param(CSV + "0,1,0\n", id="no-output"),
        pytest.param(CSV + "nan,1,1\n", id="nan"),
        pytest.param(CSV + "inf,1,1\n", id="infinite"),
        pytest.param(CSV + "-1,1,1\n", id="before-start"),
        pytest.param(CSV + "2,1,1\n1,1,1\n", id="unsorted"),
        pytest.param(CSV + '0,"1,1\n', id="open-quote"),
        pytest.param(CSV.encode() + b"0,1,1\n1,\xff,1\n", id="not-utf8"),
        pytest.param(CSV.encode() + b"0,1,1\x00\n", id="nul"),
        pytest.param(CSV + "0,1,1\n" + "1" * (MAX_LINE_BYTES + 1), id="long-line"),
        pytest.param("\n" * (MAX_BLANK_LINES + 1) + CSV, id="blank-start"),
        pytest.param(CSV + "0,1,1\n" + "\r\n" * 2 * MAX_BLANK_LINES, id="blank-end"),
        pytest.param("x" * 10 * MAX_LINE_BYTES, id="one-long-line"),
        pytest.param(AZURE + "yesterday,1,1\n", id="azure-no-time"),
        pytest.param(AZURE + "2023-13-16 18:15:46.1,1,1\n", id="azure-no-month"),
        pytest.param(AZURE + "2023-11-16 18:15:99.1,1,1\n", id="azure-no-second"),
        pytest.param(AZURE + "2023-11-16 18:15:46.2,1,1\n2023-11-16 18:15:46.1,1,1\n", id="azure-unsorted"),
        pytest.param('{"input_length": 1, "output_length": 1}\n', id="mooncake-no-time"),
        pytest.param('{"timestamp": 0, "input_length": "1", "output_length": 1}\n', id="mooncake-text"),
        pytest.param('{"timestamp": 0, "input_length": true, "output_length": 1}\n', id="bool"),
        pytest.param('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', id="mooncake-nan"),
        pytest.param('{"input_length": 1,\n', id="mooncake-cut"),
        pytest.param('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[1]\n', id="json-list"),
        pytest.param('{"timestamp": 0, "input_length": 1, "output_length": 1}\n' + "[" * 100_000, id="json-deep"),
        pytest.param('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0.5]}\n', id="blocks"),
        pytest.param(BURST + "5,m,-1,1,0,API log\n", id="burstgpt-negative"),
        pytest.param(BURST + "5,m,1,1,2,API log\n4,m,1,1,2,API log\n", id="burst-unsorted"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(content: str | bytes, tmp_path: Path, golden: Golden) -> None:
    path = write(tmp_path, content)
    with pytest.raises(BadInputError) as caught:
        list(open_trace(path))
    golden("traces", str(caught.value))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_gzip_names_the_last_line_it_gave(tmp_path: Path, golden: Golden) -> None:
    rows = "".join(f"{second},{second * 7919 % 1000 + 1},1\n" for second in range(50_000))
    whole = gzip.compress((CSV + rows).encode())
    path = write(tmp_path, whole[: len(whole) // 2])
    with pytest.raises(BadInputError) as caught:
        list(open_trace(path))
    number = re.search(r"line (\d{4,}):", str(caught.value))[1]  # as far as its compression has been read
    golden("traces", str(caught.value).replace(number, "NUMBER"))


def test_a_gzip_that_ends_in_its_first_line_says_so(tmp_path: Path, golden: Golden) -> None:
    path = write(tmp_path, gzip.compress((CSV + "0,1,1\n").encode())[:30])
    with golden.raises("traces", BadInputError):
        open_trace(path)


def test_a_gzip_with_a_flipped_byte_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress((CSV + "0,1,1\n" * 1000).encode()))
    data[-6] ^= 1  # in the checksum
    with pytest.raises(BadInputError, match="damaged"):
        list(open_trace(write(tmp_path, bytes(data))))


def test_no_file_a_folder_and_an_unknown_format(tmp_path: Path, golden: Golden) -> None:
    with golden.raises("traces", NotFoundError):
        open_trace(tmp_path / "nothing.csv")
    with golden.raises("traces", BadInputError):
        open_trace(tmp_path)
    with golden.raises("traces", BadInputError):
        open_trace(write(tmp_path, CSV), "parquet")
    with golden.raises("traces", BadInputError):
        list(open_trace(write(tmp_path, CSV + "0,1,1\n"), "azure"))


def test_json_lines_with_further_keys_are_mooncakes_only_by_name(tmp_path: Path, golden: Golden) -> None:
    """Qwen-Bailian's lines have the same keys with seconds and blocks of 16 tokens, and keys of their own."""
    row = '{"timestamp": 2, "input_length": 8, "output_length": 3, "hash_ids": [1], "a_key_of_its_own": 7}\n'
    path = write(tmp_path, row)
    with golden.raises("traces", BadInputError):
        open_trace(path)
    assert list(open_trace(path, "mooncake")) == [Request(0.002, 8, 3, "", (1,))]


def test_requests_at_one_time_are_read_unless_strict(tmp_path: Path, golden: Golden) -> None:
    path = write(tmp_path, CSV + "0,1,1\n3,1,1\n3,1,1\n")
    assert [request.arrival_s for request in open_trace(path)] == [0, 3, 3]
    with golden.raises("traces", BadInputError):
        list(open_trace(path, strict=True))


def test_what_no_tokens_mean_is_the_formats_or_the_callers_to_say(tmp_path: Path, golden: Golden) -> None:
    path = write(tmp_path, BURST + "5,m,10,0,10,API log\n6,m,10,1,11,API log\n")
    opened = open_trace(path)
    assert [request.output_tokens for request in opened] == [1]
    assert (opened.rows, opened.skipped) == (2, 1)
    assert [request.output_tokens for request in open_trace(path, zero_lengths="keep")] == [0, 1]
    with golden.raises("traces", BadInputError):
        list(open_trace(path, zero_lengths="refuse"))
    plain = write(tmp_path, CSV + "0,0,3\n1,2,3\n")
    assert list(open_trace(plain, zero_lengths="skip")) == [Request(1.0, 2, 3)]


def test_closing_lets_go_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, CSV + "0,1,1\n1,1,1\n")
    with open_trace(path) as opened:
        assert next(opened) == Request(0.0, 1, 1)
    assert next(opened, None) is None


@settings(max_examples=200, deadline=None)
@given(
    header=st.sampled_from([CSV, AZURE, BURST, BURST_2, '{"input_length": 1}\n', ""]),
    body=st.one_of(
        st.binary(max_size=300), st.text(alphabet='0123456789,.-:"{} \n', max_size=300).map(str.encode)
    ),
    zipped=st.booleans(),
)
def test_no_bytes_make_a_traceback(
    header: str, body: bytes, zipped: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = header.encode() + body
    read_or_refused(write(tmp_path_factory.mktemp("fuzz"), gzip.compress(data) if zipped else data))


def _rows(count: int) -> Iterator[str]:
    yield CSV
    for row in range(count):
        yield f"{row * 0.0359:.7f},{row % 900 + 1},{row % 300 + 1}\n"


def _peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_trace(path)) > 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    short, long = tmp_path / "short.csv", tmp_path / "long.csv"
    for path, count in ((short, 10_000), (long, 50_000)):
        with path.open("w") as file:
            file.writelines(_rows(count))
    _peak_bytes(short)  # imports and caches
    assert _peak_bytes(long) < 1.1 * _peak_bytes(short) < 4 * 2**20


@pytest.mark.long
def test_28_million_rows_in_constant_memory(tmp_path: Path) -> None:
    """The size of Azure's week of 2024. The reader's process is measured, its statistics too."""
    path = tmp_path / "week.csv"
    program = (
        "import re, sys; from traces.reading import open_trace; from traces.statistics import statistics_of; "
        "print(statistics_of(open_trace(sys.argv[1])).requests); "
        r"print(re.search(r'VmHWM:\s*(\d+) kB', open('/proc/self/status').read())[1])"
    )
    peaks_kib = []
    for count in (100_000, 28_000_000):
        with path.open("w") as file:
            file.writelines(_rows(count))
        done = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
        )
        requests, peak_kib = map(int, done.stdout.split())
        assert requests == count
        peaks_kib.append(peak_kib)
    assert peaks_kib[1] - peaks_kib[0] < 16 * 1024
