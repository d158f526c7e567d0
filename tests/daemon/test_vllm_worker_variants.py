"""The profiling worker with slots for adapters: real daemon, shim, wrapper, HTTP and client; vLLM stands in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.vllm.adapter import VllmEngine
from fingerprint import variant_steps
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError, EngineError, UnsupportedModelError
from fingerprint.estimators.measured_variants import measured_cost
from fingerprint.families import load_spec
from fingerprint.random_variants import write_random_variant
from fingerprint.variant_measurements import VariantKind, VariantMeasurement
from fingerprint.variant_step_plan import step_plan
from fingerprint.variant_steps import measure_variant_steps
from iserve.controller.profiling import last_words
from tests.daemon.engines.vllm_stand_in import costs
from tests.daemon.profiling_house import LAYERS, House, bursts, house, kept, session

pytestmark = pytest.mark.process

__all__ = ["house", "kept", "session"]  # fixtures
RANK, SLOTS = 16, 4


def load(house: Any, session: Any, layers: int = 2, slots: int = SLOTS) -> Path:
    folder: Path = house.fingerprint(layers)
    session.load_with_slots(
        folder, num_layers=layers, max_batch=8, max_context_tokens=512, slots=slots, rank=RANK if slots else 0
    )
    return folder


def adapters(folder: Path, count: int, rank: int = RANK) -> list[Path]:
    found = [folder.with_name(f"{folder.name}-adapter-{rank}-{number}") for number in range(count)]
    for number, target in enumerate(found):
        write_random_variant(folder, target, VariantKind(rank), number)
    return found


class TestBursts:
    def test_adapters_are_in_each_repeat_of_a_forward(self, house, kept) -> None:
        """Prompts in a call, decode steps in graphs."""
        loads_s = kept.load_variants(adapters(load(house, kept), SLOTS))
        assert len(loads_s) == SLOTS
        assert min(loads_s) >= costs.LORA_LOAD_S
        for active in (0, 1, 3):
            for run in bursts(kept, batch=4, repeat=4, active=active):
                prompt, *decode = run.steps
                for step in (prompt, *decode):
                    added_s = costs.LORA_ONCE_S * bool(active) + 2 * costs.lora_s(step.tokens, active, SLOTS)
                    base_s = costs.OTHER_S + 2 * costs.layer_s(step.tokens, step.attention_pairs)
                    if step is not prompt:
                        base_s = costs.OTHER_S + 2 * costs.layer_s(step.tokens, step.tokens)
                    assert step.forward_s == pytest.approx(4 * (base_s + added_s))
                    lead_s = costs.LEAD_S + costs.SLOTS_LEAD_S + costs.LORA_LEAD_S * bool(active)
                    assert step.lead_s == pytest.approx(lead_s)

    def test_variants_that_are_not_loaded_cannot_be_asked_for(self, house, kept) -> None:
        kept.load_variants(adapters(load(house, kept), 1))
        with pytest.raises(ConfigError, match="2 variants, of which 1"):
            bursts(kept, active=2)

    def test_a_start_has_none_of_the_variants_of_the_one_before(self, house, kept) -> None:
        kept.load_variants(adapters(load(house, kept), 1))
        load(house, kept, slots=0)
        with pytest.raises(ConfigError, match="1 variants, of which 0"):
            bursts(kept, active=1)

    def test_a_burst_beyond_the_room_that_was_asked_for_is_refused(self, house, kept) -> None:
        folder = house.fingerprint(1)
        kept.load_with_slots(
            folder, num_layers=1, max_batch=8, max_context_tokens=512, slots=SLOTS, rank=RANK, kv_tokens=600
        )
        assert bursts(kept, batch=1, input_tokens=500, output_tokens=2)
        with pytest.raises(ConfigError) as refused:
            bursts(kept, batch=2, input_tokens=500, output_tokens=2)
        assert "600" in str(refused.value)

    def test_what_vllm_does_not_load_is_named(self, house, kept) -> None:
        folder = load(house, kept)
        (larger,) = adapters(folder, 1, rank=64)
        with pytest.raises(EngineError, match="rank 64 is greater"):
            kept.load_variants([larger])

    def test_a_class_without_slots_is_known_by_the_log_of_its_engine(self, house, kept) -> None:
        """The engine's own process prints the words; the worker itself only hears that it ended."""
        folder = house.fingerprint(2, start_error="LlamaForCausalLM does not support LoRA yet.")
        with pytest.raises(EngineError) as refused:
            kept.load_with_slots(folder, num_layers=2, max_batch=8, max_context_tokens=512, slots=4, rank=RANK)
        assert "LoRA" not in str(refused.value)
        spec = house.node.client.worker(kept._handle.worker_id).spec
        assert type(last_words(VllmEngine(), spec, refused.value, house.log(kept))) is UnsupportedModelError


