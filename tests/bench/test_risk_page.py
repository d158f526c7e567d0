"""The results that the table of docs/risk.md is generated from are of loads that the model was not built with."""

from __future__ import annotations

from pathlib import Path

from tests.bench.risk import GRIDS, kept

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/bench/results/risk_independent.json.gz"


def test_the_results_are_of_all_loads_of_the_grid_and_of_none_that_the_model_was_built_with() -> None:
    found, own, built = kept(RESULTS), GRIDS["independent"], GRIDS["built"]
    gamma = [c for c in found if c.case.startswith("gamma")]
    assert {(c.slots, c.utilisation, c.burstiness, c.output_cv) for c in gamma} == {
        (slots, u, cv, lengths)
        for slots in own.slots
        for u in own.utilisations
        for cv in own.cvs
        for lengths in own.length_cvs
    }
    traces = {"azure conv", "azure code"}
    moving = traces | {f"{trace}, path" for trace in traces} | {"on and off", "drifting"}
    assert {c.case for c in found if c not in gamma} == moving
    for name in ("slots", "utilisations", "cvs", "length_cvs"):
        assert not set(getattr(own, name)) & set(getattr(built, name)), name
    assert own.seed != built.seed
