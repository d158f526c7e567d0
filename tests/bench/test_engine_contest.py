"""The recorded contest on two H200s, and the arithmetic of its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from fingerprint.codec import from_json
from tests.bench.engine_contest import Contest, Figures, Played, figures, table
from tests.bench.kept import read_kept

RESULTS = Path(__file__).with_name("results") / "engine_contest"
PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
ORDER = ("rule", "ours", "ours-rates-given", "most-TP")


@pytest.fixture(scope="module")
def contest() -> Contest:
    return from_json(read_kept(RESULTS / "plans.json.gz"), Contest, what="plans")


@pytest.fixture(scope="module")
def played() -> list[Played]:
    files = [RESULTS / f"contest-{name}.json.gz" for name in ORDER]
    return [from_json(read_kept(path), Played, what=path.name) for path in files]


def measured(contest: Contest, one: Played) -> list[Figures]:
    plan = contest.plan(one.contestant)
    return [figures(contest, plan, load, found) for load, found in zip(contest.loads, one.answered, strict=True)]


def test_every_request_was_answered_by_a_client_that_kept_its_schedule(contest, played):
    for one in played:
        assert [found.failures for found in one.answered] == [(), ()]
        assert max(found.late_s for found in one.answered) < 0.01
        assert all(each.answered == 1.0 for each in measured(contest, one))


def test_the_page_has_the_table(contest, played):
    assert table(contest, played) in PAGE.read_text()


def test_a_gpu_is_held_by_at_least_its_reserved_part_and_at_most_whole(contest, played):
    for one in played:
        plan = contest.plan(one.contestant)
        reserved = sum(r.bytes_per_gpu * len(r.devices) for r in plan.replicas) / contest.total_bytes
        for load, found, each in zip(contest.loads, one.answered, measured(contest, one), strict=True):
            seconds = max(found.last_s)
            assert reserved * seconds <= each.gpu_s * len(load.at_s) * 1.0001
            assert each.gpu_s * len(load.at_s) <= 2 * 2 * seconds  # memory and time may be of different tenants
