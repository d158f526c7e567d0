"""A small model that was trained on sums, as the fine-tune of a base that is far from it; trained in seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from daemon.torch_engine.api.tokenizer import load_text_codec
from iserve.demo import demo_model_path
from tests.fingerprint.small_fine_tunes import Arrays, read_values, tiny_config, tuned, write_model

__all__ = ["SUMS", "write_trained_pair"]

SUMS = tuple(f"Q: {a} plus {b}\nA: {a + b}." for a in range(1, 30) for b in range(1, 30, 7))
_STEPS, _BATCH, _LEARNING_RATE, _CHANGE = 150, 32, 4e-3, 0.2


def write_trained_pair(folder: Path) -> tuple[str, ...]:
    """Write ``base`` and ``tuned``; return texts that ``tuned`` never saw, like those that it was trained on."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**tiny_config()))
    codec = load_text_codec(demo_model_path())
    assert codec is not None
    tokens = [codec.encode(text, 512) for text in SUMS]
    codec.close()
    held_out = SUMS[::3]
    seen = [each for number, each in enumerate(tokens) if number % 3]
    longest, random = max(map(len, seen)), np.random.default_rng(0)
    rows = torch.tensor([each + [0] * (longest - len(each)) for each in seen])
    labels = torch.tensor([each + [-100] * (longest - len(each)) for each in seen])
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for _ in range(_STEPS):
        drawn = torch.from_numpy(random.choice(len(seen), _BATCH, replace=False))
        optimizer.zero_grad()
        model(rows[drawn], labels=labels[drawn]).loss.backward()
        optimizer.step()
    values: Arrays = {name: each.detach().float().numpy() for name, each in model.state_dict().items()}
    write_model(folder / "tuned", values)
    write_model(folder / "base", tuned(read_values(folder / "tuned"), size=_CHANGE))
    return held_out
