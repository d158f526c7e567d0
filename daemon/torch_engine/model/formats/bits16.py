"""``16bit``: the linear as transformers built it."""

from __future__ import annotations

import torch
from torch import nn

from fingerprint.config import WeightFormat

__all__ = ["Bits16Format"]


class Bits16Format:
    name = WeightFormat.BITS16

    def refusal(self, layers: nn.ModuleList) -> str | None:
        return None

    def replace(self, linear: nn.Linear) -> nn.Module:
        return linear

    def store(self, module: nn.Module, weight: torch.Tensor) -> None:
        module.weight = nn.Parameter(weight, requires_grad=False)
