"""Figures on deltas in the text of decisions 47 to 49, against the result files; tables are made anew."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
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
        ("delta_policies_load_1s.json.gz", 0.6, r"at 60% it is (\d+) to (\d+)% longer\. It shortens", 1),
        ("delta_policies_load_2s.json.gz", None, r"longer than ours in all six cells\*\* \((\d+) to (\d+)%\)", 1),
    ],
)
def test_what_preemption_wins_and_loses(file: str, load: float | None, pattern: str, sign: int) -> None:
    ours, other = cells(file, "ours"), cells(file, "deltazip, preempting")
    gains = [
        100 * sign * (other[key]["mean_s"] / ours[key]["mean_s"] - 1) for key in ours if load in (None, key[1])
    ]
    assert stated("0049", pattern) == (round(min(gains)), round(max(gains)))


def test_what_preemption_changes_with_loads_of_one_second() -> None:
    """Mean and tail at 90%, and the wait in all cells, in percent less than ours; loads in percent more."""
    file = "delta_policies_load_1s.json.gz"
    ours, other = cells(file, "ours"), cells(file, "deltazip, preempting")

    def less(figure: str, keys: Iterable[tuple[float, float]]) -> list[float]:
        return sorted(100 * (1 - other[key][figure] / ours[key][figure]) for key in keys)

    high = [key for key in ours if key[1] == 0.9]
    as_long, *shorter = less("mean_s", high)
    pattern = r"90% with 8 slots alone\*\* \((\d+) and (\d+)%\)"
    assert stated("0049", pattern) == tuple(map(round, shorter))
    (longer,) = re.findall(r"with 2 \(([\d.]+)% longer\)", text("0049"))
    assert longer == f"{-as_long:.1f}"
    for figure, keys, pattern in (
        ("p95_s", high, r"tail: P95 by (\d+) to (\d+)% at 90%, P99 of the wait by 8"),
        ("waited_p99_s", ours, r"by 4 to 12% at 90%, P99 of the wait by (\d+) to (\d+)% in all"),
    ):
        gains = less(figure, keys)
        assert stated("0049", pattern) == (round(gains[0]), round(gains[-1]))
    loads = less("loads", high)
    pattern = r"It loads (\d+) to (\d+)% more at 90%"
    assert stated("0049", pattern) == (round(-loads[-1]), round(-loads[0]))


def served(file: str, kind: str, **having: Any) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / "delta_served_h200" / file).read_text())["rows"]
    return [row for row in rows if row["kind"] == kind and all(row[key] == value for key, value in having.items())]


def test_what_graphs_for_each_kind_of_step_are_worth() -> None:
    """Steps with deltas by them, with one graph for all kinds, and without slots of adapters."""
    times = [
        [served(file, "step", of="deltas", active=active)[0]["median_ms"] for active in (1, 4, 8, 32)]
        for file in ("mixed_graphs_by_kind.json", "mixed_one_graph.json", "deltas.json")
    ]
    line = r"deltas take ([\d., ]+) and ([\d.]+) ms for ([\d., ]+) and ([\d.]+), which "
    line += r".*? \(([\d., ]+) and ([\d.]+) on"
    found = re.search(line, text("0048"))
    assert found is not None
    pairs = zip(found.groups()[::2], found.groups()[1::2], strict=True)
    stated_ms = [[*map(float, most.split(", ")), float(last)] for most, last in pairs]
    assert stated_ms == [[pytest.approx(ms, abs=6e-3) for ms in own] for own in times]
    gains = [one - kinds for kinds, one in zip(*times[:2], strict=True)]
    page = " ".join((DECISIONS.parents[1] / "CHANGELOG.md").read_text().split())
    (less,) = re.findall(r"it takes ([\d.]+) to ([\d.]+) ms less \(([\d.]+) for", page)
    assert less == (f"{min(gains):.1f}", f"{max(gains):.1f}", f"{times[0][0]:.2f}")


def test_how_long_loads_of_deltas_take_and_stop() -> None:
    files = ("deltas_read_by_threads.json", "mixed_graphs_by_kind.json")
    loads = [row for file in files for row in served(file, "load")]
    alone = [served(file, "resident")[0]["median_load_s"] for file in (*files, "mixed_one_graph.json")]
    line = r"takes ([\d.]+) to ([\d.]+) s next to steps since .*?, and ([\d.]+) to ([\d.]+) s"
    words = re.search(line, text("0048"))
    assert words is not None
    seconds = [row["loaded_s"] for row in loads]
    assert words.groups() == tuple(f"{end(each):.2f}" for each in (seconds, alone) for end in (min, max))
    shares = [row["longest_share"] for row in loads]
    assert len(shares) == 6
    assert max(shares) < 1.5
    (span,) = re.findall(r"both engines: ([\d.]+) to ([\d.]+) of the median", text("0048"))
    assert span == (f"{min(shares):.1f}", f"{max(shares):.1f}")


def test_what_preemption_changes_with_loads_of_half_a_second() -> None:
    file = "delta_policies_load_0.5s.json.gz"
    ours, other = cells(file, "ours"), cells(file, "deltazip, preempting")
    longer, *shorter = sorted(
        100 * (1 - other[key]["mean_s"] / ours[key]["mean_s"]) for key in ours if key[1] == 0.9
    )
    pattern = r"with 0.5 s its mean is (\d+) to (\d+)% shorter .*? and (\d+)% longer with 2"
    assert stated("0049", pattern) == (*map(round, shorter), round(-longer))
