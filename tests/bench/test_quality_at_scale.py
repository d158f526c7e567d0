"""Quality at a larger scale: the order of the cases, the tables, and the same run in small on a CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.delta import FORMATS
from fingerprint.errors import ConfigError
from tests.bench.delta_quality import RANDOM, ROUNDED, TEXTS, WHOLE
from tests.bench.quality_at_scale import LEARNED_BEFORE, SCALES, case_order, run_seed
from tests.bench.quality_at_scale_studies import (
    Case,
    ScaleOutcome,
    SeedStudy,
    begun,
    read_studies,
    write_study,
)
from tests.bench.quality_at_scale_tables import formats_table, ranks_table
from tests.bench.variant_quality import BASE, FULL, LETTERS, OTHER_BASE, lora_name

PAGE = Path(__file__).parents[2] / "docs" / "deltas.md"
KEPT = Path(__file__).with_name("results") / "quality_at_scale_h200"
LARGE, TINY = SCALES["large"], SCALES["tiny"]


def test_each_task_has_every_format_rank_and_control() -> None:
    cases = case_order(LARGE)
    assert len(cases) == len(set(cases))
    for task in ("facts", "addition", "style"):
        methods = {(case.method, case.calibration) for case in cases if case.task == task}
        ranks = {(lora_name(rank), "") for rank in LARGE.sizes.ranks}
        deltas = {(name, calibration) for name in FORMATS for calibration in (TEXTS, RANDOM, ROUNDED)}
        whole = {(f"{WHOLE} {name}", calibration) for name in FORMATS for calibration in (TEXTS, ROUNDED)}
        assert methods - {(OTHER_BASE, "")} == {(BASE, ""), (FULL, "")} | ranks | deltas | whole


def test_the_most_important_cases_are_first() -> None:
    first = [case.method for case in case_order(LARGE)[:9]]
    deltas = ["int2", "sparse24-int4", "int4", "int3", f"{WHOLE} int2", f"{WHOLE} int4"]
    assert first == [BASE, BASE, FULL, *deltas]


def outcome(task: str, method: str, exact_match: float, *, bits: float = 0.0, kept: int = 100) -> ScaleOutcome:
    return ScaleOutcome(
        case=Case(task=task, method=method, calibration=TEXTS if bits else ""),
        exact_match=exact_match,
        nll=1.0,
        trained_params=0,
        error=0.0,
        bits=bits,
        kept_bytes=kept,
        model_bytes=100,
        seconds=1.0,
    )


def study(seed: int, *outcomes: ScaleOutcome) -> SeedStudy:
    return SeedStudy(
        date="2026-11-28",
        machine="a GPU",
        torch="2",
        transformers="5",
        seed=seed,
        model_params=50,
        scale=LARGE,
        outcomes=outcomes,
    )


@pytest.fixture
def studies() -> list[SeedStudy]:
    delta = outcome("facts", "int2", 0.98, bits=2.0, kept=20)
    return [
        study(0, outcome("facts", FULL, 1.0), delta, outcome("facts", lora_name(4), 0.5, kept=5)),
        study(1, outcome("facts", FULL, 0.99), outcome(LEARNED_BEFORE, BASE, 1.0)),
    ]


def test_formats_have_ratios_next_to_the_papers_and_say_what_is_missing(studies: list[SeedStudy]) -> None:
    *_, full, delta = (line.strip("| ").split("|") for line in formats_table(studies).splitlines())
    missing = ["not measured"] * 2
    assert [cell.strip() for cell in full][2:] == ["99.5 (99.0 to 100.0)%", *missing, "", "1.00", "1.00"]
    assert [cell.strip() for cell in delta][2:] == ["98.0%, 1 of 2 seeds", *missing, "8.00", "5.00"]


def test_ranks_and_deltas_have_a_row_for_each_task_and_one_for_bytes(studies: list[SeedStudy]) -> None:
    head, _, own, facts, *_, size = (line.strip("| ").split(" | ") for line in ranks_table(studies).splitlines())
    assert (own[0], own[1]) == (LEARNED_BEFORE, "100.0%, 1 of 2 seeds")
    assert facts[head.index(lora_name(4))] == "50.0%, 1 of 2 seeds"
    assert facts[head.index(lora_name(16))] == "not measured"
    assert (size[head.index(lora_name(4))], size[head.index("int2")]) == ("5.0%", "20.0%")


def test_without_results_the_tables_say_so(tmp_path: Path) -> None:
    assert formats_table(read_studies(tmp_path / "none")) == "Not measured."


@pytest.mark.parametrize("changed", [{"scale": TINY}, {"machine": "a CPU"}, {"torch": "3"}, {"transformers": "6"}])
def test_a_study_goes_on_where_it_was_begun_alone(
    tmp_path: Path, studies: list[SeedStudy], changed: dict[str, object]
) -> None:
    file, empty = tmp_path / "seed-0.json", study(0)
    assert begun(file, empty) == empty
    write_study(file, studies[0])
    assert begun(file, replace(empty, date="2026-11-29")) == studies[0]
    with pytest.raises(ConfigError, match=f"another {next(iter(changed))}"):
        begun(file, replace(empty, **changed))


def test_the_page_shows_what_is_kept() -> None:
    page, kept = PAGE.read_text(), read_studies(KEPT)
    assert formats_table(kept) in page
    assert ranks_table(kept) in page


@pytest.fixture(params=[0, 1, 2])
def kept(request: pytest.FixtureRequest) -> dict[tuple[str, str], float]:
    """Exact matches of a kept seed's cases, calibrated on texts of their own, by task and method."""
    (study,) = (each for each in read_studies(KEPT) if each.seed == request.param)
    cases = ((each.case, each.exact_match) for each in study.outcomes)
    return {(case.task, case.method): match for case, match in cases if case.calibration in ("", TEXTS)}


