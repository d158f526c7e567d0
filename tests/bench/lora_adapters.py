"""Random checkpoints and LoRA adapters of models with Llama's modules, for benches that need no meaning."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE
from fingerprint.safetensors_writer import OutputTensor, write_safetensors

__all__ = ["checkpoint_shapes", "matrices", "write_adapter", "write_checkpoint"]

_BLOCK_VALUES = 1 << 20  # of an adapter's random values, which are repeated
_CHECKPOINT_BLOCK = (1 << 24) + 9973  # no multiple of a row: rows that repeat would make matrices of low rank
_CHECKPOINT_DEVIATION = 0.02


def matrices(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the matrices of a layer of Llama: outputs and inputs of each."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_adapter(
    folder: Path,
    config: Mapping[str, Any],
    rank: int,
    *,
    seed: int | None = None,
    modules: Collection[str] = (),
    deviation: float = 0.01,
) -> None:
    """Write a random adapter in PEFT's format.

    Args:
        seed: else the rank.
        modules: last names of the matrices that it updates, such as ``q_proj``; else all of a layer.
        deviation: of its values, which are bfloat16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = _random_bfloat16(np.random.default_rng(rank if seed is None else seed), _BLOCK_VALUES, deviation)

    def tensor(name: str, shape: tuple[int, int]) -> OutputTensor:
        return _tensor(name, shape, values, 0)

    updated = {
        name: shape
        for name, shape in matrices(config).items()
        if not modules or name.rpartition(".")[2] in modules
    }
    tensors = []
    for layer in range(config["num_hidden_layers"]):
        for module, (rows, columns) in updated.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors.append(tensor(f"{name}.lora_A.weight", (rank, columns)))
            tensors.append(tensor(f"{name}.lora_B.weight", (rows, rank)))
    write_safetensors(folder / WEIGHTS_FILE, tensors)
    fields: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "model",
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(name.rpartition(".")[2] for name in updated),
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(fields))


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a Llama, its ``lm_head`` by itself."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in matrices(config).items()}
        shapes |= {
            f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Write random bfloat16 weights (norms: 1) of a Llama next to its ``config.json``, in one file."""
    rng = np.random.default_rng(0)
    block = _random_bfloat16(rng, _CHECKPOINT_BLOCK, _CHECKPOINT_DEVIATION)
    ones = (np.ones(config["hidden_size"], np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    tensors = [
        _tensor(name, shape, ones, 0)
        if len(shape) == 1
        else _tensor(name, shape, block, int(rng.integers(1 << 20)))
        for name, shape in checkpoint_shapes(config).items()
    ]
    write_safetensors(folder / "model.safetensors", tensors)


def _random_bfloat16(rng: np.random.Generator, count: int, deviation: float) -> bytes:
    values = rng.standard_normal(count, dtype=np.float32) * np.float32(deviation)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _tensor(name: str, shape: tuple[int, ...], values: bytes, skipped: int) -> OutputTensor:
    """Return a bfloat16 tensor of ``values``, repeated, of which the first is number ``skipped``."""
    num_bytes = 2 * int(np.prod(shape))

    def pieces() -> list[memoryview]:
        found, left, start = [], num_bytes, 2 * skipped % len(values)
        while left:
            piece = memoryview(values)[start : start + left]
            found.append(piece)
            left, start = left - len(piece), 0
        return found

    return OutputTensor(name, "BF16", shape, num_bytes, pieces)
