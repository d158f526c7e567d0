"""LoRA in plain torch, for training small adapters: low-rank updates of linear layers, saved in PEFT's format."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE

__all__ = ["LoraLinear", "add_lora", "lora_scale", "save_adapter"]


class LoraLinear(nn.Module):
    """Frozen linear layer with a trained update: W x + scale * B (A x)."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))  # the update begins as nothing
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        update = nn.functional.linear(nn.functional.linear(inputs, self.down), self.up)
        return self.base(inputs) + self.scale * update  # type: ignore[no-any-return]


def lora_scale(rank: int, alpha: float, *, uses_rslora: bool) -> float:
    """Return the factor of an update, as PEFT defines it."""
    return alpha / (math.sqrt(rank) if uses_rslora else rank)


def add_lora(model: nn.Module, targets: Collection[str], rank: int, scale: float) -> dict[str, LoraLinear]:
    """Freeze ``model`` and give an update to each linear layer whose name ends in one of ``targets``, by name."""
    model.requires_grad_(False)
    added = {}
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear) and leaf in targets:
            added[name] = LoraLinear(module, rank, scale)
            setattr(model.get_submodule(parent), leaf, added[name])
    return added


def save_adapter(
    folder: Path,
    updates: dict[str, LoraLinear],
    *,
    base_model: str,
    rank: int,
    alpha: int,
    uses_rslora: bool,
    targets: Collection[str],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the two files of a PEFT adapter to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_rslora": uses_rslora,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    tensors = {}
    for name, update in updates.items():
        for letter, factor in (("A", update.down), ("B", update.up)):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = factor.detach().to(dtype).contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
