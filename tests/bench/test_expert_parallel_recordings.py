"""A recording with expert parallelism is a row of its own, predicted from fingerprints with it alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.estimators.calibration import Calibration
from tests.bench import accuracy_families
from tests.bench.accuracy import RESULTS, by_other_methods, load, measured_errors, memory_row, predict_l3
from tests.bench.accuracy_measure import Recorded, kept_name, main
from tests.bench.accuracy_record import accuracy_records

MODEL = "Qwen3-30B-A3B"


def _kept() -> list[Recorded]:
    found = load(RESULTS / "degrees-h200-vllm-0.33")
    return [one for one in found if (one.model, one.tp, one.pp) == (MODEL, 2, 1)]


@cache
def without() -> Recorded:
    (found,) = (one for one in _kept() if not one.expert_parallel)
    return found


@cache
def with_it() -> Recorded:
    """Return the same numbers as if they had been recorded with it."""
    plain = without()
    profile = replace(
        plain.profile,
        timing=tuple(replace(point, expert_parallel=True) for point in plain.profile.timing),
        memory=tuple(replace(point, expert_parallel=True) for point in plain.profile.memory),
    )
    return replace(plain, profile=profile, expert_parallel=True)


def test_a_recording_of_before_is_without_it() -> None:
    assert not without().expert_parallel
    assert without().config == DeploymentConfig(tp=2, engine="vllm")
    assert with_it().config == replace(without().config, expert_parallel=True)
    assert from_json(to_json(with_it()), Recorded) == with_it()


def test_files_have_names_of_their_own() -> None:
    names = [kept_name(MODEL, WeightFormat.BITS16, 2, 1, one) for one in (False, True)]
    assert names == [f"{MODEL}-16bit-tp2-pp1.json.xz", f"{MODEL}-16bit-tp2-pp1-ep.json.xz"]
    assert all((RESULTS / "degrees-h200-vllm-0.33" / name).exists() for name in names)


def test_it_is_predicted_from_its_own_points() -> None:
    """The same numbers give the same predictions, and each prediction is under its own name."""
    plain, divided = (predict_l3(one, Calibration()) for one in (without(), with_it()))
    assert {row.variant for row in divided} == {"16bit tp=2 experts=parallel"}
    assert [replace(row, variant="16bit tp=2") for row in divided] == plain
    assert replace(memory_row(with_it()), variant="16bit tp=2") == memory_row(without())


def test_its_errors_are_kept_apart() -> None:
    """Errors of two models of other shapes: those with it move its predictions, those without it do not."""
    errors = measured_errors([without(), with_it()])
    assert sum(error.expert_parallel for error in errors) == len(errors) / 2 > 0

    def predicted(*, expert_parallel: bool) -> object:
        own = [error for error in errors if error.expert_parallel == expert_parallel]
        of_others = (replace(error, shape_hash=f"{number:016x}") for error in own for number in (1, 2))
        return predict_l3(with_it(), Calibration(tuple(of_others)))

    assert predicted(expert_parallel=False) == predict_l3(with_it(), Calibration())
    assert predicted(expert_parallel=True) != predict_l3(with_it(), Calibration())


def test_one_does_not_replace_the_other_among_the_newest() -> None:
    """The newer recording of one configuration counts, and these are of two configurations."""
    later = replace(with_it(), measured_at="2099-01-01T00:00:00+00:00")
    assert accuracy_families._what(later) != accuracy_families._what(without())
    row = accuracy_families._row("qwen3_moe", [without(), later], predict_l3(later, Calibration()))  # type: ignore[arg-type]
    assert row.models == (f"{MODEL} TP 2", f"{MODEL} TP 2 expert parallel")


def test_aiconfigurator_is_compared_with_divided_matrices_alone() -> None:
    """AIConfigurator's answers are of divided matrices, and so is what the datasheets say."""
    methods = {row.method for row in by_other_methods([without()])} - {
        row.method for row in by_other_methods([with_it()])
    }
    assert methods == {"AIConfigurator 0.12.0"}


def test_the_kept_one_drew_its_experts_uniformly_on_both_gpus() -> None:
    """A step waits for the GPU whose experts are chosen most; one that is chosen far more often would show."""
    (kept,) = (one for one in _kept() if one.expert_parallel)
    counts = [rank.expert_count for rank in kept.whole_memory]
    assert {rank.expert_routing for rank in kept.whole_memory} == {"uniform"}
    assert all(count is not None and count.experts == 128 and count.busiest < 1.15 for count in counts)
    assert kept.profile.graph_tokens == 4096


def test_the_kept_one_has_a_row_of_its_own() -> None:
    rows = accuracy_families.family_rows(["degrees-h200-vllm-0.33"])
    names = [row.models for row in rows if row.family == "qwen3_moe"]
    assert sorted(names) == [(f"{MODEL} TP 2",), (f"{MODEL} TP 2 expert parallel",)]


def test_a_report_s_record_names_it() -> None:
    (record,) = accuracy_records([with_it()])
    assert {row.config for row in record.rows} == {with_it().config}


@pytest.mark.parametrize("words", [[], ["--tp", "2", "--shards"]], ids=["one GPU", "one rank alone"])
def test_what_cannot_be_recorded_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["accuracy_measure", str(tmp_path / "out"), "model", "--expert-parallel", *words]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--expert-parallel" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
