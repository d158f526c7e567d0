"""Products of rows and their deltas: the kernels on a GPU, plain torch on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from iserve_variants.formats import TILE_ROWS, CodeFormat
from iserve_variants.launches import Workspace, is_aligned, multiprocessors
from iserve_variants.reference import dequantize
from iserve_variants.route import Route
from iserve_variants.tilings import choose_tiling

__all__ = ["Products", "ReferenceProducts", "Slots", "TritonProducts", "products_for"]


class Slots(Protocol):
    """Codes and scales of one module's slots."""

    format: CodeFormat
    shape: tuple[int, int]
    """Outputs and inputs of one rank, without padding."""
    codes: torch.Tensor
    scales: torch.Tensor


class Products(Protocol):
    """Arithmetic of changes."""

    def add(self, y: torch.Tensor, x: torch.Tensor, slots: Slots, route: Route) -> None:
        """Add to each routed row of ``y`` the product of its delta and its row of ``x``."""

    def merge(self, weight: torch.Tensor, slots: Slots, slot: int) -> torch.Tensor:
        """Return base and one delta as a matrix, valid until the next call."""

    def warm_up(
        self, all_slots: Iterable[Slots], route: Route, rows: int, *, merges: bool, has_padding: bool
    ) -> None:
        """Compile what products of ``rows`` rows take; no row is routed, and nothing is changed.

        Args:
            all_slots: of which those of one shape and format are one.
            route: of no rows.
            rows: of a product.
            merges: whether prompts merge these matrices.
            has_padding: whether products may be added to float32, and to the first columns of wider rows: logits.
        """


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

    def warm_up(
        self, all_slots: Iterable[Slots], route: Route, rows: int, *, merges: bool, has_padding: bool
    ) -> None:
        """Do nothing: there is nothing to compile."""


class TritonProducts:
    """Products by the kernels; their buffers are taken at the start and live as long as the captured graphs."""

    def __init__(
        self,
        device: torch.device,
        *,
        max_segments: int,
        max_tiles: int,
        merged_elements: int,
        kernels: tuple[Callable[..., None], Callable[..., None]] | None = None,
    ) -> None:
        """Take the buffers' memory.

        Args:
            max_segments: of a route.
            max_tiles: tiles of 64 outputs of the largest module.
            merged_elements: weights of the largest matrix that is merged; 0: none is.
            kernels: in place of ``add_delta`` and ``merge_delta``.
        """
        if kernels is None:  # Triton is imported where a GPU is
            from iserve_variants.delta_linear import add_delta
            from iserve_variants.merge import merge_delta

            kernels = add_delta, merge_delta
        self._add, self._merge = kernels
        self._workspace = Workspace(device)
        programs = multiprocessors(device) * 4
        self._workspace.partial(programs * 2 * 128 * 32)
        self._workspace.arrived(max_segments * max_tiles)
        self._merged = torch.empty(merged_elements, dtype=torch.bfloat16, device=device)

    def add(self, y: torch.Tensor, x: torch.Tensor, slots: Slots, route: Route) -> None:
        if y.dtype != torch.bfloat16:  # logits that the model wants in float32
            change = torch.zeros(y.shape, dtype=torch.bfloat16, device=y.device)
            self.add(change, x, slots, route)
            y += change
            return
        tiling = choose_tiling(x.shape[0])
        if not is_aligned(x):
            x = x.clone(memory_format=torch.contiguous_format)  # one row is contiguous wherever it begins
            tiling = replace(tiling, overlaps=False)  # which may begin before the kernel before it, the copy
        self._add(y, x, slots.codes, slots.scales, route, slots.format, tiling, self._workspace)

    def merge(self, weight: torch.Tensor, slots: Slots, slot: int) -> torch.Tensor:
        out = self._merged[: weight.numel()].view(weight.shape)
        self._merge(weight, out, slots.codes[slot], slots.scales[slot], slots.format)
        return out

    def warm_up(
        self, all_slots: Iterable[Slots], route: Route, rows: int, *, merges: bool, has_padding: bool
    ) -> None:
        done = set()
        for slots in all_slots:
            if (slots.shape, slots.format) in done:
                continue
            done.add((slots.shape, slots.format))
            outputs, inputs = slots.shape
            new = partial(torch.zeros, dtype=torch.bfloat16, device=slots.codes.device)
            rows_of_y = [new(rows, outputs)]
            if has_padding:
                padded = -(-outputs // TILE_ROWS) * TILE_ROWS
                rows_of_y += [new(rows, padded)[:, :outputs], new(rows, outputs).float()]
            for y in rows_of_y:
                self.add(y, new(rows, inputs), slots, route)
                self.add(y, new(rows, inputs + 1)[:, 1:], slots, route)  # rows that have to be copied
            if merges:
                self.merge(new(outputs, inputs), slots, 0)


def products_for(device: torch.device, *, max_segments: int, max_tiles: int, merged_elements: int) -> Products:
    """Return how ``device`` computes products."""
    if device.type != "cuda":
        return ReferenceProducts()
    return TritonProducts(device, max_segments=max_segments, max_tiles=max_tiles, merged_elements=merged_elements)
