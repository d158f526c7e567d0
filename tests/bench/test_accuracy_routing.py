"""A skewed draw of experts, recorded, against what a uniform profile says of it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import median

import pytest

from fingerprint.profile_checks import routing_caveat
from tests.bench.accuracy_routing import Pair, busiest, pairs, recorded
from tests.bench.test_cited_accuracy import _numbers

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
    assert _numbers(SECTION, "expert gets ", "of the uniform") == [
        f"{busiest(one):.2f}" for one in (skewed, uniform)
    ]


@pytest.mark.slow
def test_a_plan_s_note_has_the_measured_figures() -> None:
    skewed, uniform = recorded()
    note = routing_caveat(uniform.profile) or ""
    shorter = 1 - median(pair.ratio for pair in _decode() if pair.skewed.batch >= 8)
    assert _numbers(note, "decode steps ", "shorter") == [f"{100 * shorter:.0f}"]
    assert _numbers(note, "the busiest at ", "times") == [f"{busiest(skewed):.2f}"]


@pytest.mark.slow
def test_the_page_says_what_the_recordings_do() -> None:
    many = [pair for pair in _decode() if pair.skewed.batch >= 8]
    high, low = [p.error for p in many if p.error > 0], [p.error for p in many if p.error < 0]
    assert _numbers(SECTION, "and more took ", "less") == [
        f"{100 * (1 - median(pair.ratio for pair in many)):.0f}"
    ]
    assert _numbers(SECTION, "safe side, ", " at one") == [
        f"{100 * min(high):.0f}",
        f"{100 * max(high):.0f}",
        str(len(high)),
        str(len(many)),
        *(f"{-100 * error:.0f}" for error in low),
    ]
    for metric, after, before in (("tpot", "such traffic: TPOT ", "(errors"), ("ttft", "it), TTFT ", ". Repeats")):
        own = [pair.skewed for pair in pairs() if pair.skewed.metric == metric]
        assert _numbers(SECTION, after, before) == [
            f"{100 * median(abs(row.error) for row in own):.1f}",
            str(sum(row.inside for row in own)),
            str(len(own)),
        ]