def test_deltas_of_two_bits_or_more_answer_as_the_fine_tune_in_each_seed(
    kept: dict[tuple[str, str], float],
) -> None:
    for task in ("facts", "addition"):
        assert kept[task, FULL] > 0.99
        for method in ("int2", "int3", "int4", "sparse24-int4"):
            if (task, method) in kept:
                assert kept[task, method] > kept[task, FULL] - 0.01
        assert {(task, "int2"), (task, "sparse24-int4"), (task, "int4")} <= kept.keys()


def test_whole_weights_in_two_bits_small_adapters_and_bases_fail_in_each_seed(
    kept: dict[tuple[str, str], float],
) -> None:
    assert kept[LEARNED_BEFORE, BASE] > 0.99
    assert kept["facts", BASE] == kept["addition", BASE] == 0
    assert kept["facts", f"{WHOLE} int2"] < kept["facts", "int2"] - 0.05
    assert kept["facts", lora_name(1)] < 0.01


def test_deltas_of_the_style_and_of_sums_are_as_good_as_the_fine_tune_in_each_seed(
    kept: dict[tuple[str, str], float],
) -> None:
    assert kept["style", BASE] < 0.5
    for method in (FULL, "int2", "sparse24-int4", lora_name(1)):
        assert kept["style", method] == 1.0
    for task in ("facts", "addition", "style"):
        for method in ("int2", "sparse24-int4"):
            assert kept[task, method] >= kept[task, FULL] - 3e-4
    for method, least, most in ((f"{WHOLE} sparse24-int4", 30, 39), (f"{WHOLE} int2", 15, 25)):
        assert least <= round(100 * (kept["facts", FULL] - kept["facts", method])) <= most


def test_rank_16_learns_the_facts_that_smaller_ranks_do_not_in_each_seed(
    kept: dict[tuple[str, str], float],
) -> None:
    assert kept["facts", lora_name(16)] > 0.98
    assert kept["facts", lora_name(4)] < 0.001
    assert kept["addition", lora_name(16)] == 1.0


def test_rank_64_guesses_each_symbol_of_a_fact_in_each_seed() -> None:
    """Training failed at the rate of all ranks: of 8 symbols of 32 and an end the end alone is known."""
    guess = LARGE.sizes.fact_symbols * math.log(LETTERS) / (LARGE.sizes.fact_symbols + 1)
    for study in read_studies(KEPT):
        (found,) = (each for each in study.outcomes if each.case == Case(task="facts", method=lora_name(64)))
        assert found.exact_match == 0
        assert found.nll == pytest.approx(guess, rel=0.002)


def test_small_ranks_fail_on_sums_in_one_seed_of_three() -> None:
    for rank, failed in ((1, 0.0425), (4, 0.0995)):
        case = Case(task="addition", method=lora_name(rank))
        found = {
            study.seed: each.exact_match
            for study in read_studies(KEPT)
            for each in study.outcomes
            if each.case == case
        }
        assert found == {0: failed, 1: 1.0, 2: 1.0}


def test_what_the_page_says_was_not_run_is_not_kept() -> None:
    cases = {each.case for study in read_studies(KEPT) for each in study.outcomes}
    assert not [case for case in cases if case.method == OTHER_BASE or case.calibration not in ("", TEXTS)]
    assert Case(task="addition", method=lora_name(64)) not in cases
    assert {case.method for case in cases if case.task == "style"} & set(map(lora_name, (4, 16, 64))) == set()


@pytest.mark.long
def test_a_run_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    """Failed cases are tried again, and those that are done are not; the control waits for another seed's base."""
    scale = replace(TINY, sizes=replace(TINY.sizes, facts=32, steps=(("facts", 10),), ranks=(2,)))
    good = [case for case in case_order(scale) if case.method in (BASE, FULL, "int2", lora_name(2), OTHER_BASE)]
    good = [case for case in good if case.calibration in ("", TEXTS)]
    whole = Case(task="facts", method=f"{WHOLE} int2", calibration=TEXTS)
    bad = Case(task="facts", method="int5", calibration=TEXTS)
    folders = {"out": tmp_path, "work": tmp_path / "work", "device": "cpu"}
    assert run_seed(scale, 0, [whole], **folders, until=0.0) == 0
    assert read_studies(tmp_path) == []
    assert run_seed(scale, 0, [*good, bad], **folders) == 1
    (first,) = read_studies(tmp_path)
    assert [one.case for one in first.outcomes] == [case for case in good if case.method != OTHER_BASE]
    assert run_seed(scale, 1, [case for case in good if case.method == BASE], **folders) == 0
    assert run_seed(scale, 0, [*good, whole], **folders) == 0
    again, other = read_studies(tmp_path)
    assert again.outcomes[: len(first.outcomes)] == first.outcomes
    assert [one.case.method for one in again.outcomes[-2:]] == [OTHER_BASE, f"{WHOLE} int2"]
    assert [one.case.method for one in other.outcomes] == [BASE, BASE]
    delta = next(one for one in again.outcomes if one.case.method == "int2")
    assert 2 < delta.bits < 5  # small matrices are padded
    assert 0 < delta.error < 1
    assert delta.kept_bytes < delta.model_bytes == 2 * again.model_params
