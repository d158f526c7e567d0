"""The bench of routing over real workers: its requests, its words, and its recording."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from fingerprint.codec import from_json
from tests.bench.kept import read_kept
from tests.bench.variant_routing_run import (
    CLIENTS,
    FILE,
    INPUT,
    LOADS,
    POLICIES,
    VARIANTS,
    RoutingRun,
    Turn,
    requests,
    table,
)
from tests.golden_words import Golden

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "variants.md"


def recording() -> RoutingRun:
    return from_json(read_kept(RESULTS / FILE), RoutingRun, what="recording")


def test_requests_are_poisson_arrivals_of_variants_by_zipfs_law() -> None:
    asked, at_s = requests(3, 50.0, 200.0)
    assert len(asked) == len(at_s) == pytest.approx(10_000, rel=0.05)
    assert list(at_s) == sorted(at_s)
    assert 0 < at_s[0] < at_s[-1] < 200.0
    gaps = [later - sooner for sooner, later in pairwise(at_s)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
    counts = Counter(one.model for one in asked)
    total = sum(1 / rank for rank in range(1, VARIANTS + 1))
    for rank in (1, 2, 5):
        assert counts[f"v{rank - 1}"] / len(asked) == pytest.approx(1 / rank / total, rel=0.15)
    assert {len(one.prompt) for one in asked} == {INPUT}


def test_the_same_seed_is_the_same_requests() -> None:
    assert requests(3, 5.0, 20.0) == requests(3, 5.0, 20.0)
    assert requests(3, 5.0, 20.0) != requests(4, 5.0, 20.0)


def test_a_table_has_medians_over_the_rounds_and_counts_what_has_no_text(golden: Golden) -> None:
    turns = tuple(
        Turn(policy=policy, load=0.3, round=round_, loads=loads, evictions=1, ttft_s=(0.01, 0.02, -1.0))
        for policy, numbers in zip(POLICIES, ((3, 5, 9), (10, 20, 30)), strict=True)
        for round_, loads in enumerate(numbers)
    )
    found = RoutingRun(machine="m", date="d", slots=4, loaded=16, capacity_per_s=1.0, seconds=1.0, turns=turns)
    golden("reports", table(found))


def test_the_kept_recording_has_both_policies_in_turn_on_the_same_requests() -> None:
    found = recording()
    assert found.slots < VARIANTS
    assert found.loaded < VARIANTS
    by_round = {(turn.round, turn.load): [] for turn in found.turns}
    for turn in found.turns:
        by_round[turn.round, turn.load].append(turn)
    assert {load for _, load in by_round} == set(LOADS)
    for (round_, _), turns in by_round.items():
        assert [turn.policy for turn in turns] == list(POLICIES[:: 1 - 2 * (round_ % 2)])
        assert len({len(turn.ttft_s) for turn in turns}) == 1
    assert CLIENTS == 2


def test_the_page_has_the_table_of_the_recording() -> None:
    assert table(recording()) in PAGE.read_text()
