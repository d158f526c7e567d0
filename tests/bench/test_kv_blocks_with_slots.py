"""KV blocks that vLLM 0.33 kept next to slots on an H200, against those without less the bytes that plans count.

The rows are those of whole models and of their fingerprints (``variant_costs_h200``, ``lora_contest_h200``): the
room for KV of an engine with slots is that of one without less ``reserved_bytes``. What is left, 0.3% of the
blocks with adapters and 0.4 and 1.0% with deltas, is vLLM's own estimate of its graphs, 0.3 GiB larger with
adapters, and what deltas add to activations.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fingerprint.config import DeploymentConfig, SlotFormat
from fingerprint.lora.slot_bytes import reserved_bytes
from fingerprint.model_spec import ModelSpec
from tests.bench.kept import read_kept
from tests.iserve.joint_plans import LLAMA, spec_of

RESULTS = Path(__file__).parent / "results"
QWEN = "Qwen/Qwen3-8B"
WITHIN = 0.01
RANK = 16
WHOLE = {
    "variant_costs_h200/whole-16.json.xz": (LLAMA, 32),
    "variant_costs_h200/whole-int2.json.xz": (LLAMA, 8),
    "variant_costs_h200/qwen3-8b/whole-16.json.xz": (QWEN, 32),
    "variant_costs_h200/qwen3-8b/whole-int2.json.xz": (QWEN, 8),
    "variant_costs_h200/own_kernels/qwen3-8b/whole-16.json.xz": (QWEN, 32),
}
FINGERPRINTS = {
    "variant_costs_h200/fingerprints-16.json.xz": "variant_costs_h200/whole-16.json.xz",
    "variant_costs_h200/qwen3-8b/fingerprints-16.json.xz": "variant_costs_h200/qwen3-8b/whole-16.json.xz",
    "variant_costs_h200/own_kernels/qwen3-8b/fingerprints-16.json.xz": (
        "variant_costs_h200/own_kernels/qwen3-8b/whole-16.json.xz"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Memory of an engine that started."""

    layers: int
    slots: int
    blocks: int
    weights_bytes: int
    budget_bytes: int


def rows_of(name: str) -> list[Row]:
    def row(one: dict[str, Any]) -> Row:
        (rank,) = one["ranks"]
        named = {key: rank[key] for key in ("weights_bytes", "budget_bytes")}
        return Row(layers=one["layers"], slots=one["slots"], blocks=rank["kv_blocks"], **named)

    return [row(one) for one in json.loads(read_kept(RESULTS / name))["rows"] if one["kind"] == "memory"]


def counted_bytes(name: str, spec: ModelSpec, slots: int, layers: int) -> int:
    """Return what a plan reserves for slots of the run ``name``."""
    config = DeploymentConfig(engine="vllm", adapter_slots=slots, adapter_rank=RANK)
    if "int2" in name:
        config = DeploymentConfig(engine="vllm", adapter_slots=slots, delta_format=SlotFormat.INT2)
    return reserved_bytes(spec, config, layers)


def block_bytes(spec: ModelSpec, layers: int) -> int:
    return 16 * 2 * spec.num_kv_heads * spec.head_dim * 2 * layers


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_keep_the_blocks_that_are_predicted(name: str) -> None:
    model, slots = WHOLE[name]
    spec = spec_of(model)
    without, with_slots = rows_of(name)
    assert (without.slots, with_slots.slots, with_slots.layers) == (0, slots, spec.num_layers)
    reserved = counted_bytes(name, spec, slots, spec.num_layers)
    predicted = without.blocks - reserved / block_bytes(spec, spec.num_layers)
    assert predicted == pytest.approx(with_slots.blocks, rel=WITHIN)
    assert reserved == pytest.approx(with_slots.weights_bytes - without.weights_bytes, rel=WITHIN)
    assert without.blocks > 1.02 * with_slots.blocks  # else nothing is judged


def test_slots_with_other_kernels_are_the_same() -> None:
    """The tokens' contest: vLLM's own kernels, and ours."""
    plain, *with_slots = (
        row
        for part in ("0-base", "1-own", "2-default")
        for row in rows_of(f"lora_contest_h200/deployed/{part}.json.xz")
    )
    spec = spec_of(QWEN)
    predicted = plain.blocks - counted_bytes("16", spec, 32, spec.num_layers) / block_bytes(spec, spec.num_layers)
    assert [row.blocks for row in with_slots] == pytest.approx([predicted] * 2, rel=WITHIN)


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_fingerprints_predict_the_blocks_of_whole_models_with_slots(name: str) -> None:
    """Weights by two depths, slots by their counts; the rest of the budget is what two layers leave."""
    whole = FINGERPRINTS[name]
    model, slots = WHOLE[whole]
    spec = spec_of(model)
    rows = {(row.layers, row.slots): row for row in rows_of(name)}
    two, one = rows[2, 0], rows[1, 8]
    layer = two.weights_bytes - (one.weights_bytes - counted_bytes(name, spec, 8, 1))
    other = two.budget_bytes - two.weights_bytes - two.blocks * block_bytes(spec, 2)
    weights = two.weights_bytes + (spec.num_layers - 2) * layer
    room = two.budget_bytes - other - weights - counted_bytes(name, spec, slots, spec.num_layers)
    (kept,) = (row for row in rows_of(whole) if row.slots)
    assert room / block_bytes(spec, spec.num_layers) == pytest.approx(kept.blocks, rel=WITHIN)
