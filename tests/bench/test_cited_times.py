"""Times of rankings and decisions that pages cite: those of the one record of each."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.accuracy import RESULTS
from tests.bench.decide import cases
from tests.bench.rank import BATCH_CASES, CASES, SPARED_CASES

ROOT = Path(__file__).parents[2]
RANKINGS = {row["case"]: row for row in json.loads((RESULTS / "rank.json").read_bytes())}
SPARED = {row["case"]: row for row in json.loads((RESULTS / "rank_spared.json").read_bytes())}
DECISIONS = {row["case"]: row for row in json.loads((RESULTS / "decide.json").read_bytes())}
INTENTS = CASES | BATCH_CASES


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def span(times_s: list[float]) -> str:
    return f"{1e3 * min(times_s):.0f} to {1e3 * max(times_s):.0f} ms"


def with_a_rate(is_given: bool) -> str:
    return span([
        RANKINGS[name]["median_s"]
        for name, intent in INTENTS.items()
        if (intent.rate_per_s is not None) is is_given
    ])  # fmt: skip


def test_every_case_is_recorded() -> None:
    assert list(RANKINGS) == list(INTENTS)
    assert list(SPARED) == list(SPARED_CASES)
    assert list(DECISIONS) == list(cases())


def test_rankings() -> None:
    performance = text_of("docs/performance.md")
    medians = [row["median_s"] for row in RANKINGS.values()]
    assert (
        f"| rank 10,000 configurations | {span(medians)}, in the median ([deciding](#deciding)) |" in performance
    )
    assert f"Without a rate the medians are {with_a_rate(False)}, with one {with_a_rate(True)}." in performance
    changelog = text_of("CHANGELOG.md")
    assert f"Ranking 10,000 configurations with a rate takes {with_a_rate(True)} of CPU" in changelog


def test_rankings_with_loads_spared() -> None:
    more = [
        SPARED[f"{case}, 3 replicas"]["median_s"] / SPARED[f"{case}, 1 replica"]["median_s"] - 1
        for case in BATCH_CASES
    ]
    said = f"{100 * min(more):.0f} to {max(more):.0%}"
    assert f"take {said} more CPU" in text_of("docs/performance.md")
    assert f"[{said} longer]" in text_of("docs/decisions/0050-loads-in-plans.md")


def test_decisions() -> None:
    one = 1e3 * DECISIONS["joint plan, one replica"]["median_s"]
    performance = text_of("docs/performance.md")
    assert (
        f"| configure and place a model, 200 deployed already | {one:.0f} ms ([deciding](#deciding)) |"
        in performance
    )
    joint = [row["median_s"] for name, row in DECISIONS.items() if name.startswith("joint plan, ")]
    policy = 1e3 * DECISIONS["by a policy, order kept"]["median_s"]
    assert (
        f"A joint decision on 1,000 GPUs takes {span(joint)} of CPU, one by a policy {policy:.0f} ms"
    ) in text_of("docs/placement.md")
