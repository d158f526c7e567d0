"""Loads of variants in steady state, replayed next to the plan's law."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.adapter_slots import VariantLoad
from tests.bench.variant_misses import CASES, Case, replayed

KEPT = json.loads((Path(__file__).parent / "results" / "variant_misses.json").read_text(encoding="utf-8"))


def test_the_kept_results_are_of_all_cases_and_of_the_law_as_it_is() -> None:
    fields = ("slots", "variants", "skew", "is_high", "replicas")
    found = {tuple(row[name] for name in fields): row for row in KEPT}
    assert list(found) == [tuple(getattr(case, name) for name in fields) for case in CASES]
    for case, row in zip(CASES, KEPT, strict=True):
        assert row["law"] == pytest.approx(VariantLoad(case.variants, case.skew).missed(case.places))


def test_the_law_is_hardly_ever_too_low_and_right_for_one_worker_at_low_rates() -> None:
    """Bounds are those that docs/decisions/0050-loads-in-plans.md states."""
    for case, row in zip(CASES, KEPT, strict=True):
        above = row["law"] - row["replayed"]
        assert -0.01 < above < (0.105 if case.replicas == 1 else 0.5)
        if case.replicas == 1 and case.slots > 1 and not case.is_high:
            assert above < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("variants", "skew", "within"), [(64, 1.0, 0.03), (1_000, 1.5, 0.03), (32, 0.0, 1e-9)])
def test_a_replay_at_a_low_rate_loads_as_often_as_the_law_says(variants: int, skew: float, within: float) -> None:
    case = Case(slots=8, variants=variants, skew=skew, is_high=False)
    loads, _ = replayed(case, 4_000)
    assert loads == pytest.approx(VariantLoad(variants, skew).missed(32), abs=within)
