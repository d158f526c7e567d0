"""Quality of deltas by format: what the committed study holds."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from fingerprint.codec import from_json
from fingerprint.delta import FORMATS
from tests.bench.delta_quality import (
    BASE,
    FULL,
    RANDOM,
    ROUNDED,
    TEXTS,
    WHOLE,
    DeltaStudy,
    cost_table,
    quality_table,
)
from tests.bench.kept import read_kept

PAGE = Path(__file__).parents[2] / "docs" / "variants.md"


@pytest.fixture(scope="module")
def study() -> DeltaStudy:
    path = Path(__file__).with_name("results") / "delta_quality.json"
    return from_json(read_kept(path), DeltaStudy, what=path.name)


def of(study: DeltaStudy, method: str, calibration: str, field: str) -> float:
    found = [each for each in study.outcomes if (each.method, each.calibration) == (method, calibration)]
    return mean(getattr(each, field) for each in found)


def test_compensation_has_the_smaller_error_in_every_format(study: DeltaStudy) -> None:
    for name in FORMATS:
        assert of(study, name, TEXTS, "error") < of(study, name, ROUNDED, "error")


def test_texts_of_its_own_are_better_than_random_tokens_and_these_than_none(study: DeltaStudy) -> None:
    """From two bits on; one bit keeps nothing of these facts."""
    for name in ("int2", "int3", "int4"):
        nll = [of(study, name, calibration, "nll") for calibration in (TEXTS, RANDOM, ROUNDED)]
        assert nll == sorted(nll)


def test_more_bits_lose_less(study: DeltaStudy) -> None:
    nll = [of(study, f"int{bits}", TEXTS, "nll") for bits in (1, 2, 3, 4)]
    assert nll == sorted(nll, reverse=True)
    assert of(study, "int4", TEXTS, "exact_match") > 0.99 * of(study, FULL, "", "exact_match")


def test_two_bits_are_as_good_as_four_with_half_of_them_pruned(study: DeltaStudy) -> None:
    dense, sparse = (of(study, name, TEXTS, "exact_match") for name in ("int2", "sparse24-int4"))
    assert dense > 0.95 * sparse
    assert of(study, "int2", TEXTS, "bits") < 0.6 * of(study, "sparse24-int4", TEXTS, "bits")


def test_controls_fail(study: DeltaStudy) -> None:
    """The base knows nothing, and two bits of whole weights lose more than two bits of the change."""
    assert of(study, BASE, "", "exact_match") < 0.01
    for name in ("int2", "sparse24-int4", "sparse24-int2"):
        for calibration in (TEXTS, ROUNDED):
            whole, delta = of(study, f"{WHOLE} {name}", calibration, "nll"), of(study, name, calibration, "nll")
            assert whole > delta


def test_the_page_shows_them(study: DeltaStudy) -> None:
    page = PAGE.read_text()
    assert quality_table(study) in page
    assert cost_table(study) in page
