"""Triton's programs of products of rows and their LoRA adapters, which ``adapter_kernels`` launches."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["expand", "shrink", "split_groups"]


@triton.jit
def split_groups(
    counts_ptr,  # int32 [groups]
    starts_ptr,
    slots_ptr,
    to_counts_ptr,  # int32 [pieces]
    to_starts_ptr,
    to_slots_ptr,
    GROUPS: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,  # of a piece, at most
    GROUP_BLOCK: tl.constexpr,
    PIECE_BLOCK: tl.constexpr,
):
    """Find the group of each piece, a block of pieces a program: one group at most has a piece of a number."""
    g = tl.arange(0, GROUP_BLOCK)
    slots = tl.load(slots_ptr + g, mask=g < GROUPS, other=-1)
    counts = tl.load(counts_ptr + g, mask=g < GROUPS, other=0)
    starts = tl.load(starts_ptr + g, mask=g < GROUPS, other=0)
    pieces = tl.where(slots >= 0, (counts + ROWS - 1) // ROWS, 0)
    ends = tl.cumsum(pieces, 0)
    begins = ends - pieces
    n = tl.program_id(0) * PIECE_BLOCK + tl.arange(0, PIECE_BLOCK)
    mine = (begins[None, :] <= n[:, None]) & (n[:, None] < ends[None, :])
    first = ROWS * (n[:, None] - begins[None, :])
    live = n < PIECES
    tl.store(to_counts_ptr + n, tl.sum(tl.where(mine, tl.minimum(counts[None, :] - first, ROWS), 0), 1), mask=live)
    tl.store(to_starts_ptr + n, tl.sum(tl.where(mine, starts[None, :] + first, 0), 1), mask=live)
    tl.store(to_slots_ptr + n, tl.sum(tl.where(mine, slots[None, :] + 1, 0), 1) - 1, mask=live)


@triton.jit(do_not_specialize=["rows"])  # graphs of each size need no kernel of their own
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
    group = tl.program_id(1)
    slot = tl.load(slots_ptr + group)
    count = tl.load(counts_ptr + group)
    start = tl.load(starts_ptr + group)
    if (slot < 0) | (count == 0):
        if WAITS:  # what follows may rely on the kernel before this one
            tl.extra.cuda.gdc_wait()
        return
    _shrink_piece(
        x_ptr, a0_ptr, a1_ptr, a2_ptr, partial_ptr, order_ptr + start, slot, count, tl.program_id(0), rows, K,
        stride_x, RANK, RANK_BLOCK, SPLITS, INPUTS, ROWS, WHOLE_K, WAITS, EXACT,
    )  # fmt: skip


@triton.jit
def _shrink_piece(
    x_ptr, a0_ptr, a1_ptr, a2_ptr, partial_ptr, order_ptr, slot, count, number, rows, K, stride_x,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, SPLITS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
    WHOLE_K: tl.constexpr, WAITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Multiply a group's rows with piece ``number`` of all slices' pieces."""
    piece, part = number % SPLITS, number // SPLITS
    k = piece * INPUTS + tl.arange(0, INPUTS)
    r = tl.arange(0, RANK_BLOCK)
    at = slot.to(tl.int64) * RANK * K + r[:, None] * K + k[None, :]
    mask = (r < RANK)[:, None] & (k < K)[None, :]
    a = _of_slice(a0_ptr, a1_ptr, a2_ptr, part, at, mask, (RANK == RANK_BLOCK) and WHOLE_K)
    m = tl.arange(0, ROWS)
    for first in tl.range(0, count, ROWS, num_stages=1):  # one pass of split groups
        live = first + m < count
        row = tl.load(order_ptr + first + m, mask=live, other=0)
        if WAITS:
            tl.extra.cuda.gdc_wait()
        x_mask = live[None, :] if WHOLE_K else live[None, :] & (k < K)[:, None]
        x = tl.load(x_ptr + (row * stride_x)[None, :] + k[:, None], mask=x_mask, other=0.0)
        sums = _dot(a, x, EXACT)
        out = partial_ptr + (((part * SPLITS + piece) * rows + row) * RANK)[None, :] + r[:, None]
        tl.store(out, sums, mask=live[None, :] & (r < RANK)[:, None])


@triton.jit(do_not_specialize=["rows"])
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
    _expand_tile(
        partial_ptr, b0_ptr, b1_ptr, b2_ptr, y_ptr, order_ptr + start, slot, count, tl.program_id(0), rows, N0, N1,
        N2, scale, stride_y, RANK, RANK_BLOCK, SPLITS, OUTPUTS, ROWS, WHOLE_N, WAITS, EXACT,
    )  # fmt: skip


@triton.jit
def _expand_tile(
    partial_ptr, b0_ptr, b1_ptr, b2_ptr, y_ptr, order_ptr, slot, count, tile, rows, N0, N1, N2, scale, stride_y,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, SPLITS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    WHOLE_N: tl.constexpr, WAITS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Add a tile of all slices' tiles to a group's rows of y."""
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
    for first in tl.range(0, count, ROWS, num_stages=1):  # one pass of split groups
        live = first + m < count
        row = tl.load(order_ptr + first + m, mask=live, other=0)
        if WAITS:
            tl.extra.cuda.gdc_wait()
        y_mask = live[None, :] if WHOLE_N else live[None, :] & (n < N)[:, None]
        out = y_ptr + (row * stride_y)[None, :] + (column + n)[:, None]
        y = tl.load(out, mask=y_mask, other=0.0)
        sums_mask = live[None, :] & (r < RANK)[:, None]
        sums = tl.zeros((RANK_BLOCK, ROWS), dtype=tl.float32)
        for piece in tl.static_range(SPLITS):
            place = ((part * SPLITS + piece) * rows + row) * RANK
            sums += tl.load(partial_ptr + place[None, :] + r[:, None], mask=sums_mask, other=0.0)
        change = _dot(b, (sums * scale).to(tl.bfloat16), EXACT).to(tl.bfloat16)
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
