"""Products of rows and their deltas: the kernels on a GPU, plain torch on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch

from iserve_variants.formats import GROUP, TILE_ROWS, CodeFormat
from iserve_variants.reference import dequantize
from iserve_variants.route import Route

__all__ = ["Products", "ReferenceProducts", "Slots", "products_for"]


class Slots(Protocol):
    """Codes and scales of one module's slots."""

    format: CodeFormat
    codes: torch.Tensor
    scales: torch.Tensor


class Products(Protocol):
    """Arithmetic of changes."""

    def add(self, y: torch.Tensor, x: torch.Tensor, slots: Slots, route: Route) -> None:
        """Add to each routed row of ``y`` the product of its delta and its row of ``x``."""

    def merge(self, weight: torch.Tensor, slots: Slots, slot: int) -> torch.Tensor:
        """Return base and one delta as a matrix, valid until the next call."""

    def warm_up(self, all_slots: Iterable[Slots], route: Route, rows: int) -> None:
        """Compile what steps of ``rows`` rows take; no row is routed, and nothing is changed."""


class ReferenceProducts:
    """Products in plain torch, for CPUs and for tests."""

    def add(self, y: torch.Tensor, x: torch.Tensor, slots: Slots, route: Route) -> None:
        for slot, first, count, _ in route.segments[: int(route.num_segments)].tolist():
            rows = route.order[first : first + count].long()
            change = dequantize(slots.codes[slot], slots.scales[slot], slots.format)
            change = change[: y.shape[1], : x.shape[1]]
            y[rows] = (y[rows].float() + x[rows].float() @ change.t()).to(y.dtype)

    def merge(self, weight: torch.Tensor, slots: Slots, slot: int) -> torch.Tensor:
        change = dequantize(slots.codes[slot], slots.scales[slot], slots.format)
        return (weight.float() + change[: weight.shape[0], : weight.shape[1]]).to(weight.dtype)

    def warm_up(self, all_slots: Iterable[Slots], route: Route, rows: int) -> None:
        """Do nothing: there is nothing to compile."""


class TritonProducts:
    """Products by the kernels; their buffers are taken at the start and live as long as the captured graphs."""

    def __init__(self, device: torch.device, *, max_segments: int, max_tiles: int, merged_elements: int) -> None:
        """Take the buffers' memory.

        Args:
            max_segments: of a route.
            max_tiles: tiles of 64 outputs of the largest module.
            merged_elements: weights of the largest matrix that is merged; 0: none is.
        """
        # Triton is imported where a GPU is.
        from iserve_variants.delta_linear import Workspace, add_delta
        from iserve_variants.merge import merge_delta
        from iserve_variants.tilings import choose_tiling

        self._add, self._merge, self._tiling = add_delta, merge_delta, choose_tiling
        self._workspace = Workspace(device)
        programs = torch.cuda.get_device_properties(device).multi_processor_count * 4
        self._workspace.partial(programs * 2 * 128 * 32)
        self._workspace.arrived(max_segments * max_tiles)
        self._merged = torch.empty(merged_elements, dtype=torch.bfloat16, device=device)

    def add(self, y: torch.Tensor, x: torch.Tensor, slots: Slots, route: Route) -> None:
        if y.dtype != torch.bfloat16:  # logits that the model wants in float32
            change = torch.zeros(y.shape, dtype=torch.bfloat16, device=y.device)
            self.add(change, x, slots, route)
            y += change
            return
        tiling = self._tiling(x.shape[0])
        if x.stride(-1) != 1 or x.data_ptr() % 16 or x.stride(0) % 8:
            x = x.contiguous()
            tiling = replace(tiling, overlaps=False)  # which may begin before the kernel before it, the copy
        self._add(y, x, slots.codes, slots.scales, route, slots.format, tiling, self._workspace)

    def merge(self, weight: torch.Tensor, slots: Slots, slot: int) -> torch.Tensor:
        out = self._merged[: weight.numel()].view(weight.shape)
        self._merge(weight, out, slots.codes[slot], slots.scales[slot], slots.format)
        return out

    def warm_up(self, all_slots: Iterable[Slots], route: Route, rows: int) -> None:
        done = set()
        for slots in all_slots:
            _, tiles, groups, _, _ = slots.codes.shape
            shape = tiles * TILE_ROWS, groups * GROUP
            if (shape, slots.format) in done:
                continue
            done.add((shape, slots.format))
            x = torch.zeros(rows, shape[1], dtype=torch.bfloat16, device=slots.codes.device)
            y = torch.zeros(rows, shape[0], dtype=torch.bfloat16, device=slots.codes.device)
            self.add(y, x, slots, route)
            if self._merged.numel() >= shape[0] * shape[1]:
                self.merge(y.new_zeros(shape), slots, 0)


def products_for(device: torch.device, *, max_segments: int, max_tiles: int, merged_elements: int) -> Products:
    """Return how ``device`` computes products."""
    if device.type != "cuda":
        return ReferenceProducts()
    return TritonProducts(device, max_segments=max_segments, max_tiles=max_tiles, merged_elements=merged_elements)
