"""The simulator next to the recorded contest of variants: what must not get worse unseen."""

from __future__ import annotations

import pytest

from fingerprint.codec import from_json
from fingerprint.estimators.adapter_slots import load_s
from fingerprint.lora.slot_bytes import adapter_bytes
from tests.bench.accuracy import RESULTS
from tests.bench.kept import read_kept
from tests.bench.lora_steps import FILE as STEPS_FILE
from tests.bench.lora_steps import LoraSteps
from tests.bench.variant_contest import VariantContest
from tests.bench.variant_simulation import RECORDING, cold_load_s, measured, phases, predicted, simulated_model


@pytest.fixture(scope="module")
def found() -> VariantContest:
    return from_json(read_kept(RESULTS / RECORDING), VariantContest, what=RECORDING)


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
def test_throughput_of_adapters_that_stay_loaded_is_within_a_tenth(found: VariantContest) -> None:
    """Hold what was found; TTFT and the cold adapters are missed, and in the docs as they fall."""
    for true, said in zip(measured(found), predicted(found, "profile", "load"), strict=True):
        if true.phase != "cold":
            assert said.tokens_per_s == pytest.approx(true.tokens_per_s, rel=0.1)
            assert said.loads == 0


def test_a_load_with_fewer_tensors_is_shorter_where_the_fixed_part_is_theirs(found: VariantContest) -> None:
    assert found.cold is not None
    of_load, of_tensors = (cold_load_s(found.cold.adapter_bytes, by) for by in ("load", "tensors"))
    assert of_load == load_s(found.cold.adapter_bytes)
    assert of_tensors == pytest.approx(0.0206, rel=0.01)
