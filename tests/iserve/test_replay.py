"""``iserve replay`` as a person types it, against a real HTTP server."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fingerprint.codec import from_json
from iserve.cli import main
from iserve.replay.document import ReplayDocument
from tests.golden_words import Golden
from tests.iserve.forked_programs import COMMAND
from tests.iserve.replay.stand_in import GAP_S, TTFT_S, StandIn, stand_in
from tests.waiting import PATIENCE_S

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    with stand_in() as found:
        yield found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten requests, ten a second, three tokens each."""
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{i // 10:02d}.{i % 10}000000,{20 + i},3\n" for i in range(10)]
    path.write_text(AZURE + "".join(rows))
    return path


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ISERVE_", "OPENAI_"))}
    return kept | {"ISERVE_HOME": str(tmp_path / "home"), "COLUMNS": "120"}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def iserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command's own entry point, in this process: a process for each case would take a minute."""
    for name in [name for name in os.environ if name.startswith(("ISERVE_", "OPENAI_"))]:
        monkeypatch.delenv(name)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["iserve", "replay", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        told = capfd.readouterr()
        return Done(int(left.value.code or 0), told.out, told.err)

    return run


def test_json_and_page(iserve: Run, tmp_path: Path, trace: Path, server: StandIn) -> None:
    page = tmp_path / "r.html"
    done = iserve(
        trace,
        "--deployment",
        "fine",
        "--url",
        server.url,
        "--slo",
        "ttft=100",
        "--json",
        "--report",
        page,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = from_json(done.stdout, ReplayDocument)
    assert (found.summary.requests, found.summary.completed) == (10, 10)
    assert found.summary.ttft is not None
    assert found.summary.tpot is not None
    assert found.summary.ttft.p50_s >= TTFT_S - 0.002
    assert found.summary.tpot.p50_s >= GAP_S - 0.002
    assert found.summary.slo is not None
    assert found.summary.slo.attainment_fraction == 1.0
    assert found.summary.lengths.output_tokens == 30
    assert found.notes == () or "late" in found.notes[0], "only a busy machine is worth a note here"
    assert "Replay" in page.read_text()


def test_what_a_person_sees(iserve: Run, trace: Path, server: StandIn, golden: Golden) -> None:
    done = iserve(trace, "--deployment", "short,500", "--url", server.url, "--limit", 8)
    assert done.returncode == 0
    first = done.stdout.splitlines()[0]
    golden("reports", first, numbers=False)
    for words in ("TTFT", "lateness of", "500 told 500", "the trace's length"):
        assert words in done.stdout
    assert "sent 8 of 8" in done.stderr


@pytest.mark.process
def test_a_terminal_gets_one_line_that_is_written_again(tmp_path: Path, trace: Path, server: StandIn) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [COMMAND, "replay", trace, "--deployment", "fine", "--url", server.url],
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the other end is closed
        pass
    assert done.wait(PATIENCE_S) == 0
    os.close(ours)
    assert b"\n" not in shown
    assert shown.count(b"\r\x1b[K") > 1
    assert shown.endswith(b"\r\x1b[K"), "nothing is left of it"


@pytest.mark.process
def test_interrupted_it_shows_what_there_is(tmp_path: Path, trace: Path, server: StandIn) -> None:
    rows = "".join(f"2023-11-16 18:{i // 60:02d}:{i % 60:02d}.0000000,20,2\n" for i in range(600))
    trace.write_text(AZURE + rows)
    before = len(server.bodies)
    process = subprocess.Popen(
        [COMMAND, "replay", trace, "--deployment", "fine", "--url", server.url, "--json"],
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(server.bodies) < before + 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")
    found = from_json(out, ReplayDocument)
    assert found.run.interrupted
    assert 2 <= found.summary.requests < 600
    assert "ended early" in found.notes[0]


def test_nothing_served_is_a_failure(iserve: Run, trace: Path, server: StandIn) -> None:
    done = iserve(trace, "--deployment", "429", "--url", server.url, "--json")
    assert done.returncode == 1
    assert [(f["kind"], f["count"]) for f in json.loads(done.stdout)["summary"]["failures"]] == [
        ("rate limited", 10)
    ]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(("--deployment", "a,a"), 1, id="twice"),
        pytest.param(("--deployment", " "), 2, id="none"),
        pytest.param(("--deployment", "a", "--rate-factor", "0"), 2, id="rate"),
        pytest.param(("--deployment", "a", "--slo", "ttft=0"), 2, id="slo"),
        pytest.param(("--deployment", "a", "--timeout", "nan"), 2, id="timeout"),
        pytest.param(("--deployment", "a", "--max-inflight", "0"), 2, id="in-flight"),
        pytest.param(("--deployment", "a", "--url", "nowhere"), 2, id="url"),
        pytest.param(("--deployment", "a", "--url", "http://127.0.0.1:9"), 1, id="nobody-there"),
        pytest.param(("--deployment", "a"), 1, id="no-gateway"),
        pytest.param(("--deployment", "a", "--report", "/nowhere/r.html"), 2, id="report"),
        pytest.param(("--deployment", "a", "--duration", "-1"), 2, id="duration"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    iserve: Run, trace: Path, golden: Golden, arguments: tuple[str, ...], code: int
) -> None:
    done = iserve(trace, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    golden("cli-errors", done.stderr[done.stderr.find("Error:") if code == 2 else 0 :])


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param(AZURE, id="header-only"),
        pytest.param('{"model": "gpt-4"}\n', id="unknown"),
    ],
)
def test_traces_that_hold_nothing(
    iserve: Run, tmp_path: Path, server: StandIn, golden: Golden, content: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    before = len(server.bodies)
    done = iserve(path, "--deployment", "a", "--url", server.url)
    assert done.returncode == 1
    golden("cli-errors", done.stderr)
    assert len(server.bodies) == before


def test_a_trace_naming_a_model_that_is_not_deployed(
    iserve: Run, tmp_path: Path, server: StandIn, golden: Golden
) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,10,2,12,Conversation log\n"
    )
    done = iserve(path, "--deployment", "fine", "--url", server.url)
    assert done.returncode == 1
    golden("cli-errors", done.stderr)
    done = iserve(
        path,
        "--deployment",
        "fine",
        "--url",
        server.url,
        "--ignore-models",
        "--rate-factor",
        100,
        "--json",
    )
    assert done.returncode == 0
