"""Merging for prompts: base weights + one delta into a scratch matrix, for one dense product over many rows.

Base and delta as two products compute twice as much as base alone; merging computes once, and reads and writes the
weights once more (4 bytes a weight and the codes), whatever the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iserve_variants.formats import CodeFormat
from iserve_variants.launches import merge_launch

__all__ = ["merge_delta"]


def merge_delta(
    weight: torch.Tensor,
    out: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    format_: CodeFormat,
    *,
    groups: int = 4,
    warps: int = 4,
) -> None:
    """Write to ``out`` the sum of ``weight`` and one delta, computed in float32 and rounded once.

    Args:
        weight: bfloat16 [outputs, inputs], rows contiguous.
        out: bfloat16 [outputs, inputs], rows contiguous; not ``weight``.
        codes: int16 [tiles, groups, 64, words] of one slot.
        scales: bfloat16 [groups, padded outputs] of one slot.
        groups: of 128 inputs that a program takes.
        warps: of a program.

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
    tiles, all_groups = codes.shape[:2]
    kernel = merge_launch(weight, out, format_, groups=groups, warps=warps)
    _merge[(tiles, triton.cdiv(all_groups, groups))](
        weight, out, codes, scales, *kernel.integers, **kernel.constants
    )


@triton.jit
def _merge(
    w_ptr, out_ptr, codes_ptr, scales_ptr, N, NP, K, G, stride_w, stride_out,
    BITS: tl.constexpr, ZERO: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = 8 * BITS
    LANES: tl.constexpr = 16 if BITS == 3 else WORDS
    PLACES: tl.constexpr = 128 // LANES
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    tile = tl.program_id(0)
    rows = tl.arange(0, 64)
    lane = tl.arange(0, LANES)[None, None, :]
    place = tl.arange(0, PLACES)[None, :, None]
    rn = (tile * 64 + rows)[:, None, None]
    for j in tl.static_range(GROUPS):
        g = tl.program_id(1) * GROUPS + j
        if WHOLE or g < G:
            k = g * 128 + place * LANES + lane
            mask = (rn < N) & (k < K)
            at = w_ptr + rn.to(tl.int64) * stride_w + k
            base = tl.load(at) if WHOLE else tl.load(at, mask=mask, other=0.0)
            block = codes_ptr + (tile.to(tl.int64) * G + g) * (64 * WORDS) + rows[:, None, None] * WORDS
            code = (tl.load(block + lane).to(tl.int32) >> (place * WIDTH)) & (2**WIDTH - 1)
            if BITS == 3:
                top = tl.load(block + 16 + lane % 8).to(tl.int32)
                code += ((top >> (2 * place + lane // 8)) & 1) * 4
            scale = tl.load(scales_ptr + g * NP + tile * 64 + rows).to(tl.float32)[:, None, None]
            value = (base.to(tl.float32) + (code.to(tl.float32) - ZERO) * scale).to(tl.bfloat16)
            out = out_ptr + rn.to(tl.int64) * stride_out + k
            if WHOLE:
                tl.store(out, value)
            else:
                tl.store(out, value, mask=mask)
