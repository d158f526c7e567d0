"""Leave one family out: what is fitted on a family never judges it."""

from __future__ import annotations

import pytest

from tests.bench.accuracy_families import (
    FOLDERS,
    _degrees,
    calibration_without,
    family_of,
    family_rows,
    recordings_of,
)

FAMILIES = sorted({family_of(one) for folder in FOLDERS for one in recordings_of(folder)})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_calibration_without_a_family_knows_every_other_model_and_none_of_it(family: str) -> None:
    hashes = {family_of(o): set() for f in FOLDERS for o in recordings_of(f)}  # type: ignore[var-annotated]
    for folder in FOLDERS:
        for one in recordings_of(folder):
            hashes[family_of(one)].add(one.profile.spec.shape_hash)
    left = {error.shape_hash for error in calibration_without(family).errors}
    assert left == set().union(*(shapes for name, shapes in hashes.items() if name != family))


@pytest.mark.slow
def test_every_recording_is_in_a_row_of_its_family_and_in_that_of_its_release() -> None:
    rows = family_rows()
    for folder in FOLDERS:
        named = {" ".join((one.model, *_degrees(one))) for one in recordings_of(folder)}
        assert any(set(row.models) == named and row.family == "all" for row in rows)
        assert all(any(m in row.models and row.family != "all" for row in rows) for m in named)
    totals = sum(row.points for row in rows if row.family == "all")
    assert totals == sum(row.points for row in rows if row.family != "all")
