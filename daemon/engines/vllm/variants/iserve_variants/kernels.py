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

__all__ = ["add_products"]


@triton.jit(do_not_specialize=["MIN_GROUPS"])
def add_products(
    x_ptr,  # bfloat16 [rows, K]
    y_ptr,  # bfloat16 [rows, N], added to
    codes_ptr,  # int16 [slots, tiles of 64, G, 64, words]
    scales_ptr,  # bfloat16 [slots, G, NP]
    order_ptr,
    segments_ptr,
    num_segments_ptr,
    partial_ptr,  # float32 [programs, 2, BN * ROWS]
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
    SMALL_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,  # groups of a step of the loop, 1 or 2, of which G is a multiple
    STAGES: tl.constexpr,
    SCALES_AHEAD: tl.constexpr,  # whether scales are loaded a group ahead here, not by the compiler's stages
    WHOLE_N: tl.constexpr,  # whether NP is whole tiles of BN
    WHOLE_K: tl.constexpr,  # whether K is whole groups
):
    tiles = tl.cdiv(NP, BN)
    units = tl.load(num_segments_ptr) * tiles * G
    share = tl.maximum(tl.cdiv(units, tl.num_programs(0)), MIN_GROUPS)
    share = tl.cdiv(share, STEP) * STEP
    unit = tl.program_id(0) * share
    end = tl.minimum(unit + share, units)
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
                    share, N, NP, K, G, stride_x, stride_y,
                    BITS, ZERO, ASM, BN, SMALL_ROWS, ROWS, STEP, STAGES, SCALES_AHEAD, WHOLE_N, WHOLE_K,
                )  # fmt: skip
            else:
                _part(
                    x_ptr, y_ptr, codes, scales, rows_ptr, partial_ptr, arrived_ptr, count, tile, row0, g0, g1,
                    share, N, NP, K, G, stride_x, stride_y,
                    BITS, ZERO, ASM, BN, ROWS, ROWS, STEP, STAGES, SCALES_AHEAD, WHOLE_N, WHOLE_K,
                )  # fmt: skip
        else:
            _part(
                x_ptr, y_ptr, codes, scales, rows_ptr, partial_ptr, arrived_ptr, count, tile, row0, g0, g1,
                share, N, NP, K, G, stride_x, stride_y,
                BITS, ZERO, ASM, BN, ROWS, ROWS, STEP, STAGES, SCALES_AHEAD, WHOLE_N, WHOLE_K,
            )  # fmt: skip
        unit += g1 - g0


