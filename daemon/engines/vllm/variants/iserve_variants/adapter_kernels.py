"""Products of rows and their LoRA adapters in decode steps, two launches for all slices of a packed linear.

**Work.** Rows are grouped by adapter, as vLLM's mapping has them. ``shrink`` multiplies a group's rows with a
piece of ``inputs`` columns of A and stores the float32 sums of that piece: nothing is zeroed and nothing is added
atomically, so that the sums do not depend on which program ends first. ``expand`` adds the pieces in their order,
multiplies with a tile of ``outputs`` rows of B, and adds to y. A program without rows returns after one load. The
grids depend on shapes alone, so a captured graph serves each mix of adapters.

**Rounding** is that of vLLM's kernels: the sums of A are rounded to bfloat16 once, the products with B once, and
the result is added to y in bfloat16.

Not connected to vLLM: tests and ``tests/bench/lora_contest.py`` alone run it (docs/decisions/0054).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["MOST_RANK", "MOST_ROWS", "MOST_SLICES", "AdapterTiling", "Groups", "add_adapters", "takes"]

MOST_ROWS = 64
MOST_RANK = 64
MOST_SLICES = 3
_ROWS = 16  # of a product: the narrow side of the tensor cores' smallest form


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterTiling:
    """Shape of the work of the two launches."""

    inputs: int = 512
    """Columns of A of a program."""
    shrink_warps: int = 4
    outputs: int = 256
    """Rows of B of a program."""
    expand_warps: int = 4
    overlaps: int = 1
    """0: no launch begins before the kernel before it has ended; 1: the second launch may; 2: both may
    (programmatic dependent launch). With 2 the adapters and the groups must have been written before the kernel
    that wrote y began."""


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


@triton.jit
def shrink(
    x_ptr,  # bfloat16 [rows, K]
    a0_ptr,  # bfloat16 [slots, RANK, K] of each slice
    a1_ptr,
    a2_ptr,
    partial_ptr,  # float32 [slices, SPLITS, rows, RANK]
    order_ptr,
    counts_ptr,
    starts_ptr,
    slots_ptr,
    rows,
    K,
    stride_x,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,  # RANK, at least 16
    SPLITS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE_K: tl.constexpr,  # whether K is whole pieces
    WAITS: tl.constexpr,
    RELEASES: tl.constexpr,
    EXACT: tl.constexpr,
):
    if RELEASES:
        tl.extra.cuda.gdc_launch_dependents()
    piece = tl.program_id(0) % SPLITS
    part = tl.program_id(0) // SPLITS
    group = tl.program_id(1)
    slot = tl.load(slots_ptr + group)
    count = tl.load(counts_ptr + group)
    start = tl.load(starts_ptr + group)
    if (slot < 0) | (count == 0):
        if WAITS:  # what follows may rely on the kernel before this one
            tl.extra.cuda.gdc_wait()
        return
    k = piece * INPUTS + tl.arange(0, INPUTS)
    r = tl.arange(0, RANK_BLOCK)
    at = slot.to(tl.int64) * RANK * K + r[:, None] * K + k[None, :]
    mask = (r < RANK)[:, None] & (k < K)[None, :]
    a = _of_slice(a0_ptr, a1_ptr, a2_ptr, part, at, mask, (RANK == RANK_BLOCK) and WHOLE_K)
    m = tl.arange(0, ROWS)
    for first in tl.range(0, count, ROWS, num_stages=1):  # mostly one pass
        live = first + m < count
        row = tl.load(order_ptr + start + first + m, mask=live, other=0)
        if WAITS:
            tl.extra.cuda.gdc_wait()
        x_mask = live[:, None] if WHOLE_K else live[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + (row * stride_x)[:, None] + k[None, :], mask=x_mask, other=0.0)
        sums = _dot(x, tl.trans(a), EXACT)
        out = partial_ptr + (((part * SPLITS + piece) * rows + row) * RANK)[:, None] + r[None, :]
        tl.store(out, sums, mask=live[:, None] & (r < RANK)[None, :])


@triton.jit
def expand(
    partial_ptr,  # float32 [slices, SPLITS, rows, RANK]
    b0_ptr,  # bfloat16 [slots, outputs of the slice, RANK] of each slice
    b1_ptr,
    b2_ptr,
    y_ptr,  # bfloat16 [rows, outputs of all slices]
    order_ptr,
    counts_ptr,
    starts_ptr,
    slots_ptr,
    rows,
    N0,
    N1,
    N2,
    scale,
    stride_y,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE_N: tl.constexpr,  # whether each slice is whole tiles
    WAITS: tl.constexpr,
    EXACT: tl.constexpr,
):
    group = tl.program_id(1)
    slot = tl.load(slots_ptr + group)
    count = tl.load(counts_ptr + group)
    start = tl.load(starts_ptr + group)
    if (slot < 0) | (count == 0):
        if WAITS:
            tl.extra.cuda.gdc_wait()
        return
    tile = tl.program_id(0)
    tiles_0, tiles_1 = tl.cdiv(N0, OUTPUTS), tl.cdiv(N1, OUTPUTS)
    part = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_0 + tiles_1).to(tl.int32)
    before = tl.where(part == 0, 0, tl.where(part == 1, tiles_0, tiles_0 + tiles_1))
    N = tl.where(part == 0, N0, tl.where(part == 1, N1, N2))
    column = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    n = (tile - before) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.arange(0, RANK_BLOCK)
    at = slot.to(tl.int64) * N * RANK + n[:, None] * RANK + r[None, :]
    mask = (n < N)[:, None] & (r < RANK)[None, :]
    b = _of_slice(b0_ptr, b1_ptr, b2_ptr, part, at, mask, (RANK == RANK_BLOCK) and WHOLE_N)
    m = tl.arange(0, ROWS)
    for first in tl.range(0, count, ROWS, num_stages=1):  # mostly one pass
        live = first + m < count
        row = tl.load(order_ptr + start + first + m, mask=live, other=0)
        if WAITS:
            tl.extra.cuda.gdc_wait()
        y_mask = live[:, None] if WHOLE_N else live[:, None] & (n < N)[None, :]
        out = y_ptr + (row * stride_y)[:, None] + (column + n)[None, :]
        y = tl.load(out, mask=y_mask, other=0.0)
        sums_mask = live[:, None] & (r < RANK)[None, :]
        sums = tl.zeros((ROWS, RANK_BLOCK), dtype=tl.float32)
        for piece in tl.static_range(SPLITS):
            place = ((part * SPLITS + piece) * rows + row) * RANK
            sums += tl.load(partial_ptr + place[:, None] + r[None, :], mask=sums_mask, other=0.0)
        change = _dot((sums * scale).to(tl.bfloat16), tl.trans(b), EXACT).to(tl.bfloat16)
        tl.store(out, (y.to(tl.float32) + change.to(tl.float32)).to(tl.bfloat16), mask=y_mask)


@triton.jit
def _of_slice(ptr_0, ptr_1, ptr_2, part, at, mask, WHOLE: tl.constexpr):
    """Return the tile of the slice ``part``."""
    ptr = ptr_0
    if part == 1:
        ptr = ptr_1
    if part == 2:
        ptr = ptr_2
    return tl.load(ptr + at) if WHOLE else tl.load(ptr + at, mask=mask, other=0.0)


@triton.jit
def _dot(left, right, EXACT: tl.constexpr):
    if EXACT:  # Triton's interpreter multiplies bfloat16 operands as if they were integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(left, right)


def takes(x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernels are for this product: few rows, bfloat16, ranks of 8 to 64, few slices."""
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
    sizes = tuple(each.shape[-2] for each in b)
    _check(y, x, a, b, sizes)
    (rows, inputs), rank = x.shape, b[0].shape[-1]
    splits = -(-inputs // tiling.inputs)
    # A step has at most as many groups as rows; its allocation is the graph's own.
    grid = min(groups.slots.shape[0], rows)
    partial = torch.empty(len(a) * splits * rows * rank, dtype=torch.float32, device=x.device)
    is_gpu = x.device.type == "cuda"
    overlaps = tiling.overlaps if is_gpu else 0
    shared = {"RANK": rank, "RANK_BLOCK": max(16, rank), "SPLITS": splits, "ROWS": _ROWS, "EXACT": not is_gpu}
    shrink[(len(a) * splits, grid)](
        x,
        *_three(a),
        partial,
        *groups,
        rows,
        inputs,
        x.stride(0),
        INPUTS=tiling.inputs,
        WHOLE_K=inputs % tiling.inputs == 0,
        WAITS=overlaps == 2,
        RELEASES=overlaps > 0,
        num_warps=tiling.shrink_warps,
        **shared,
        **({"launch_pdl": True} if overlaps == 2 else {}),
    )
    expand[(sum(-(-size // tiling.outputs) for size in sizes), grid)](
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
        WAITS=overlaps > 0,
        num_warps=tiling.expand_warps,
        **shared,
        **({"launch_pdl": True} if overlaps else {}),
    )


def _three(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return a pointer for each slice that the kernels know; those that are not there are never read."""
    return (*tensors, *(tensors[0],) * (MOST_SLICES - len(tensors)))


def _check(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    sizes: tuple[int, ...],
) -> None:
    if not takes(x, a, b) or y.dtype != torch.bfloat16:
        raise ValueError(f"no kernel for {list(x.shape)} of {x.dtype} with rank {b[0].shape[-1]}")
    if len(a) != len(b) or y.shape != (x.shape[0], sum(sizes)) or any(e.shape[-1] != x.shape[1] for e in a):
        raise ValueError(f"x {list(x.shape)}, y {list(y.shape)} and outputs {sizes} do not belong together")
    if x.stride(1) != 1 or y.stride(1) != 1 or not all(each.is_contiguous() for each in (*a, *b)):
        raise ValueError("rows of x and y, and the adapters, are contiguous")
