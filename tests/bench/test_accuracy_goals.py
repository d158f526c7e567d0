"""Marks of the accuracy tables: every number beyond its goal has one, and no other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.bench.accuracy_goals import MISSED, OF_A_FAMILY, POOLED, family_table, summary_table
from tests.bench.accuracy_rows import FamilyRow

GOOD = FamilyRow(
    family="good",
    mixture=False,
    engine="vllm 0.33.0",
    gpu="h200-sxm",
    measured=("2026-11-27", "2026-11-27"),
    models=("Good-8B",),
    points=15,
    tpot=(0.025, 0.08),
    ttft=(0.05, 0.15),
    short_ttft_s=0.002,
    ttft_bias=-0.3,
    inside=(0.90, 0.90),
    half_width=(0.06, 0.12),
    weights=0.001,
    non_kv=0.03,
    blocks=0.01,
    profile_s=45,
)
BAD = replace(
    GOOD,
    family="bad",
    models=("Bad-8B",),
    tpot=(0.02501, 0.08001),
    ttft=(0.05001, 0.15001),
    short_ttft_s=0.00201,
    inside=(0.749, 0.749),
    half_width=(0.0601, 0.1201),
    weights=0.00101,
    non_kv=0.0301,
    blocks=0.0101,
    profile_s=45.6,
)


@pytest.mark.parametrize("goals", [OF_A_FAMILY, POOLED])
def test_a_goal_is_kept_at_its_bound_and_missed_beyond(goals: dict[str, object]) -> None:
    for name, goal in {**OF_A_FAMILY, **POOLED}.items():
        if name in goals:
            assert goal.met(GOOD), name
            assert not goal.met(BAD), name


def test_intervals_that_hold_too_much_miss_the_pooled_goal_and_none_of_a_family() -> None:
    wide = replace(GOOD, inside=(1.0, 1.0))
    assert not POOLED["inside tpot"].met(wide)
    assert not POOLED["inside ttft"].met(wide)
    assert OF_A_FAMILY["inside tpot"].met(wide)


def test_a_mixture_has_more_seconds_and_a_family_of_short_prompts_no_error_in_percent() -> None:
    assert OF_A_FAMILY["profile"].met(replace(BAD, mixture=True, profile_s=90))
    assert not OF_A_FAMILY["profile"].met(replace(BAD, mixture=True, profile_s=91))
    assert OF_A_FAMILY["ttft"].met(replace(GOOD, ttft=(math.nan, math.nan)))


def test_marks_are_on_every_number_of_the_bad_row_and_on_none_of_the_good_one() -> None:
    lines = family_table(
        [GOOD, BAD, replace(BAD, family="all")], replace(BAD, family="pooled"), [BAD]
    ).splitlines()
    pooled, part, _, good, bad, everything = lines[4:]
    assert good.count(MISSED) == 0
    assert bad.count(MISSED) == len(OF_A_FAMILY)
    assert pooled.count(MISSED) == len(POOLED)
    assert part.count(MISSED) == everything.count(MISSED) == 0
    assert len({line.count("|") for line in lines}) == 1


def test_the_summary_names_each_row_that_misses_the_farthest_first() -> None:
    worse = replace(BAD, models=("Worse-8B",), tpot=(0.3, 0.9), inside=(0.1, 0.1))
    served = {"Good-8B": (9, 9), "Bad-8B": (8, 9)}
    lines = summary_table([GOOD, BAD, worse], GOOD, served, "1 of 2 points").splitlines()
    cells = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in lines}
    assert cells["TPOT, worst: 8%"] == "**2 of 3**: Worse-8B 90.0%, Bad-8B 8.0%"
    assert cells["TTFT inside: 75% or more"] == "**2 of 3**: Worse-8B 10%, Bad-8B 75%"
    assert cells["all three of TTFT"] == "met by 1 of 3: Good-8B"
    for counts, verdict in ((served, "**missed**"), ({"Good-8B": (9, 9)}, "met"), ({}, "not known")):
        lines = summary_table([GOOD], GOOD, counts, "").splitlines()
        (line,) = (line for line in lines if "served steady state" in line)
        assert line.split("|")[3].strip() == verdict
    assert {name: cell for name, cell in cells.items() if cell == "met"}.keys() == {
        f"{goal.name}: {goal.said}" for goal in POOLED.values()
    }


def test_recordings_with_earlier_graphs_have_a_heading_of_their_own() -> None:
    before = replace(GOOD, family="before", has_earlier_graphs=True)
    lines = family_table([GOOD, before], GOOD, ()).splitlines()
    assert [line.count("**") for line in lines[-4:]] == [2, 0, 2, 0]
    assert lines[-4] != lines[-2]
