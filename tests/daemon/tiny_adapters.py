"""PEFT adapters of the tiny random models, on disk, and greedy tokens of a runner that has loaded some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.torch_engine.runner_types import StepItem, StepPlan
from fingerprint.checkpoint import Checkpoint
from tests.fingerprint.small_adapters import write_adapter

SCALE = 0.5


def linears(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Return shapes [outputs, inputs] of the linears of the layers that are stored under their own names."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    stored = Checkpoint.open(checkpoint).tensors
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name and f"{name}.weight" in stored
    }


def write_tiny_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, size: float = 1.0
) -> Path:
    """Write an adapter of ``rank`` on the linears of ``shapes``, whose update is about as large as the weights."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            values = random.standard_normal(shape).astype(np.float32) * np.float32(size / rank**0.25)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    return write_adapter(folder, tensors, r=rank, lora_alpha=SCALE * rank, target_modules=targets)


def load_adapter(runner: LocalRunner, adapter_id: int, folder: Path) -> None:
    """Prepare the adapter in ``folder`` and switch to it."""
    runner.prepare_adapter(adapter_id, folder)
    runner.switch_adapter(adapter_id)


def greedy(
    runner: LocalRunner, requests: Sequence[tuple[int | None, Sequence[int]]], num_tokens: int
) -> list[list[int]]:
    """Return the tokens of requests (adapter, prompt) that run in one batch, request i in slot i."""
    tokens = [list(prompt) for _, prompt in requests]
    cached = [0] * len(requests)
    for _ in range(num_tokens):
        items = tuple(
            StepItem(slot, cached[slot], tuple(tokens[slot][cached[slot] :]), adapter_id)
            for slot, (adapter_id, _) in enumerate(requests)
        )
        logits = runner.step(StepPlan(items)).logits
        for slot, row in enumerate(logits):
            cached[slot] = len(tokens[slot])
            tokens[slot].append(int(row.argmax()))
    return [made[len(prompt) :] for made, (_, prompt) in zip(tokens, requests, strict=True)]
