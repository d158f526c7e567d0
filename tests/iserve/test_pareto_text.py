"""The picture under a plan: the front is the front, nothing is wider than the terminal, it is drawn on request
only.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from fingerprint.gpus import parse_gpus
from iserve.cli.pareto_text import LEAST_WIDTH, pareto_picture
from iserve.planning.document import PlanDocument
from iserve.planning.offline import plan_for_gpus
from iserve.planning.pipeline import PlanOptions
from planner.intent import Intent, IntentKind, Quality
from tests.golden_words import Golden
from tests.iserve.test_cli import Done, iserve, model

__all__ = ["iserve", "model"]

FRONT = re.compile(r"  (\w)  \S+ \S+, (\S+ m?s): (.*)")
PICTURE = "end-to-end latency over the cost of a request"


@pytest.fixture
def plan(model: Callable[[str], Path]) -> Callable[..., PlanDocument]:
    def make(gpus: str = "a6000:8", **wish: object) -> PlanDocument:
        gpu, count = parse_gpus(gpus)
        options = PlanOptions(intent=Intent(kind=IntentKind.MIN_MEMORY, **wish))  # type: ignore[arg-type]
        return plan_for_gpus(str(model("Llama-2-13b")), gpu, count, options, "vllm")

    return make


@pytest.mark.parametrize("width", [LEAST_WIDTH, 80, 300])
@pytest.mark.parametrize("gpus", ["a6000:8", "h200:4", "h200:1"])
def test_the_numbers_are_the_front_from_the_cheapest(
    plan: Callable[..., PlanDocument], gpus: str, width: int
) -> None:
    document = plan(gpus, quality=Quality.ANY)
    lines = [line.plain for line in pareto_picture(document, width)]
    assert max(map(len, lines)) <= width
    figures = [
        (c.estimate.cost, c.estimate.e2e_s.value)
        for c in document.candidates
        if c.feasible and c.estimate is not None and c.estimate.cost is not None
    ]
    undominated = {
        (cost, e2e)
        for cost, e2e in figures
        if not any(c <= cost and e <= e2e and (c, e) != (cost, e2e) for c, e in figures)
    }
    listed = [found[1] for line in lines if (found := FRONT.match(line))]
    assert len(listed) == len(undominated) > 0
    drawn = {
        mark: (column, row)
        for row, line in enumerate(lines[1:17])
        for column, mark in enumerate(line[11:])
        if mark in listed
    }
    places = [drawn[number] for number in listed if number in drawn]  # two may share one
    assert places
    assert places == sorted(places)  # dearer is further right
    assert [row for _, row in places] == sorted(row for _, row in places)  # and lower, that is faster


def test_where_nothing_works_only_refused_ones_are_drawn(
    plan: Callable[..., PlanDocument], golden: Golden
) -> None:
    lines = [line.plain for line in pareto_picture(plan("a6000:1", budget=1e-9), 80)]
    golden("reports", lines[-1])
    assert "".join(lines[1:17]).count(".") > 0
    assert not any(FRONT.match(line) for line in lines)


def test_it_is_drawn_when_asked_for_and_never_in_json(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    asked = ("plan", model("Llama-2-7b"), "--gpus", "a6000:8")
    plain = iserve(*asked).out
    assert PICTURE not in plain
    pictured = iserve(*asked, "--plot").out
    assert pictured.startswith(plain)
    assert PICTURE in pictured
    assert json.loads(iserve(*asked, "--plot", "--json").out) == json.loads(iserve(*asked, "--json").out)


@pytest.mark.parametrize(("columns", "is_drawn"), [(100, True), (LEAST_WIDTH - 1, False)])
@pytest.mark.process
def test_a_terminal_that_is_too_narrow_gets_a_line_instead(
    columns: int, is_drawn: bool, model: Callable[[str], Path], tmp_path: Path
) -> None:
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_") and k != "COLUMNS"}
    process = subprocess.Popen(
        [Path(sys.executable).with_name("iserve"), "plan", model("Llama-2-7b"), "--gpus", "a6000:1", "--plot"],
        env=kept | {"ISERVE_HOME": str(tmp_path), "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    seen = b""
    try:
        while piece := os.read(ours, 1 << 16):
            seen += piece
    except OSError:  # its other end was closed
        pass
    assert process.wait() == 0
    os.close(ours)
    assert (PICTURE.encode() in seen) is is_drawn
    assert (b"no picture" in seen) is not is_drawn
