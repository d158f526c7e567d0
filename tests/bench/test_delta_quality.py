"""Quality of deltas by format: what the committed study holds."""

from __future__ import annotations

from dataclasses import replace
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

PAGE = Path(__file__).parents[2] / "docs" / "deltas.md"


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


def by_seed(study: DeltaStudy, method: str, field: str) -> list[float]:
    found = {each.seed: getattr(each, field) for each in study.outcomes if each.method == method}
    return [found[seed] for seed in sorted(found)]


def test_it_has_three_seeds(study: DeltaStudy) -> None:
    assert {each.seed for each in study.outcomes} == {0, 1, 2}


def test_two_bits_are_behind_four_with_half_of_them_pruned_and_three_ahead(study: DeltaStudy) -> None:
    """In each seed; two bits take half of the bytes, three bits three quarters."""
    of_texts = replace(study, outcomes=tuple(each for each in study.outcomes if each.calibration == TEXTS))
    for field, is_falling in (("exact_match", False), ("nll", True)):
        formats = zip(*(by_seed(of_texts, name, field) for name in ("int2", "sparse24-int4", "int3")), strict=True)
        for values in formats:
            assert sorted(values, reverse=is_falling) == list(values)
    bits = [of(study, name, TEXTS, "bits") for name in ("int2", "int3", "sparse24-int4")]
    assert bits[0] < 0.6 * bits[2]
    assert bits[1] < 0.8 * bits[2]


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
