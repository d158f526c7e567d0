"""Products of up to 1,024 rows and their LoRA adapters, two launches for all slices of a packed linear.

**Work.** Rows are grouped by adapter, as vLLM's mapping has them; groups that are split into pieces of a product's
rows are computed at once. ``shrink`` multiplies a group's rows with a piece of ``inputs`` columns of A and stores
the float32 sums of that piece: nothing is zeroed and nothing is added atomically, so that the sums do not depend
on which program ends first. ``expand`` adds the pieces in their order, multiplies with a tile of ``outputs`` rows
of B, and adds to y. A program without rows returns after three loads. The grids depend on shapes alone, so a
captured graph serves each mix of adapters.

**Rounding** is that of vLLM's kernels: the sums of A are rounded to bfloat16 once, the products with B once, and
the result is added to y in bfloat16.

``vllm_adapters`` connects them (docs/decisions/0054).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from iserve_variants.adapter_programs import expand, shrink, split_groups

__all__ = [
    "MOST_RANK",
    "MOST_ROWS",
    "MOST_SLICES",
    "TILINGS",
    "AdapterTiling",
    "Groups",
    "add_adapters",
    "takes",
]

MOST_ROWS = 1024
MOST_RANK = 64
MOST_SLICES = 3
_PIECES = 16  # of groups, whose own groups a program finds


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTiling:
    """Shape of the work of the two launches."""

    rows: int = 8
    """Rows of a product: 8 is the narrow side of the tensor cores' smallest form."""
    inputs: int = 512
    """Columns of A of a program."""
    shrink_warps: int = 1
    outputs: int = 256
    """Rows of B of a program."""
    expand_warps: int = 4
    overlaps: int = 2
    """0: no launch begins before the kernel before it has ended; 1: the second launch may; 2: both may
    (programmatic dependent launch). With 2 the adapters and the groups must have been written before the kernel
    that wrote y began."""


# By slices: the fastest with 32 rows of 32 adapters of rank 16 on an H200, for Qwen3-8B's down, gate and up, qkv.
TILINGS = {
    1: AdapterTiling(outputs=512, expand_warps=8, overlaps=1),
    2: AdapterTiling(inputs=256),
    3: AdapterTiling(expand_warps=2),
}


class Groups(NamedTuple):
    """Rows by adapter, as vLLM's ``LoRAKernelMeta`` has them; each int32, on the device."""

    order: torch.Tensor
    """Rows, sorted by their adapter's slot."""
    counts: torch.Tensor
    """Rows of each group."""
    starts: torch.Tensor
    """Where in ``order`` each group begins; may be longer than ``counts``."""
    slots: torch.Tensor
    """Slot of each group; -1: rows of the base, or no group."""

    def split(self, rows: int, into: Groups | None = None) -> Groups:
        """Return groups of at most ``rows`` rows, which programs take at once: used ones first, for ``MOST_ROWS``.

        No value is read by the host.

        Args:
            into: an answer for as many groups, whose memory takes this one.
        """
        count = len(self.slots)
        most = count + MOST_ROWS // rows
        new = into or Groups(self.order, *self.slots.new_empty(3, most))
        grid = (triton.cdiv(most, _PIECES),)
        split_groups[grid](*self[1:], *new[1:], count, most, rows, triton.next_power_of_2(count), _PIECES)
        return new


