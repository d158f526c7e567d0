"""Definition of a weight format: how one linear of a hidden layer is stored and applied.

A new format is one file with one :class:`LinearFormat`, added to the table in ``formats/__init__.py``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from fingerprint.config import WeightFormat

__all__ = ["LinearFormat"]


class LinearFormat(Protocol):
    """Embeddings, head and norms are never passed through a format."""

    name: WeightFormat

    def refusal(self, layers: nn.ModuleList) -> str | None:
        """Return why these layers cannot be stored so; None when they can."""
        ...

    def replace(self, linear: nn.Linear) -> nn.Module:
        """Return the module that takes the place of ``linear`` (which is on the meta device), on meta too.

        Its tensors have their final shapes and dtypes, so that bytes can be counted before anything is read.
        """
        ...

    def store(self, module: nn.Module, weight: torch.Tensor) -> None:
        """Fill what :meth:`replace` gave from one [out, in] weight; the bias is a parameter like any other."""
        ...
