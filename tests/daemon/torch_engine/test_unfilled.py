"""Models that are built without weights: the same parameters and buffers as otherwise, none with a value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from daemon.torch_engine.model.unfilled import build_unfilled

FAMILIES = ["llama", "llama-tied", "qwen3", "qwen2_moe", "gpt_oss", "gemma3_text", "gpt_neox", "gptj", "opt"]
FAMILIES += ["phi3", "falcon", "gpt2", "ctrl", "xglm", "doge", "apertus"]


def kinds_of(model: nn.Module) -> dict[str, tuple[object, ...]]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (one.shape, one.dtype, type(one)) for name, one in tensors}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_parameters_and_buffers_of_its_class(
    family: str, tiny_checkpoint: Callable[[str], Path]
) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_checkpoint(family))

    def make() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    with torch.device("meta"):
        plain = make()
    state = torch.get_rng_state()
    model = build_unfilled(make)
    assert kinds_of(model) == kinds_of(plain)
    assert model.state_dict().keys() == plain.state_dict().keys()  # which buffers are in checkpoints, too
    assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_made_afterwards_has_its_values() -> None:
    build_unfilled(lambda: nn.Linear(2, 2))
    layer = nn.Linear(64, 64)
    nn.init.ones_(layer.weight)
    assert layer.weight.device.type == "cpu"
    assert layer.weight.sum() == 64 * 64


def test_a_model_that_cannot_be_made_leaves_no_mode_behind() -> None:
    def fail() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        build_unfilled(fail)
    assert torch.arange(3).device.type == "cpu"
    assert nn.init.ones_(torch.zeros(2)).sum() == 2
