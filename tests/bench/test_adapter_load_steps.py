"""The bench of loads next to decode steps: its gaps, a run on a small model, and what the docs say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fingerprint.codec import from_json
from tests.bench import adapter_load_steps
from tests.bench.adapter_load_steps import WAYS, LoadSteps, gap_row, gaps_s, measure, row
from tests.bench.kept import read_kept

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "bench" / "results" / "adapter_load_steps.json"


def test_gaps_are_those_that_touch_the_load() -> None:
    times_s = [0.0, 1.0, 2.0, 4.0, 5.0]
    assert gaps_s(times_s, 1.5, 1.6) == [1.0]
    assert gaps_s(times_s, 1.5, 2.5) == [1.0, 2.0]
    assert gaps_s(times_s, 2.0, 4.0) == [2.0]


@pytest.mark.slow
def test_a_run_measures_both_ways_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    small = adapter_load_steps.CONFIG | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 64,
    }
    monkeypatch.setattr(adapter_load_steps, "CONFIG", small)
    monkeypatch.setattr(adapter_load_steps, "RANKS", (2, 8))
    monkeypatch.setattr(adapter_load_steps, "ROUNDS", 1)
    found = measure("a test", gpu=False)
    assert [(load.way, load.rank) for load in found.loads] == [(way, rank) for rank in (2, 8) for way in WAYS]
    assert all(load.longest_gap_s > 0 and load.load_s > 0 for load in found.loads)
    assert row(found).startswith("rank 2")


def test_the_documentation_says_what_was_measured() -> None:
    found = from_json(read_kept(KEPT), LoadSteps, what=KEPT.name)
    text = " ".join((ROOT / "docs" / "variants.md").read_text().split())
    assert row(found) in text
    assert gap_row(found) in text
    assert found.machine in text
