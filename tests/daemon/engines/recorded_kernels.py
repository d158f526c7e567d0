"""Kernels of deltas that record what Triton would compile them by, and compute in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.daemon.variant_kernels import variant_module

__all__ = ["recorded_kernels"]


def recorded_kernels(reached: set[Any]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the kernels of ``TritonProducts``, which add the key of each launch to ``reached``."""
    launches, reference = variant_module("launches"), variant_module("products").ReferenceProducts()

    def add(
        y: torch.Tensor,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        route: Any,
        format_: Any,
        tiling: Any,
        workspace: Any,
    ) -> None:
        kernel = launches.product_launch(y, x, scales.shape[2], format_, tiling, adds=True)
        reached.add(("add", tiling.overlaps, *kernel.key))  # a CPU overlaps nothing
        reference.add(y, x, SimpleNamespace(codes=codes, scales=scales, format=format_), route)

    def merge(
        weight: torch.Tensor, out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, format_: Any
    ) -> None:
        reached.add(("merge", *launches.merge_launch(weight, out, format_).key))
        slots = SimpleNamespace(codes=codes[None], scales=scales[None], format=format_)
        out.copy_(reference.merge(weight, slots, 0))

    return add, merge
