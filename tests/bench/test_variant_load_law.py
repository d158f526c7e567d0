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
