"""Where the truth of a decision comes from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import BadInputError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from tests.bench.aiconfigurator_static import MAX_PROMPT_TOKENS, h200_grid, written
from tests.bench.decision_grids import (
    Grid,
    GridPoint,
    bench_cells,
    format_cells,
    own_cells,
    splitwise_cells,
    trtllm_cells,
)
from tests.bench.decision_rules import values, wishes
from tests.bench.roofline_tables import Tables

CONFIGS = {
    "made-up": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
}


def point(tp: int, ttft_s: float, tpot_s: float, workload: Workload) -> GridPoint:
    estimator = RooflineEstimator(read_spec(CONFIGS["made-up"]), gpu_spec("h200"))
    estimate = estimator.estimate(DeploymentConfig(tp=tp), workload)
    return GridPoint(model="made-up", estimate=estimate, ttft_s=ttft_s, tpot_s=tpot_s, memory_bytes=tp * 2**30)


def test_own_measurements_are_cells_by_model_and_workload(tmp_path: Path) -> None:
    """Where one configuration alone was measured there is nothing to decide."""
    one, other = Workload(1, 128, 65), Workload(8, 128, 65)
    points = (point(1, 0.5, 0.01, one), point(2, 0.4, 0.005, one), point(1, 0.5, 0.01, other))
    grid = Grid(machine="here", date="2026-11-21", engine="vLLM 0.24.0", gpu="h200-sxm", points=points)
    file = tmp_path / "grid.json"
    file.write_bytes(to_json(grid))
    (cell,) = own_cells(file, CONFIGS)
    assert (cell.workload, cell.engine) == (one, "vLLM")
    assert [a.e2e_s for a in cell.alternatives] == [pytest.approx(1.14), pytest.approx(0.72)]
    assert cell.estimates == (points[0].estimate, points[1].estimate)
    assert {"min-cost", "min-memory"} <= {wish.name for wish in wishes(cell)}


def test_a_file_that_is_no_grid_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "grid.json"
    file.write_text('{"machine": "here"}')
    with pytest.raises(BadInputError, match=r"grid\.json is not a valid Grid"):
        own_cells(file, CONFIGS)


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
