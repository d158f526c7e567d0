"""Quality of adapters by rank: the committed study, and the same script in small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from fingerprint.codec import from_json, to_json
from tests.bench.kept import read_kept
from tests.bench.variant_quality import CONTROLS, FULL, Sizes, Study, lora_name, run_study, table

PAGE = Path(__file__).parents[2] / "docs" / "adapters-measured.md"
SMALL = Sizes(
    facts=64,
    batch=64,
    pretraining_steps=120,
    steps=(("facts", 250), ("style", 100)),  # sums take minutes: 300 steps of one-digit ones teach half of them
    ranks=(1, 16),
    seeds=1,
    held_out=64,
)


def mean_of(study: Study, task: str, method: str, field: str) -> float:
    return mean(getattr(one, field) for one in study.outcomes if (one.task, one.method) == (task, method))


def recorded() -> Study:
    path = Path(__file__).with_name("results") / "variant_quality.json"
    return from_json(read_kept(path), Study, what=path.name)


@pytest.fixture(scope="module", params=["recorded", pytest.param("anew", marks=pytest.mark.long)])
def study(request: pytest.FixtureRequest) -> Study:
    """The committed study, and one seed of it on this machine: five minutes of one core."""
    return recorded() if request.param == "recorded" else run_study(replace(Sizes(), seeds=1))


def test_random_facts_need_rank(study: Study) -> None:
    """Exact match of a large table rises with the rank, and NLL falls."""
    methods = [*(lora_name(rank) for rank in study.sizes.ranks), FULL]
    exact = [mean_of(study, "facts", method, "exact_match") for method in methods]
    nll = [mean_of(study, "facts", method, "nll") for method in methods]
    assert exact == sorted(exact)
    assert nll == sorted(nll, reverse=True)
    assert exact[0] < 0.05
    assert exact[-1] > 0.95


def test_a_style_needs_no_rank(study: Study) -> None:
    for rank in study.sizes.ranks:
        assert mean_of(study, "style", lora_name(rank), "exact_match") > 0.95


def test_sums_need_more_rank_than_four(study: Study) -> None:
    """Rank 16 and 64 learn them in most seeds, in one of three they do not; in full all seeds do."""
    ranks = study.sizes.ranks
    exact = [mean_of(study, "addition", lora_name(rank), "exact_match") for rank in ranks]
    nll = [mean_of(study, "addition", lora_name(rank), "nll") for rank in ranks]
    assert exact == sorted(exact)
    assert nll == sorted(nll, reverse=True)
    assert ranks == (1, 4, 16, 64)
    assert max(exact[:2]) < 0.05
    assert min(exact[2:]) > 0.5
    for outcome in study.outcomes:
        if (outcome.task, outcome.method) == ("addition", FULL):
            assert outcome.exact_match > 0.9, outcome


def test_controls_fail(study: Study) -> None:
    for outcome in study.outcomes:
        if outcome.method in CONTROLS:
            assert outcome.exact_match < 0.05, outcome


def test_every_seed_has_every_method(study: Study) -> None:
    methods = {*CONTROLS, FULL, *(lora_name(rank) for rank in study.sizes.ranks)}
    expected = {
        (task, m, seed) for task, _ in study.sizes.steps for m in methods for seed in range(study.sizes.seeds)
    }
    found = [(outcome.task, outcome.method, outcome.seed) for outcome in study.outcomes]
    assert len(found) == len(expected)
    assert set(found) == expected


def test_the_page_has_the_table() -> None:
    assert table(recorded()) in PAGE.read_text()


@pytest.fixture(scope="module")
def small() -> Study:
    return run_study(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["facts", "style"])
def test_the_study_in_small(small: Study, task: str) -> None:
    """After so few steps a higher rank is ahead on either task; the whole study has a style that needs none."""
    nll = {outcome.method: outcome.nll for outcome in small.outcomes if outcome.task == task}
    exact = {outcome.method: outcome.exact_match for outcome in small.outcomes if outcome.task == task}
    assert exact[FULL] > 0.9
    assert exact[lora_name(1)] < 0.1 < exact[lora_name(16)]
    assert nll[FULL] < nll[lora_name(16)] < nll[lora_name(1)]
    assert all(nll[control] > nll[lora_name(1)] and exact[control] < 0.1 for control in CONTROLS)


@pytest.mark.slow
def test_a_study_is_its_own_json(small: Study) -> None:
    assert from_json(to_json(small), Study) == small
