"""Merging for prompts: base weights + one delta into a scratch matrix, for one dense product over many rows.

Base and delta as two products compute twice as much as base alone; merging computes once, and reads and writes the
weights once more (4 bytes a weight and the codes), whatever the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iserve_variants.formats import GROUP, TILE_ROWS, CodeFormat

__all__ = ["merge_delta"]

_GROUPS = 4  # of a program


def merge_delta(
    weight: torch.Tensor, out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, format_: CodeFormat
) -> None:
    """Write to ``out`` the sum of ``weight`` and one delta, computed in float32 and rounded once.

    Args:
        weight: bfloat16 [outputs, inputs], rows contiguous.
        out: bfloat16 [outputs, inputs], rows contiguous; not ``weight``.
        codes: int16 [tiles, groups, 64, words] of one slot.
        scales: bfloat16 [groups, padded outputs] of one slot.

    Raises:
        ValueError: shapes that do not belong together.
    """
    outputs, inputs = weight.shape
    if out.shape != weight.shape or weight.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("weight and out have one shape and contiguous rows")
    if codes.shape != format_.codes_shape(outputs, inputs) or scales.shape != format_.scales_shape(
        outputs, inputs
    ):
        raise ValueError(f"codes {list(codes.shape)} are not of {outputs} outputs and {inputs} inputs")
    tiles, groups = codes.shape[:2]
    _merge[(tiles, triton.cdiv(groups, _GROUPS))](
        weight,
        out,
        codes,
        scales,
        outputs,
        tiles * TILE_ROWS,
        inputs,
        groups,
        weight.stride(0),
        out.stride(0),
        BITS=format_.bits,
        ZERO=format_.zero,
        GROUPS=_GROUPS,
        WHOLE=outputs % TILE_ROWS == 0 and inputs % GROUP == 0 and groups % _GROUPS == 0,
        num_warps=4,
    )


@triton.jit
def _merge(
    w_ptr, out_ptr, codes_ptr, scales_ptr, N, NP, K, G, stride_w, stride_out,
    BITS: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = 8 * BITS
    LANES: tl.constexpr = 16 if BITS == 3 else WORDS
    PLACES: tl.constexpr = 128 // LANES
    tile = tl.program_id(0)
    rows = tl.arange(0, 64)
    lane = tl.arange(0, LANES)
    rn = tile * 64 + rows
    for j in tl.static_range(GROUPS):
        g = tl.program_id(1) * GROUPS + j
        if WHOLE or g < G:
            block = codes_ptr + (tile.to(tl.int64) * G + g) * (64 * WORDS) + rows[:, None] * WORDS
            words = tl.load(block + lane[None, :]).to(tl.int32)
            scale = tl.load(scales_ptr + g * NP + rn).to(tl.float32)[:, None]
            if BITS == 3:
                top = tl.load(block + 16 + (lane % 8)[None, :]).to(tl.int32) >> (lane // 8)[None, :]
            for i in tl.static_range(PLACES):
                if BITS == 3:
                    code = ((words >> (2 * i)) & 3) + ((top >> (2 * i)) & 1) * 4
                else:
                    code = (words >> (i * BITS)) & (2**BITS - 1)
                k = g * 128 + i * LANES + lane
                at_w = w_ptr + rn.to(tl.int64)[:, None] * stride_w + k[None, :]
                at_out = out_ptr + rn.to(tl.int64)[:, None] * stride_out + k[None, :]
                if WHOLE:
                    base = tl.load(at_w).to(tl.float32)
                    tl.store(at_out, (base + (code.to(tl.float32) - ZERO) * scale).to(tl.bfloat16))
                else:
                    mask = (rn < N)[:, None] & (k < K)[None, :]
                    base = tl.load(at_w, mask=mask, other=0.0).to(tl.float32)
                    value = (base + (code.to(tl.float32) - ZERO) * scale).to(tl.bfloat16)
                    tl.store(at_out, value, mask=mask)
