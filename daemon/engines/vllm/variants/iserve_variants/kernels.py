"""Kernel that adds grouped low-bit products: y[row] += change of the row's delta times x[row], all deltas at once.

**Work.** A segment is at most ``ROWS`` rows of one delta; its product is cut into tiles of ``BN`` outputs, and a
tile into groups of 128 inputs, the units of work. A fixed number of programs takes equal, contiguous ranges of all
units (stream-K: Osama et al., PPoPP 2023), found in device memory. So one delta occupies the GPU as many do, and
without segments every program returns at once. A tile that ends in another program than it began in is summed in
float32 by the program that arrives last, in the order of the programs: the sum does not depend on which one is.
It depends on the number of segments, which decides where tiles are cut.

**Arithmetic.** Values ``code - zero`` are exact in bfloat16, sums are float32, and a group's sum is scaled by its
float32 scale. The weights are the left operand of the product, from registers, and the rows its narrow side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from iserve_variants.splice import unpack

__all__ = ["add_products", "add_rows"]


@triton.jit(do_not_specialize=["MIN_GROUPS"])
def add_products(
    x_ptr,  # bfloat16 [rows, K]
    y_ptr,  # [rows, N]; with ADD bfloat16 that is added to, else the products are stored there
    codes_ptr,  # int16 [slots, tiles of 64, G, 64, words]
    scales_ptr,  # bfloat16 [slots, G, NP]
    order_ptr,
    segments_ptr,
    num_segments_ptr,
    partial_ptr,  # float32 [programs, 2, ROWS, BN]
    arrived_ptr,  # int32 [most segments * tiles], 0 before and after
    N,
    NP,  # N padded to 64
    K,
    G,
    stride_x,
    stride_y,
    MIN_GROUPS,  # fewest units of a program
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,  # empty: plain arithmetic, for the interpreter
    BN: tl.constexpr,
    SMALL_ROWS: tl.constexpr,  # rows of the product for short segments
    ROWS: tl.constexpr,  # and for all longer ones
    STEP: tl.constexpr,  # groups of a step of the loop: 1, 2 or 4; G is a multiple
    STAGES: tl.constexpr,
    SCALES_AHEAD: tl.constexpr,  # whether scales are loaded a step ahead here, not by the compiler's stages
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,  # whether the launch may begin before the kernel before it, which wrote y, has ended
    WHOLE_N: tl.constexpr,  # whether NP is whole tiles of BN
    WHOLE_K: tl.constexpr,  # whether K is whole groups
):
    tiles = tl.cdiv(NP, BN)
    units = tl.load(num_segments_ptr) * tiles * G
    share = tl.maximum(tl.cdiv(units, tl.num_programs(0)), MIN_GROUPS)
    share = tl.cdiv(share, STEP) * STEP
    unit = tl.program_id(0) * share
    end = tl.minimum(unit + share, units)
    if OVERLAP and unit >= end:
        # Nor may a launch without any work end before the kernel that wrote y: the next one waits for it alone.
        tl.extra.cuda.gdc_wait()
    while unit < end:
        tile = unit // G
        g0 = unit - tile * G
        g1 = tl.minimum(G, g0 + end - unit)
        segment = tile // tiles
        row0 = (tile - segment * tiles) * BN
        slot = tl.load(segments_ptr + segment * 4).to(tl.int64)
        rows_ptr = order_ptr + tl.load(segments_ptr + segment * 4 + 1)
        count = tl.load(segments_ptr + segment * 4 + 2)
        codes = codes_ptr + slot * NP * G * (8 * BITS)
        scales = scales_ptr + slot * NP * G
        if SMALL_ROWS < ROWS:
            if count <= SMALL_ROWS:
                _part(
                    x_ptr, y_ptr, codes, scales, rows_ptr, partial_ptr, arrived_ptr, count, tile, row0, g0, g1,
                    share, N, NP, K, G, stride_x, stride_y, BITS, ZERO, ASM, BN, SMALL_ROWS, ROWS, STEP, STAGES,
                    SCALES_AHEAD, ADD, OVERLAP, WHOLE_N, WHOLE_K,
                )  # fmt: skip
            else:
                _part(
                    x_ptr, y_ptr, codes, scales, rows_ptr, partial_ptr, arrived_ptr, count, tile, row0, g0, g1,
                    share, N, NP, K, G, stride_x, stride_y, BITS, ZERO, ASM, BN, ROWS, ROWS, STEP, STAGES,
                    SCALES_AHEAD, ADD, OVERLAP, WHOLE_N, WHOLE_K,
                )  # fmt: skip
        else:
            _part(
                x_ptr, y_ptr, codes, scales, rows_ptr, partial_ptr, arrived_ptr, count, tile, row0, g0, g1,
                share, N, NP, K, G, stride_x, stride_y, BITS, ZERO, ASM, BN, ROWS, ROWS, STEP, STAGES,
                SCALES_AHEAD, ADD, OVERLAP, WHOLE_N, WHOLE_K,
            )  # fmt: skip
        unit += g1 - g0


@triton.jit
def _part(
    x_ptr, y_ptr, codes_ptr, scales_ptr, rows_ptr, partial_ptr, arrived_ptr, count, tile, row0, g0, g1,
    share, N, NP, K, G, stride_x, stride_y, BITS: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    SCALES_AHEAD: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr, WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Add groups g0 to g1 of a tile to y, or keep them until the tile's last part arrives."""
    total = _group_sums(
        x_ptr, codes_ptr, scales_ptr, rows_ptr, count, row0, g0, g1, NP, K, G, stride_x,
        BITS, ZERO, ASM, BN, BM, STEP, STAGES, SCALES_AHEAD, WHOLE_N, WHOLE_K,
    )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    # A program has at most one part that does not begin its tile (its first) and one that only begins it.
    SIZE: tl.constexpr = BN * ROWS
    place = tl.arange(0, BN)[:, None] + tl.arange(0, BM)[None, :] * BN
    first = tile * G // share
    last = ((tile + 1) * G - 1) // share
    is_last = True
    if last > first:
        program = tl.program_id(0)
        tl.store(partial_ptr + (program * 2 + (program == first).to(tl.int32)) * SIZE + place, total)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == last - first
        if is_last:
            total = tl.load(partial_ptr + (first * 2 + 1) * SIZE + place, cache_modifier=".cg")
            for each in range(first + 1, last + 1):
                total += tl.load(partial_ptr + each * 2 * SIZE + place, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if is_last:
        _write(y_ptr, rows_ptr, total, count, row0, N, stride_y, BN, BM, ADD)


@triton.jit
def _write(
    y_ptr, rows_ptr, total, count, row0, N, stride_y, BN: tl.constexpr, BM: tl.constexpr, ADD: tl.constexpr
):
    m = tl.arange(0, BM)
    row = tl.load(rows_ptr + tl.minimum(m, count - 1))
    rn = row0 + tl.arange(0, BN)
    mask = (rn < N)[:, None] & (m < count)[None, :]
    out = y_ptr + (row * stride_y)[None, :] + rn[:, None]
    if ADD:
        total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(y_ptr, change_ptr, order_ptr, num_rows_ptr, N, stride_y, stride_change, BN: tl.constexpr):
    """Add ``change`` to the routed rows of y."""
    place = tl.program_id(1)
    if place < tl.load(num_rows_ptr):
        row = tl.load(order_ptr + place).to(tl.int64)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        y = tl.load(y_ptr + row * stride_y + n, mask=n < N, other=0.0).to(tl.float32)
        change = tl.load(change_ptr + row * stride_change + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * stride_y + n, (y + change).to(tl.bfloat16), mask=n < N)


@triton.jit
def _group_sums(
    x_ptr, codes_ptr, scales_ptr, rows_ptr, count, row0, g0, g1, NP, K, G, stride_x,
    BITS: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, SCALES_AHEAD: tl.constexpr, WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Return the float32 sums [BN, BM] of groups g0 to g1, for BN outputs from ``row0`` on."""
    WORDS: tl.constexpr = 8 * BITS
    rn = row0 + tl.arange(0, BN)
    inside = (rn < NP)[:, None]
    words = codes_ptr + (rn // 64).to(tl.int64) * (G * 64 * WORDS) + (rn % 64) * WORDS
    m = tl.arange(0, BM)
    live = (m < count)[:, None]
    row = tl.load(rows_ptr + tl.minimum(m, count - 1))
    x = x_ptr + (row * stride_x)[:, None] + tl.arange(0, 128)[None, :]
    total = tl.zeros((BN, BM), dtype=tl.float32)
    ahead = _scales(scales_ptr + g0 * NP, rn, NP, WHOLE_N)
    for step in tl.range(g0 // STEP, g1 // STEP, num_stages=STAGES):
        if STEP == 4:
            s0, s1, s2, s3 = _scales_4(scales_ptr + step * 4 * NP, rn, NP, WHOLE_N)
        elif STEP == 2:
            s0, s1 = _scales_2(scales_ptr + step * 2 * NP, rn, NP, WHOLE_N)
        elif SCALES_AHEAD:
            s0 = ahead
            ahead = _scales(scales_ptr + tl.minimum(step + 1, g1 - 1) * NP, rn, NP, WHOLE_N)
        else:
            s0 = _scales(scales_ptr + step * NP, rn, NP, WHOLE_N)
        for j in tl.static_range(STEP):
            s = s0 if j == 0 else (s1 if j == 1 else (s2 if j == 2 else s3))
            g = step * STEP + j
            v = _values(words + g * (64 * WORDS), inside, BITS, ZERO, ASM, BN, WHOLE_N)
            if WHOLE_K:
                xg = tl.load(x + g * 128, mask=live, other=0.0)
            else:
                xg = tl.load(x + g * 128, mask=live & (tl.arange(0, 128) < K - g * 128)[None, :], other=0.0)
            total += _dot(v, xg, ASM) * s.to(tl.float32)[:, None]
    return total


@triton.jit
def _values(
    words,
    inside,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    ASM: tl.constexpr,
    BN: tl.constexpr,
    WHOLE_N: tl.constexpr,
):
    """Return the bfloat16 values ``code - ZERO`` [BN, 128] of a group, whose rows of words begin at ``words``."""
    if BITS == 3:
        # 16 words of the two lower bits, then the 8 of the third, each twice.
        column = tl.arange(0, 32)
        at = words[:, None] + tl.where(column < 16, column, 16 + column % 8)[None, :]
        both = tl.load(at) if WHOLE_N else tl.load(at, mask=inside, other=0)
        w, top = tl.split(tl.permute(tl.reshape(both, (BN, 2, 16)), (0, 2, 1)))
    else:
        column = tl.arange(0, 16) % 8 if BITS == 1 else tl.arange(0, 8 * BITS)  # those of one bit are given twice
        at = words[:, None] + column[None, :]
        w = tl.load(at) if WHOLE_N else tl.load(at, mask=inside, other=0)
        top = w
    return unpack(w, top, BITS, ZERO, ASM)


@triton.jit
def _dot(a, x, ASM: tl.constexpr):
    if ASM != "" and x.shape[0] == 8:
        # A batch of four, a quarter of the outputs each: Triton 3.8 would take the wide form for 8 columns too.
        quarters = tl.reshape(a, (4, a.shape[0] // 4, 128))
        columns = tl.broadcast_to(tl.reshape(tl.trans(x), (1, 128, 8)), (4, 128, 8))
        return tl.reshape(tl.dot(quarters, columns), (a.shape[0], 8))
    elif ASM != "":
        return tl.dot(a, tl.trans(x))
    else:  # Triton's interpreter multiplies bfloat16 operands as if they were integers
        return tl.dot(a.to(tl.float32), tl.trans(x).to(tl.float32), input_precision="ieee")


@triton.jit
def _scales(scales_ptr, rn, NP, WHOLE_N: tl.constexpr):
    return tl.load(scales_ptr + rn) if WHOLE_N else tl.load(scales_ptr + rn, mask=rn < NP, other=0.0)


@triton.jit
def _scales_2(scales_ptr, rn, NP, WHOLE_N: tl.constexpr):
    at = scales_ptr + rn[:, None] + (tl.arange(0, 2) * NP)[None, :]
    return tl.split(tl.load(at) if WHOLE_N else tl.load(at, mask=(rn < NP)[:, None], other=0.0))


@triton.jit
def _scales_4(scales_ptr, rn, NP, WHOLE_N: tl.constexpr):
    two = tl.arange(0, 2)
    at = scales_ptr + rn[:, None, None] + (two * 2 * NP)[None, :, None] + (two * NP)[None, None, :]
    even, odd = tl.split(tl.load(at) if WHOLE_N else tl.load(at, mask=(rn < NP)[:, None, None], other=0.0))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return s0, s1, s2, s3
