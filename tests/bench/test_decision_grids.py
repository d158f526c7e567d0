"""Decision grids: where the truth of a decision is from."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.config import WeightFormat, Workload
from tests.bench.accuracy import Recorded, load, truths
from tests.bench.aiconfigurator_static import MAX_PROMPT_TOKENS, h200_grid, written
from tests.bench.decision_grids import bench_cells, format_cells, splitwise_cells, trtllm_cells
from tests.bench.decision_own import own_cells
from tests.bench.decision_rules import values, wishes
from tests.bench.roofline_tables import Tables

RECORDINGS = Path(__file__).parent / "results/h200"


def as_if_fp8(one: Recorded) -> Recorded:
    """The same recording under another name of its format, the whole model twice as fast."""
    profile = replace(
        one.profile,
        memory=tuple(replace(point, weights=WeightFormat.FP8) for point in one.profile.memory),
        timing=tuple(replace(point, weights=WeightFormat.FP8) for point in one.profile.timing),
    )
    whole = tuple(replace(p, runs=tuple(replace(run, e2e_s=run.e2e_s / 2) for run in p.runs)) for p in one.whole)
    return replace(one, weights=WeightFormat.FP8, profile=profile, whole=whole)


@pytest.mark.skipif(not list(RECORDINGS.glob("*.json.xz")), reason="nothing was recorded")
def test_own_recordings_are_cells_where_there_is_something_to_decide() -> None:
    """A single recording of a model is no decision; a second one, under another configuration, is."""
    one = load(RECORDINGS)[0]
    assert own_cells([one]) == []
    cells = own_cells([one, as_if_fp8(one)], [f"somebody/{one.model}"])
    assert len(cells) == len(truths(one))
    for cell, truth in zip(cells, truths(one), strict=True):
        first, second = sorted(cell.alternatives, key=lambda a: a.config.weights)
        assert cell.model == f"somebody/{one.model}"
        assert (first.config.weights, second.config.weights) == (WeightFormat.BITS16, WeightFormat.FP8)
        assert first.e2e_s == pytest.approx(truth.ttft_s + 64 * truth.tpot_s)
        assert second.e2e_s == pytest.approx(first.e2e_s / 2)
        assert {e.config for e in cell.estimates} == {first.config, second.config}


@pytest.mark.skipif("ISERVE_REFERENCE_DATA" not in os.environ, reason="ISERVE_REFERENCE_DATA is not set")
def test_every_cell_of_the_public_tables_is_a_decision() -> None:
    folder = Path(os.environ["ISERVE_REFERENCE_DATA"]) / "reference"
    tables, configs = Tables(folder), json.loads((folder / "model-configs.json").read_text())
    cells = [*bench_cells(tables), *format_cells(tables), *splitwise_cells(tables), *trtllm_cells(tables, configs)]
    assert len({cell.table for cell in cells}) == 18
    for cell in cells:
        configs_seen = [a.config for a in cell.alternatives]
        assert len(set(configs_seen)) == len(configs_seen) > 1
        for wish in wishes(cell):
            assert all(value > 0 for value in values(cell, wish.metric) or ())
    # Llama-2-70B on A100, 512/128, batch 1, README of the tables: 8 GPUs at 0.4349 of 400 W for 5.79 s
    energy = [
        a.energy_j for c in cells for a in c.alternatives if c.workload == Workload(1, 512, 128) and a.energy_j
    ]
    assert energy[2] == pytest.approx(8 * 0.4349 * 400 * (0.09431 + 127 * 0.0448523))


def test_the_h200_grid_holds_what_the_comparison_is_about() -> None:
    points = list(h200_grid())
    assert len(points) == len(set(points)) == 11 * 2 * 2 * 15  # cases, backends, formats, sizes
    assert max(p.batch * p.input_tokens for p in points) == MAX_PROMPT_TOKENS


def test_answers_are_written_one_per_line() -> None:
    document = {"date": "2026-11-21", "answers": [{"a": 1}, {"a": 2.5}]}
    assert json.loads(written(document)) == document
    assert '\n  {"a":1},\n  {"a":2.5}\n' in written(document)