@pytest.fixture
def fewest_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out further rounds, with which a measurement fills its budget: by the stand-in's clock they repeat."""
    monkeypatch.setattr(variant_steps, "_MOST_ROUNDS", variant_steps._FEWEST_ROUNDS)


def measured_of(house: House, work: Workload, step_tokens: int) -> VariantMeasurement:
    """Measure fingerprints of one and two layers of eight, repeated, with 32 slots and 8."""
    spec = load_spec(house.model)
    assert spec.num_layers == LAYERS

    def variant(layers: Sequence[int], kind: VariantKind, number: int) -> tuple[Path, int]:
        folder = house.model / f"variants-{len(layers)}"
        target = folder / str(number)
        folder.mkdir(exist_ok=True)
        return target, write_random_variant(house.fingerprint(len(layers)), target, kind, number)

    with house.target(step_tokens) as target:
        measured = measure_variant_steps(
            spec,
            lambda: target.open(tp=1, pp=1),
            lambda layers: house.fingerprint(len(layers)),
            variant,
            step_plan(spec, work, VariantKind(RANK), budget_s=20.0, step_tokens=step_tokens),
        )
    assert measured.failure == ""
    return measured


@pytest.mark.usefixtures("fewest_rounds")
def test_prompts_of_the_whole_model_follow_from_its_fingerprints(house, tmp_path) -> None:
    """Up to 4,096 tokens, which a step of this engine takes."""
    config = json.loads((house.model / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    measured = measured_of(House(house.node, house.folder, tmp_path), Workload(4, 2048, 17), 4096)
    cost = measured_cost([measured], LAYERS, DeploymentConfig(engine="vllm", adapter_slots=16, adapter_rank=RANK))
    assert cost is not None
    for batch, tokens, active in ((1, 3000, 1), (1, 2048, 1), (2, 2048, 2)):
        steps = costs.LORA_ONCE_S + LAYERS * costs.lora_s(batch * tokens, active, 16)
        truth_s = steps + costs.LORA_LEAD_S + costs.SLOTS_LEAD_S
        work = Workload(batch=batch, input_tokens=tokens, output_tokens=1)
        found = cost.prompts_s(work, 0.0, 0.0, float(active))
        assert found.value == pytest.approx(truth_s, rel=0.05)
        assert found.low <= truth_s <= found.high


@pytest.mark.usefixtures("fewest_rounds")
def test_costs_of_the_whole_model_follow_from_its_fingerprints(house) -> None:
    measured = measured_of(house, Workload(batch=8, input_tokens=200, output_tokens=17), 256)
    config = DeploymentConfig(engine="vllm", adapter_slots=16, adapter_rank=RANK)
    cost = measured_cost([measured], LAYERS, config)
    assert cost is not None
    for rows, active in ((8, 1), (8, 8), (3, 2)):
        truth_s = costs.LORA_ONCE_S + LAYERS * costs.lora_s(rows, active, 16)
        truth_s += costs.LORA_LEAD_S + costs.SLOTS_LEAD_S
        assert cost.step_s(rows, active).value == pytest.approx(truth_s, rel=0.05)
    assert cost.step_s(8, 0).value == pytest.approx(costs.SLOTS_LEAD_S, rel=0.05)
