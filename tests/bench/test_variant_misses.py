"""Loads of variants in steady state, replayed next to the plan's law."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.adapter_slots import VariantLoad
from tests.bench.variant_misses import CASES, CASES_OF, Case, Laws, replayed

RESULTS = Path(__file__).parent / "results"
KEPT = json.loads((RESULTS / "variant_misses.json").read_text(encoding="utf-8"))
FIELDS = ("slots", "variants", "skew", "is_high", "replicas", "utilisation")


def errors_of_replicas(name: str, law: str) -> NDArray[np.float64]:
    """Return law less replay of each kept case of several replicas that plans serve, in percentage points.

    The rates that were replayed are kept with them.
    """
    kept = json.loads((RESULTS / f"variant_misses_{name.replace('-', '_')}.json").read_text(encoding="utf-8"))
    cases = CASES_OF[name]
    assert [tuple(row[field] for field in FIELDS) for row in kept] == [
        tuple(getattr(case, field) for field in FIELDS) for case in cases
    ]
    found = []
    for case, row in zip(cases, kept, strict=True):
        laws = Laws.of(case, row["rate_per_s"] / case.replicas / case.utilisation)
        assert laws.apart == pytest.approx(row["law"])
        assert laws.together - 1e-9 <= laws.without_slot <= laws.apart + 1e-9
        if laws.planned < 1:
            found.append(100 * (getattr(laws, law) - row["replayed"]))
    return np.array(found)


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


@pytest.mark.parametrize(
    ("name", "law", "number", "median", "lowest", "highest"),
    [
        ("held-out", "apart", 111, 25.2, -5.8, 71.6),
        ("held-out", "without_slot", 111, 1.3, -8.1, 30.8),
        ("further", "apart", 84, 19.9, -3.7, 70.9),
        ("further", "without_slot", 84, 0.8, -9.7, 30.0),
        ("further", "in_between", 84, 5.9, -14.4, 42.6),
    ],
)
def test_laws_of_replicas_are_as_far_off_as_decision_50_says(
    name: str, law: str, number: int, median: float, lowest: float, highest: float
) -> None:
    errors = errors_of_replicas(name, law)
    assert len(errors) == number
    assert float(np.median(np.abs(errors))) == pytest.approx(median, abs=0.1)
    assert lowest <= errors.min() <= lowest + 0.2
    assert highest - 0.2 <= errors.max() <= highest


def test_the_law_of_plans_is_better_than_the_bound_by_what_was_written_down_before() -> None:
    law, bound = (errors_of_replicas("further", name) for name in ("without_slot", "apart"))
    assert np.median(np.abs(law)) <= np.median(np.abs(bound)) / 2
    assert np.abs(law).max() <= np.abs(bound).max() / 2
    assert (law < -5).mean() <= 1 / 20
    assert law.min() > -10


@pytest.mark.slow
@pytest.mark.parametrize(("variants", "skew", "within"), [(64, 1.0, 0.03), (1_000, 1.5, 0.03), (32, 0.0, 1e-9)])
def test_a_replay_at_a_low_rate_loads_as_often_as_the_law_says(variants: int, skew: float, within: float) -> None:
    case = Case(slots=8, variants=variants, skew=skew, is_high=False)
    loads, _ = replayed(case, 4_000)
    assert loads == pytest.approx(VariantLoad(variants, skew).missed(32), abs=within)
