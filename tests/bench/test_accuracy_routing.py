"""A skewed draw of experts, recorded, against what a uniform profile says of it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from tests.bench.accuracy_routing import Pair, busiest, pairs, recorded

PAGE = " ".join((Path(__file__).parents[2] / "docs/accuracy.md").read_text().split())
SECTION = PAGE.partition("## A skewed draw of experts")[2].partition("## Other methods")[0]


@cache
def _decode() -> list[Pair]:
    return [pair for pair in pairs() if pair.skewed.metric == "tpot"]


@pytest.mark.slow
def test_one_draw_is_skewed_and_one_is_not() -> None:
    skewed, uniform = recorded()
    assert {rank.expert_routing for rank in skewed.whole_memory} == {"normal_routing"}
    assert (skewed.config, skewed.profile.graph_tokens) == (uniform.config, uniform.profile.graph_tokens)
    cited = re.search(r"gets ([\d.]+) times the mean, ([\d.]+) times of the uniform", SECTION)
    assert cited is not None
    assert cited.groups() == (f"{busiest(skewed):.2f}", f"{busiest(uniform):.2f}")


@pytest.mark.slow
def test_the_page_says_what_the_recordings_do() -> None:
    many = [pair for pair in _decode() if pair.skewed.batch >= 8]
    high, low = [p.error for p in many if p.error > 0], [p.error for p in many if p.error < 0]
    assert f"took {1 - median(pair.ratio for pair in many):.0%} less in the median" in SECTION
    assert f"{100 * min(high):.0f} to {max(high):.0%} high at {len(high)} of {len(many)} such points" in SECTION
    assert len(low) == 1
    assert f"and {-low[0]:.0%} low at one" in SECTION
    own = {m: [p.skewed for p in pairs() if p.skewed.metric == m] for m in ("tpot", "ttft")}
    off = {m: f"{median(abs(row.error) for row in rows):.1%}" for m, rows in own.items()}
    inside = {m: f"{sum(row.inside for row in rows)} of {len(rows)}" for m, rows in own.items()}
    assert f"TPOT {off['tpot']} off in the median and mostly low, {inside['tpot']} inside" in SECTION
    assert f"TTFT {off['ttft']}, {inside['ttft']}." in SECTION