def takes(x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernels are for this product: its rows, slices and rank, and bfloat16."""
    rank = b[0].shape[-1]
    return (
        1 <= x.shape[0] <= MOST_ROWS
        and 8 <= rank <= MOST_RANK
        and rank & (rank - 1) == 0
        and len(a) <= MOST_SLICES
        and {tensor.dtype for tensor in (x, *a, *b)} == {torch.bfloat16}
        and all(each.shape[-2] == rank for each in a)
    )


def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    groups: Groups,
    scale: float,
    tiling: AdapterTiling,
) -> None:
    """Add to each row of ``y`` that has an adapter the product of it and the row of ``x``; leave other rows alone.

    Args:
        y: bfloat16 [rows, outputs of all slices], rows contiguous.
        x: bfloat16 [rows, inputs], rows contiguous.
        a: bfloat16 [slots, rank, inputs] of each slice, or [slots, 1, rank, inputs], as vLLM has them; contiguous.
        b: bfloat16 [slots, outputs of the slice, rank] of each slice, or with 1 as ``a``; contiguous.

    Raises:
        ValueError: shapes, types or memory that the kernels are not for.
    """
    _check(y, x, a, b)
    partial = _new_partial(x, a, tiling)
    _launch_shrink(partial, x, a, groups, tiling)
    _launch_expand(y, partial, b, groups, scale, tiling)


def _new_partial(x: torch.Tensor, a: Sequence[torch.Tensor], tiling: AdapterTiling) -> torch.Tensor:
    """Allocate the pieces' sums: where a graph is captured they are the graph's own."""
    splits = -(-x.shape[1] // tiling.inputs)
    return torch.empty(len(a), splits, x.shape[0], a[0].shape[-2], dtype=torch.float32, device=x.device)


def _launch_shrink(
    partial: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    groups: Groups,
    tiling: AdapterTiling,
) -> None:
    slices, splits, rows, _ = partial.shape
    overlaps = tiling.overlaps if partial.is_cuda else 0
    shrink[(slices * splits, _most_groups(groups, rows))](
        x,
        *_three(a),
        partial,
        *groups,
        rows,
        x.shape[1],
        x.stride(0),
        INPUTS=tiling.inputs,
        WHOLE_K=x.shape[1] % tiling.inputs == 0,
        WAITS=overlaps == 2,
        RELEASES=overlaps > 0,
        num_warps=tiling.shrink_warps,
        **_shared(partial, tiling),
        **({"launch_pdl": True} if overlaps == 2 else {}),
    )


def _launch_expand(
    y: torch.Tensor,
    partial: torch.Tensor,
    b: Sequence[torch.Tensor],
    groups: Groups,
    scale: float,
    tiling: AdapterTiling,
) -> None:
    rows = partial.shape[2]
    sizes = [each.shape[-2] for each in b]
    overlaps = tiling.overlaps > 0 and partial.is_cuda
    expand[(_tiles(sizes, tiling), _most_groups(groups, rows))](
        partial,
        *_three(b),
        y,
        *groups,
        rows,
        *(*sizes, 0, 0)[:MOST_SLICES],
        scale,
        y.stride(0),
        OUTPUTS=tiling.outputs,
        WHOLE_N=all(size % tiling.outputs == 0 for size in sizes),
        WAITS=overlaps,
        num_warps=tiling.expand_warps,
        **_shared(partial, tiling),
        **({"launch_pdl": True} if overlaps else {}),
    )


def _shared(partial: torch.Tensor, tiling: AdapterTiling) -> dict[str, int]:
    """Return what each program knows when it is compiled."""
    _, splits, _, rank = partial.shape
    exact = not partial.is_cuda
    return {"RANK": rank, "RANK_BLOCK": max(16, rank), "SPLITS": splits, "ROWS": tiling.rows, "EXACT": exact}


def _tiles(sizes: Sequence[int], tiling: AdapterTiling) -> int:
    """Return the tiles of all slices."""
    return sum(-(-size // tiling.outputs) for size in sizes)


def _most_groups(groups: Groups, rows: int) -> int:
    """Return the groups for which programs are launched: a step has at most as many as rows."""
    return min(groups.slots.shape[0], rows)


def _three(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return a pointer for each slice that the kernels know; those that are not there are never read."""
    return (*tensors, *(tensors[0],) * (MOST_SLICES - len(tensors)))


def _check(y: torch.Tensor, x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
    sizes = tuple(each.shape[-2] for each in b)
    if not takes(x, a, b) or y.dtype != torch.bfloat16:
        raise ValueError(f"no kernel for {list(x.shape)} of {x.dtype} with rank {b[0].shape[-1]}")
    if len(a) != len(b) or y.shape != (x.shape[0], sum(sizes)) or any(e.shape[-1] != x.shape[1] for e in a):
        raise ValueError(f"x {list(x.shape)}, y {list(y.shape)} and outputs {sizes} do not belong together")
    if x.stride(1) != 1 or y.stride(1) != 1 or not all(each.is_contiguous() for each in (*a, *b)):
        raise ValueError("rows of x and y, and the adapters, are contiguous")
