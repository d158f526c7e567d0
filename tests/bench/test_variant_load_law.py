"""Kept cases of variants that wait for loads next to the steps: the law is that of the code, and how far off."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.bench.variant_load_law import CASES, Case

KEPT = Path(__file__).parent / "results" / "variant_load_waits.json"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(KEPT.read_text())


def test_every_case_that_was_written_down_is_kept(rows: list[dict[str, Any]]) -> None:
    assert [row["case"] for row in rows] == [asdict(case) for case in (*CASES["deltas"], *CASES["deltas-more"])]


def test_kept_laws_are_those_of_the_code(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        case = Case(**row["case"])
        expected_s = float("inf") if row["law_s"] is None else row["law_s"]
        assert case.rate_per_s == pytest.approx(row["rate_per_s"], rel=1e-6)
        assert case.expected_s() == pytest.approx(expected_s, rel=1e-6)
        kept_s = [float("inf") if one is None else one for one in row["law_ttft_s"]]
        assert case.expected_ttft_s() == pytest.approx(kept_s, rel=1e-3)


def test_where_the_thread_has_time_to_spare_means_are_within_28_percent_and_never_6_too_low(
    rows: list[dict[str, Any]],
) -> None:
    """Judged are 34 cases at which loads, one for each missed request, would take up to 70% of the time."""
    ratios = [row["law_s"] / row["seen"]["e2e_s"] for row in rows if 0 < row["case"]["thread"] <= 0.75]
    assert len(ratios) == 34
    assert min(ratios) > 0.94
    assert max(ratios) < 1.285


@pytest.fixture(scope="module")
def of_replicas() -> list[dict[str, Any]]:
    return json.loads((KEPT.parent / "variant_load_replicas.json").read_text())


def test_kept_laws_of_several_replicas_are_those_of_the_code(of_replicas: list[dict[str, Any]]) -> None:
    cases = [Case(**row["case"]) for row in of_replicas]
    assert cases == [*CASES["replicas"], *CASES["replicas-more"]]
    for case, row in zip(cases, of_replicas, strict=True):
        for name, is_shared in (("law_s", True), ("apart_s", False)):
            expected_s = float("inf") if row[name] is None else row[name]
            assert case.expected_s(is_shared=is_shared) == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "number", "most", "most_apart"), [("replicas", 20, 1.48, 4.03), ("replicas-more", 18, 1.25, 2.16)]
)
def test_means_of_replicas_with_loads_that_stop_steps_are_hardly_too_low_and_nearer_than_with_all_loads(
    of_replicas: list[dict[str, Any]], name: str, number: int, most: float, most_apart: float
) -> None:
    rows = {Case(**row["case"]): row for row in of_replicas}
    served = [rows[case] for case in CASES[name] if case.rank and rows[case]["law_s"] is not None]
    shared, apart = ([row[law] / row["seen"]["e2e_s"] for row in served] for law in ("law_s", "apart_s"))
    assert len(served) == number
    assert min(shared) > 0.97
    assert most - 0.01 < max(shared) < most
    assert most_apart - 0.01 < max(apart) < most_apart
    assert all(one <= other for one, other in zip(shared, apart, strict=True))
