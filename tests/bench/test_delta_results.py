"""Figures on deltas in the text of decisions 47 to 49, against the result files; tables are made anew."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parent / "results"
DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"


def text(decision: str) -> str:
    """Return the words of a decision in one line."""
    return " ".join(next(DECISIONS.glob(f"{decision}-*.md")).read_text().split())


def stated(decision: str, pattern: str) -> tuple[int, ...]:
    """Return the whole numbers that the one place of ``pattern`` in a decision has."""
    (found,) = re.finditer(pattern, text(decision))
    return tuple(map(int, found.groups()))


def cells(file: str, policy: str) -> dict[tuple[float, float], dict[str, Any]]:
    found = json.loads(gzip.decompress((RESULTS / file).read_bytes()))["cells"]
    return {(cell["skew"], cell["load"]): cell for cell in found if cell["policy"] == policy}


def test_answers_of_deltas_that_pass_against_the_bases_are_counted() -> None:
    rows = json.loads((RESULTS / "delta_served_h200/delta_deployed.json").read_text())["rows"]
    controls = [row for row in rows if row["kind"] == "control"]
    passed = [row for row in controls if row["passed"]]
    words = stated("0048", r"base's, (\d+) \(.*? first token, (\d+) with a margin .*?; (\d+) with one below")
    assert words == (len(controls), len(controls) - len(passed), len(passed))
    assert all(row["agreed"] == 0 for row in controls)


def test_kept_checks_of_the_forms_in_cuda_are_counted() -> None:
    lines = gzip.decompress((RESULTS / "delta_kernels_h200/cuda_tries.jsonl.gz").read_bytes()).splitlines()
    checks = [row for row in map(json.loads, lines) if row.get("kind") == "check"]
    assert stated("0047", r"none of the (\d+) checks") == (len(checks),)
    assert not any(row["bad"] for row in checks)


@pytest.mark.parametrize(
    ("file", "load", "pattern", "sign"),
    [
        ("delta_policies.json.gz", 0.9, r"with 45 ms it wins by (\d+) to (\d+)% at 90%", -1),
        ("delta_policies_load_2s.json.gz", None, r"longer than ours in all six cells\*\* \((\d+) to (\d+)%\)", 1),
    ],
)
def test_what_preemption_wins_and_loses(file: str, load: float | None, pattern: str, sign: int) -> None:
    ours, other = cells(file, "ours"), cells(file, "deltazip, preempting")
    gains = [
        100 * sign * (other[key]["mean_s"] / ours[key]["mean_s"] - 1) for key in ours if load in (None, key[1])
    ]
    assert stated("0049", pattern) == (round(min(gains)), round(max(gains)))