@triton.jit
def _part(
    x_ptr, y_ptr, codes_ptr, scales_ptr, rows_ptr, partial_ptr, arrived_ptr, count, tile, row0, g0, g1, share,
    N, NP, K, G, stride_x, stride_y,
    BITS: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, SCALES_AHEAD: tl.constexpr,
    WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Add groups g0 to g1 of a tile to y, or keep them until the tile's last part arrives."""
    m = tl.arange(0, BM)
    row = tl.load(rows_ptr + tl.minimum(m, count - 1))
    total = _group_sums(
        x_ptr, codes_ptr, scales_ptr, row, count, row0, g0, g1, NP, K, G, stride_x,
        BITS, ZERO, ASM, BN, BM, STEP, STAGES, SCALES_AHEAD, WHOLE_N, WHOLE_K,
    )  # fmt: skip
    is_last = True
    if (g0 > 0) | (g1 < G):
        place = tl.arange(0, BN)[:, None] + m[None, :] * BN
        program = tl.program_id(0)
        # A program has at most one part that does not begin its tile (its first) and one that only begins it.
        tl.store(partial_ptr + (program * 2 + (g0 == 0).to(tl.int32)) * (BN * ROWS) + place, total)
        tl.debug_barrier()
        first = tile * G // share
        last = ((tile + 1) * G - 1) // share
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == last - first
        if is_last:
            total = tl.zeros((BN, BM), dtype=tl.float32)
            for each in range(first, last + 1):
                at = (each * 2 + (each == first).to(tl.int32)) * (BN * ROWS)
                total += tl.load(partial_ptr + at + place, cache_modifier=".cg")
            tl.store(arrived_ptr + tile, 0)
    if is_last:
        rn = row0 + tl.arange(0, BN)
        mask = (rn < N)[:, None] & (m < count)[None, :]
        out = y_ptr + (row * stride_y)[None, :] + rn[:, None]
        y = tl.load(out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, (y + total).to(tl.bfloat16), mask=mask)


@triton.jit
def _group_sums(
    x_ptr, codes_ptr, scales_ptr, row, count, row0, g0, g1, NP, K, G, stride_x,
    BITS: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr, SCALES_AHEAD: tl.constexpr,
    WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Return the float32 sums [BN, BM] of groups g0 to g1 for BN outputs from ``row0`` on."""
    WORDS: tl.constexpr = 8 * BITS
    LANES: tl.constexpr = 16 if BITS == 3 else WORDS
    rn = row0 + tl.arange(0, BN)
    lane = tl.arange(0, LANES)
    row_words = codes_ptr + (rn // 64).to(tl.int64) * (G * 64 * WORDS) + (rn % 64) * WORDS
    words = row_words[:, None] + lane[None, :]
    k = tl.arange(0, 128)
    xs = x_ptr + (row * stride_x)[:, None] + k[None, :]
    # For three bits: the words of the third bit, each for two lanes; the second lane's code is one bit higher.
    tops = row_words[:, None] + (16 + lane % 8)[None, :]
    half = (lane // 8).to(tl.int16)[None, :]
    live = (tl.arange(0, BM) < count)[:, None]
    total = tl.zeros((BN, BM), dtype=tl.float32)
    if STEP == 2:
        pair = tl.arange(0, 2)
        ahead0 = _scales(scales_ptr + g0 * NP, rn, NP, WHOLE_N)
        ahead1 = _scales(scales_ptr + g0 * NP + NP, rn, NP, WHOLE_N)
        for step in tl.range(g0 // 2, g1 // 2, num_stages=STAGES):
            g = step * 2
            if SCALES_AHEAD:
                s0, s1 = ahead0, ahead1
                next_scales = scales_ptr + tl.minimum(g + 2, g1 - 2) * NP
                ahead0 = _scales(next_scales, rn, NP, WHOLE_N)
                ahead1 = _scales(next_scales + NP, rn, NP, WHOLE_N)
            else:
                at = scales_ptr + (g + pair)[None, :] * NP + rn[:, None]
                s0, s1 = tl.split(tl.load(at) if WHOLE_N else tl.load(at, mask=(rn < NP)[:, None], other=0.0))
            p0 = _group(words, xs, tops, half, live, rn, g, NP, K, BITS, ZERO, ASM, WORDS, WHOLE_N, WHOLE_K)
            total += p0 * s0.to(tl.float32)[:, None]
            p1 = _group(words, xs, tops, half, live, rn, g + 1, NP, K, BITS, ZERO, ASM, WORDS, WHOLE_N, WHOLE_K)
            total += p1 * s1.to(tl.float32)[:, None]
    else:
        following = _scales(scales_ptr + g0 * NP, rn, NP, WHOLE_N)
        for g in tl.range(g0, g1, num_stages=STAGES):
            if SCALES_AHEAD:
                s = following
                following = _scales(scales_ptr + tl.minimum(g + 1, g1 - 1) * NP, rn, NP, WHOLE_N)
            else:
                s = _scales(scales_ptr + g * NP, rn, NP, WHOLE_N)
            product = _group(words, xs, tops, half, live, rn, g, NP, K, BITS, ZERO, ASM, WORDS, WHOLE_N, WHOLE_K)
            total += product * s.to(tl.float32)[:, None]
    return total


@triton.jit
def _group(
    words, xs, tops, half, live, rn, g, NP, K,
    BITS: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr, WORDS: tl.constexpr,
    WHOLE_N: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Return the float32 product [BN, BM] of group ``g`` without its scales."""
    k = tl.arange(0, 128)
    at = words + g * (64 * WORDS)
    w = tl.load(at) if WHOLE_N else tl.load(at, mask=(rn < NP)[:, None], other=0)
    if BITS == 3:
        at = tops + g * (64 * WORDS)
        top = tl.load(at) if WHOLE_N else tl.load(at, mask=(rn < NP)[:, None], other=0)
    else:
        top = w
    if WHOLE_K:
        x = tl.load(xs + g * 128, mask=live, other=0.0)
    else:
        x = tl.load(xs + g * 128, mask=live & (g * 128 + k < K)[None, :], other=0.0)
    v = unpack(w, top, half, BITS, ZERO, ASM)
    if ASM != "":
        return tl.dot(v, tl.trans(x))
    else:  # Triton's interpreter multiplies bfloat16 operands as if they were integers
        return tl.dot(v.to(tl.float32), tl.trans(x).to(tl.float32), input_precision="ieee")


@triton.jit
def _scales(scales_ptr, rn, NP, WHOLE_N: tl.constexpr):
    if WHOLE_N:
        return tl.load(scales_ptr + rn)
    else:
        return tl.load(scales_ptr + rn, mask=rn < NP, other=0.0)
