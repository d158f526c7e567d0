"""The results that the table of docs/risk.md is generated from are of loads that the model was not built with."""

from __future__ import annotations

from pathlib import Path

import pytest

from fingerprint.config import Workload
from planner.intent import Traffic
from tests.bench.risk import GRIDS, Case, kept, limits_of, prediction

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


def test_the_model_predicts_what_was_recorded_of_it() -> None:
    own = GRIDS["independent"]
    for one in (c for c in kept(RESULTS) if c.case.startswith("gamma")):
        traffic = Traffic(burstiness=one.burstiness, input_cv=one.input_cv, output_cv=one.output_cv)
        work = Workload(one.slots, own.input_tokens, own.output_tokens)
        case = Case(one.case, one.slots, one.utilisation, traffic, work)
        foreseen = prediction(case)
        rate = one.utilisation / float(foreseen.service_s[0])
        for metric, limit in limits_of(case, foreseen).items():
            found = float(foreseen.misses(metric, limit, rate)[0])
            assert found == pytest.approx(one.missed[metric][0], abs=1e-3), (one.case, one.slots, metric)
