"""``iserve trace``: what is shown is what the statistics are, what is written is what was asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from iserve.cli import main
from iserve.cli.trace_text import sparkline
from tests.golden_words import Golden
from traces.reading import open_trace
from traces.statistics import RateCurve

HEADER = "arrival_s,input_tokens,output_tokens\n"


def run(*arguments: str) -> int:
    """The command's exit code, by the entry point itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["iserve", *arguments])
        try:
            main()
        except SystemExit as left:
            return int(left.code or 0)
    return 0


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "0,10,5\n1,20,5\n2,30,5\n4,50,5\n")
    return str(path)


def test_show(trace: str, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert run("trace", "show", trace) == 0
    shown = capsys.readouterr().out
    golden("cli", shown)
    assert ["1", "s", "1", "0.25", "25%"] in [line.split() for line in shown.splitlines()]
    assert ["input", "27.5", "20", "50", "50", "50"] not in [line.split() for line in shown.splitlines()]
    assert ["input", "27.5", "20", "30", "30", "50"] in [line.split() for line in shown.splitlines()]


def test_equal_times_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    path = tmp_path / "twice.csv"
    path.write_text(HEADER + "0,10,5\n1,20,5\n1,30,5\n1,30,5\n")
    assert run("trace", "show", str(path)) == 0
    golden("cli", capsys.readouterr().out)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_long_reading_tells_how_far_it_is(
    options: tuple[str, ...],
    trace: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    golden: Golden,
) -> None:
    """The progress is on stderr, and not with JSON."""
    monkeypatch.setattr("iserve.cli.trace._TOLD_EVERY", 2)
    assert run("trace", "show", trace, *options) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == (0 if options else 2)
    golden("cli", told)


def test_show_as_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trace", "show", trace, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["rate_per_s"], found["bins"][0]["width_s"]) == (4, 0.75, 1)
    assert found["input_tokens"] == {"mean": 27.5, "p50": 20, "p95": 30, "p99": 30, "max": 50}


def test_left_out_rows_and_models_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens\n5,a,1,1\n6,b,1,0\n7,a,1,1\n9,b,1,1\n")
    assert run("trace", "show", str(path)) == 0
    shown = capsys.readouterr().out
    golden("cli", shown)


def test_a_picture_of_the_rate() -> None:
    """A column without requests is blank, one at the peak a full block; slots share columns where there are too
    many.
    """
    assert sparkline(RateCurve(2.0, (0.0, 1.0, 4.0, 8.0))) == (" ▂▅█", 2.0, 8.0)
    picture, column_s, peak = sparkline(RateCurve(1.0, (1.0, 3.0) * 100), columns=50)
    assert (picture, column_s, peak) == ("█" * 50, 4.0, 2.0)


def test_write_does_all_in_order(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.csv.gz"
    options = ["--window", "1:3", "--models", "x, y", "--popularity", "distinct", "--context", "24"]
    assert run("trace", "write", trace, trace, "--out", str(out), *options) == 0
    assert f"4 requests written to {out}" in capsys.readouterr().out
    assert [(r.arrival_s, r.input_tokens, r.output_tokens, r.model) for r in open_trace(out)] == [
        (0.0, 19, 5, "x"),
        (0.0, 19, 5, "y"),
        (1.0, 19, 5, "x"),
        (1.0, 19, 5, "y"),
    ]


def test_two_synthetic_tenants_are_not_one_twice(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    name = "synthetic:azure-conv"
    assert run("trace", "write", name, name, "-o", str(out), "--window", "0:60") == 0
    times = [request.arrival_s for request in open_trace(out, strict=True)]
    assert len(times) > 300
    again = tmp_path / "again.csv"
    assert run("trace", "write", name, name, "-o", str(again), "--window", "0:60", "--rate-factor", "0.2",
               "--interval", "1", "--merge-intervals", "2", "--to", "azure") == 0  # fmt: skip
    fewer = list(open_trace(again, "azure"))
    assert 0.1 * len(times) < len(fewer) < 0.3 * len(times)
    assert fewer[-1].arrival_s <= 30


@pytest.mark.parametrize(
    ("options", "code"),
    [
        pytest.param(["--window", "5"], 2, id="window"),
        pytest.param(["--window", "5:1"], 2, id="empty-window"),
        pytest.param(["--rate-factor", "0.4"], 2, id="no-interval"),
        pytest.param(["--rate-factor", "4", "--interval", "1"], 2, id="factor"),
        pytest.param(["--models", "a,a"], 2, id="models"),
        pytest.param(["--models", "a", "--popularity", "pareto"], 2, id="popularity"),
        pytest.param(["--context", "1"], 2, id="context"),
        pytest.param(["--to", "parquet"], 1, id="format"),
        pytest.param(["--format", "azure"], 1, id="wrong-format"),
    ],
)
def test_what_is_refused_leaves_no_file(
    options: list[str], code: int, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    out = tmp_path / "made" / "out.csv"
    out.parent.mkdir()
    assert run("trace", "write", trace, "--out", str(out), *options) == code
    error = capsys.readouterr().err
    golden("cli", " ".join(error.split()))
    assert "Traceback" not in error
    assert not list(out.parent.iterdir())


def test_equal_times_are_refused_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    path, out = tmp_path / "twice.csv", tmp_path / "out.csv"
    path.write_text(HEADER + "0,10,5\n1,20,5\n1,30,5\n")
    for command in (("show", str(path)), ("write", str(path), "--out", str(out))):
        assert run("trace", *command, "--strict") == 1
        golden("cli", capsys.readouterr().err)
        assert not out.exists()
        assert run("trace", *command) == 0


@pytest.mark.parametrize("name", ["nothing.csv", "synthetic:nothing", "."])
def test_no_such_trace(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trace", "show", name) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
