"""Runners of the tiny random models, their ranks' processes, and the tokens that transformers generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from daemon.torch_engine.parallel.runner import LocalRunner
from fingerprint.config import DeploymentConfig

__all__ = ["generate", "rank_processes", "runner_fixture"]


def runner_fixture(usual: DeploymentConfig) -> Any:
    """Return a fixture: ``make_runner("llama", config)`` loads a runner in float32, closed at the end."""

    @pytest.fixture
    def make_runner(tiny_checkpoint, tiny_stages, tiny_limits) -> Iterator[Callable[..., LocalRunner]]:
        import transformers

        made = []

        def make(family: str, config: DeploymentConfig = usual, dtype: torch.dtype = torch.float32) -> LocalRunner:
            checkpoint = tiny_checkpoint(family)
            num_layers = transformers.AutoConfig.from_pretrained(checkpoint).num_hidden_layers
            made.append(LocalRunner(dtype=dtype))
            made[-1].load(checkpoint, config, tiny_stages(num_layers), tiny_limits)
            return made[-1]

        yield make
        for runner in made:
            runner.close()

    return make_runner


def rank_processes() -> list[psutil.Process]:
    """Return the ranks that this process has started and that live."""
    return [
        child
        for child in psutil.Process().children()
        if "daemon.torch_engine.parallel.rank_main" in child.cmdline()
    ]


def generate(checkpoint: Path, prompt: list[int], new_tokens: int) -> list[int]:
    """Return what transformers says, greedily, without our code."""
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()
