"""The recording of routing over two GPUs against what the pages say of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fingerprint.codec import from_json
from tests.bench.kept import read_kept
from tests.bench.variant_clients import p
from tests.bench.variant_routing_run import (
    POLICIES,
    RoutingRun,
    Turn,
    client_seeds,
    requests,
    simulated,
    simulated_table,
    table,
)
from tests.bench.variant_routing_served import CASES

ROOT = Path(__file__).parents[2]
PAGE, DECISION = ROOT / "docs" / "adapters-measured.md", ROOT / "docs" / "decisions" / "0044-variant-routing.md"
VLLM = CASES["vllm"]
PAIRS = [(0.3, 0), (0.3, 1), (0.6, 0)]
Pair = tuple[Turn, Turn]


@pytest.fixture(scope="module")
def found() -> RoutingRun:
    kept = Path(__file__).parent / "results" / VLLM.file
    return from_json(read_kept(kept), RoutingRun, what="recording")


def pair_of(found: RoutingRun, load: float, round_: int) -> Pair:
    """Return the turns of ``least-loaded`` and of ``round-robin``."""
    turns = {turn.policy: turn for turn in found.turns if (turn.load, turn.round) == (load, round_)}
    return turns[POLICIES[0]], turns[POLICIES[1]]


def first_tokens(found: RoutingRun, turn: Turn) -> list[tuple[float, str, float, bool]]:
    """Return arrival, variant, TTFT and whether the variant was asked for first, of each request as it arrived."""
    rate_per_s = turn.load * found.capacity_per_s / 2
    drawn = [
        (at_s, asked.model)
        for seed in client_seeds(turn.load, turn.round)
        for asked, at_s in zip(*requests(VLLM, seed, rate_per_s, found.seconds), strict=True)
    ]
    seen: set[str] = set()
    rows = []
    for (at_s, variant), ttft_s in sorted(zip(drawn, turn.ttft_s, strict=True)):
        rows.append((at_s, variant, ttft_s, variant not in seen))
        seen.add(variant)
    return rows


def test_three_pairs_were_measured_and_all_answers_had_text(found: RoutingRun) -> None:
    assert (found.engine, found.machine) == ("vllm", "NVIDIA H200, NVIDIA H200")
    assert found.versions == "vllm 0.33.0, driver 580.159.04"
    assert sorted(round(one) for one in found.start_s) == [280, 281]
    assert sorted({(turn.load, turn.round) for turn in found.turns}) == PAIRS
    assert len(found.paired) == len(found.turns) == 2 * len(PAIRS)
    assert sum(len(turn.ttft_s) for turn in found.turns) == 1342
    assert all(one > 0 for turn in found.turns for one in turn.ttft_s)


@pytest.mark.parametrize(
    ("pair", "loads", "p99_ms"),
    [((0.3, 0), (78, 91), (175, 138)), ((0.3, 1), (68, 91), (116, 130)), ((0.6, 0), (115, 157), (361, 283))],
)
def test_loads_are_fewer_in_each_pair_and_the_late_first_tokens_are_not_sooner(
    found: RoutingRun, pair: tuple[float, int], loads: tuple[int, int], p99_ms: tuple[int, int]
) -> None:
    turns = pair_of(found, *pair)
    assert tuple(turn.loads for turn in turns) == loads
    assert tuple(round(1e3 * p(turn.answered_s, 99)) for turn in turns) == p99_ms
    lower: list[Callable[[Turn], float]] = [
        lambda turn: p(turn.answered_s, 50),
        lambda turn: turn.mean_s,
        lambda turn: p(turn.whole_s, 95),
    ]
    assert all(figure(turns[0]) < figure(turns[1]) for figure in lower)
    assert {round(1e3 * turn.loading_s / turn.loads) for turn in turns} <= set(range(63, 79))


def cells(pair: Pair, replayed: Pair) -> list[str]:
    def both(value: Callable[[Turn], float], unit: str = " ms", turns: Pair = pair) -> str:
        return " for ".join(f"{value(turn):.0f}" for turn in turns) + unit

    return [
        both(lambda turn: turn.loads, ""),
        *(both(lambda turn, percent=percent: 1e3 * p(turn.answered_s, percent)) for percent in (50, 95, 99)),  # type: ignore[misc]
        both(lambda turn: 1e3 * turn.mean_s),
        both(lambda turn: 1e3 * p(turn.whole_s, 95)),
        both(lambda turn: turn.loads, "", replayed),
        both(lambda turn: 1e3 * p(turn.answered_s, 99), turns=replayed),
    ]


def test_the_pages_have_the_tables_of_the_recording(found: RoutingRun) -> None:
    page, decision = PAGE.read_text(), DECISION.read_text()
    assert table(found) in page
    assert simulated_table(found) in decision
    for load, round_ in PAIRS:
        pair = pair_of(found, load, round_)
        row = cells(pair, (simulated(found, pair[0]), simulated(found, pair[1])))
        assert f"| {load:.0%}, round {round_} | {' | '.join(row)} |" in decision


def latest(found: RoutingRun, turn: Turn, count: int) -> list[tuple[float, str, float, bool]]:
    return sorted(first_tokens(found, turn), key=lambda row: -row[2])[:count]


def test_at_30_percent_the_latest_requests_are_the_first_for_their_variants(found: RoutingRun) -> None:
    rows = latest(found, pair_of(found, 0.3, 0)[0], 4)
    assert [(variant, round(1e3 * ttft_s)) for _, variant, ttft_s, _ in rows] == [
        ("v73", 200), ("v97", 179), ("v136", 173), ("v158", 169),
    ]  # fmt: skip
    assert all(is_first for *_, is_first in rows)
    at_s = {variant: at_s for at_s, variant, *_ in rows}
    assert at_s["v136"] - at_s["v73"] == pytest.approx(0.11, abs=0.01)
    assert at_s["v158"] - at_s["v97"] == pytest.approx(0.02, abs=0.01)
    turns = first_tokens(found, pair_of(found, 0.3, 0)[1])
    by_turns = {variant: round(1e3 * ttft_s) for _, variant, ttft_s, is_first in turns if is_first}
    assert [by_turns[name] for name in ("v73", "v136", "v97", "v158")] == [110, 107, 117, 113]


def test_at_60_percent_popular_variants_are_among_the_latest(found: RoutingRun) -> None:
    ours, turns = pair_of(found, 0.6, 0)
    moments = [
        (9.85, "v170"),
        (9.75, "v69"),
        (28.49, "v39"),
        (9.85, "v5"),
        (28.47, "v0"),
        (28.48, "v0"),
        (9.89, "v3"),
    ]
    rows = latest(found, ours, 7)
    assert [(round(at_s, 2), variant) for at_s, variant, *_ in rows] == moments
    assert [round(1e3 * ttft_s) for *_, ttft_s, _ in rows] == [380, 365, 364, 363, 358, 353, 342]
    same = {
        (round(at_s, 2), variant): round(1e3 * ttft_s) for at_s, variant, ttft_s, _ in first_tokens(found, turns)
    }
    assert [same[9.85, "v170"], same[9.75, "v69"], same[9.85, "v5"], same[9.89, "v3"]] == [258, 121, 55, 55]
    assert "v0" not in {variant for _, variant, *_ in latest(found, turns, 7)}
