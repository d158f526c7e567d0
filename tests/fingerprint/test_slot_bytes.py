"""Bytes of adapter slots: the factors of every matrix of a layer, of which tensor parallelism splits one each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import ADAPTER_RANKS, DeploymentConfig
from fingerprint.families import read_spec
from fingerprint.lora import reserved_bytes, slot_bytes
from fingerprint.lora.slot_bytes import adapter_tensors

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SPEC = read_spec(LLAMA_8B)
SHAPES = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


def config(rank: int = 16, **changes: object) -> DeploymentConfig:
    return replace(DeploymentConfig(adapter_slots=4, adapter_rank=rank), **changes)


@pytest.mark.parametrize("rank", ADAPTER_RANKS)
def test_a_slot_on_one_gpu_holds_both_factors_of_every_matrix(rank: int) -> None:
    elements = sum(rank * (rows + columns) for rows, columns in SHAPES)
    assert slot_bytes(SPEC, config(rank), 32) == 2 * 32 * elements
    assert slot_bytes(SPEC, config(rank), 5) == 2 * 5 * elements


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_split_b_of_the_first_matrices_and_a_of_the_last(tp: int) -> None:
    q, k, v, o, gate, up, down = SHAPES
    by_columns = sum(rows / tp + columns for rows, columns in (q, k, v, gate, up))
    by_rows = sum(rows + columns / tp for rows, columns in (o, down))
    assert slot_bytes(SPEC, config(tp=tp), 32) == 2 * 32 * 16 * (by_columns + by_rows)


@pytest.mark.parametrize(("tp", "widest", "narrowest"), [(1, 18432, 5120), (2, 4096 + 7168, 4096 + 512)])
def test_tensorrt_llm_has_pages_of_the_narrowest_matrix_for_each_as_for_the_widest_and_whole_copies(
    tp: int, widest: int, narrowest: int
) -> None:
    """Pages are of all layers on each stage; read in its sources, not run."""
    paged = config(16, tp=tp, engine="tensorrt-llm")
    slot = 2 * 16 * 32 * 7 * -(-widest // narrowest) * narrowest
    assert slot_bytes(SPEC, paged, 32) == slot_bytes(SPEC, paged, 4) == slot
    whole = 2 * 16 * 32 * sum(rows + columns for rows, columns in SHAPES)
    assert reserved_bytes(SPEC, paged, 32) == reserved_bytes(SPEC, paged, 4) == 4 * slot + 16 * whole
    assert tp > 1 or slot == 1.75 * whole  # docs/engines.md


@pytest.mark.parametrize("layers", [1, 32, 36])
def test_an_adapter_has_two_tensors_for_every_matrix(layers: int) -> None:
    assert adapter_tensors(replace(SPEC, num_layers=layers)) == 2 * len(SHAPES) * layers


def test_each_expert_has_tensors_of_its_own() -> None:
    """A file's count, by which the gateway goes too; loads of adapters of experts were not measured."""
    of_experts = read_spec(
        LLAMA_8B | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    )
    assert of_experts.num_experts == 8
    assert adapter_tensors(of_experts) == 2 * (4 + 3 * 8) * SPEC.num_layers


def test_kv_heads_are_replicated_above_their_number() -> None:
    at_8, at_16 = (slot_bytes(SPEC, config(tp=tp), 1) for tp in (8, 16))
    split = 2 * 4096 + 3 * 14336  # of q, o and the MLP; k and v stay at one head
    assert at_8 - at_16 == 2 * 16 * (split / 8 - split / 16)


@pytest.mark.parametrize("tp", [1, 8])
def test_vllm_has_factors_of_embeddings_and_output_layer_whole_on_every_rank(tp: int) -> None:
    """Two matrices of 128,256 words and a hidden state of 4,096, in 16 bits."""
    on_vllm, on_torch = (slot_bytes(SPEC, config(64, engine=engine, tp=tp), 32) for engine in ("vllm", "torch"))
    assert on_vllm - on_torch == 2 * 64 * 2 * (128256 + 4096)


def test_each_expert_has_factors_of_its_own() -> None:
    experts = replace(SPEC, num_experts=8, experts_per_token=2)
    one_mlp = sum(rows + columns for rows, columns in SHAPES[4:])
    assert slot_bytes(experts, config(), 1) - slot_bytes(SPEC, config(), 1) == 2 * 16 * 7 * one_mlp


def test_shared_experts_are_counted() -> None:
    shared = 3 * 4096 * 1000  # parameters
    more = replace(SPEC, layer_linear_params=SPEC.layer_linear_params + shared)
    assert slot_bytes(more, config(), 1) - slot_bytes(SPEC, config(), 1) == 2 * 16 * 3 * (4096 + 1000)


def test_the_embedded_engine_keeps_all_loaded_adapters_on_the_gpu_and_vllm_those_in_slots() -> None:
    for engine, held in (("torch", 16), ("vllm", 4)):
        asked = config(engine=engine)
        assert reserved_bytes(SPEC, asked, 32) == held * slot_bytes(SPEC, asked, 32)
        assert reserved_bytes(SPEC, DeploymentConfig(engine=engine), 32) == 0
