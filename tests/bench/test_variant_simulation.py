"""The simulator next to the recorded contest of variants: what must not get worse unseen."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from fingerprint.codec import from_json
from fingerprint.estimators.adapter_slots import load_s
from fingerprint.load_time import RECORDED_TENSORS
from fingerprint.lora.slot_bytes import adapter_bytes, adapter_tensors
from tests.bench.accuracy import RESULTS
from tests.bench.kept import read_kept
from tests.bench.lora_steps import FILE as STEPS_FILE
from tests.bench.lora_steps_table import LoraSteps
from tests.bench.variant_contest import VariantContest
from tests.bench.variant_simulation import (
    COLD_TENSORS,
    RECORDING,
    Played,
    measured,
    phases,
    predicted,
    simulated_model,
    table,
)
from tests.iserve.joint_plans import spec_of


@pytest.fixture(scope="module")
def found() -> VariantContest:
    return from_json(read_kept(RESULTS / RECORDING), VariantContest, what=RECORDING)


@pytest.fixture(scope="module")
def said(found: VariantContest) -> list[Played]:
    return predicted(found, "profile")


@pytest.mark.slow
def test_the_phases_are_those_that_were_played(found: VariantContest) -> None:
    """The bench draws the same adapters as the contest did, which it checks itself."""
    names = [phase.name for phase in phases(found)]
    assert names[1:] == [true.phase for true in measured(found)]
    assert len(names) == 10


def test_loads_are_those_of_the_recording_of_steps() -> None:
    """Means by rank within 10%, as its constants say."""
    kept = from_json(read_kept(RESULTS / "lora_steps_h200.json.gz"), LoraSteps, what=STEPS_FILE)
    spec = simulated_model("roofline").spec
    for rank in (8, 16, 64):
        took_s = [one.load_s for one in kept.loads if one.rank == rank]
        assert load_s(adapter_bytes(spec, rank)) == pytest.approx(sum(took_s) / len(took_s), rel=0.1)
        assert all(load_s(adapter_bytes(spec, rank)) == pytest.approx(one, rel=0.24) for one in took_s)


@pytest.mark.slow
def test_throughput_of_adapters_that_stay_loaded_is_within_a_tenth(
    found: VariantContest, said: list[Played]
) -> None:
    """Hold what was found; TTFT and the cold adapters are missed, and in the docs as they fall."""
    for true, one in zip(measured(found), said, strict=True):
        if true.phase != "cold":
            assert one.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.1)
            assert one.loads == 0


@pytest.mark.slow
def test_loads_of_a_thousand_adapters_are_within_a_tenth(found: VariantContest, said: list[Played]) -> None:
    """Loads, evictions and tokens, by the product's law of a load, of which the contest is no part."""
    (true,), (cold,) = ([one for one in played if one.phase == "cold"] for played in (measured(found), said))
    assert cold.loads == pytest.approx(true.loads, rel=0.1)
    assert cold.evictions == pytest.approx(true.evictions, rel=0.1)
    assert cold.hit_rate == pytest.approx(true.hit_rate, rel=0.1)
    assert cold.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.1)


@pytest.mark.slow
def test_the_page_has_the_table(found: VariantContest, said: list[Played]) -> None:
    page = (RESULTS.parents[2] / "docs/simulation.md").read_text()
    assert table([*measured(found)], said) in page


@pytest.mark.slow
def test_with_a_load_of_every_matrix_the_goal_is_missed_as_the_decision_says(found: VariantContest) -> None:
    page = (RESULTS.parents[2] / "docs/decisions/0050-loads-in-plans.md").read_text()
    (true,) = (one for one in measured(found) if one.phase == "cold")
    cold = predicted(found, "profile", RECORDED_TENSORS)[-1]
    short = 1 - cold.loads / true.loads
    assert 0.1 < short < 0.15
    assert f"| {cold.loads} ({short:.0%} few) | {cold.hit_rate:.1%} | {cold.tokens_per_s:,.0f} |" in page


@pytest.mark.parametrize(("layers", "tensors"), [(1, 14), (2, 28)])
@pytest.mark.parametrize("name", ["", "qwen3-8b/", "own_kernels/", "own_kernels/qwen3-8b/"])
def test_the_fixed_part_of_a_load_is_its_tensors(name: str, layers: int, tensors: int) -> None:
    """Loads of fingerprints, which no constant was fitted on: a part of each load alone would be far longer."""
    rows = json.loads(read_kept(RESULTS / f"variant_costs_h200/{name}fingerprints-16.json.xz"))["rows"]
    (took_s,) = (row["loads_s"] for row in rows if row["kind"] == "loads" and row["layers"] == layers)
    spec = spec_of("Qwen/Qwen3-8B" if "qwen3" in name else "meta-llama/Llama-3.1-8B")
    num_bytes = adapter_bytes(replace(spec, num_layers=layers), 16)
    middle_s = statistics.median(took_s)
    assert load_s(num_bytes, tensors) == pytest.approx(middle_s, rel=0.5)
    assert load_s(num_bytes) > 5 * middle_s


def test_a_load_takes_longer_by_its_tensors(found: VariantContest) -> None:
    """Adapters of the contest update q and v; plans count every matrix, for which the law was fitted."""
    assert found.cold is not None
    num_bytes, spec = found.cold.adapter_bytes, spec_of("meta-llama/Llama-3.1-8B")
    assert adapter_tensors(spec) == RECORDED_TENSORS
    assert load_s(num_bytes, adapter_tensors(spec)) == load_s(num_bytes) == pytest.approx(0.0587, rel=0.01)
    assert load_s(num_bytes, COLD_TENSORS) == pytest.approx(0.0206, rel=0.01)
