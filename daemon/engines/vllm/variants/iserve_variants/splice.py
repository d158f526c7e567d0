"""Codes to bfloat16 in registers, as the left operand of a product."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["unpack"]


@triton.jit
def unpack(words, top, BITS: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr):
    """Return the bfloat16 values ``code - ZERO`` [outputs, 128] of words [outputs, lanes].

    Words of one bit are given twice: the second 8 of 16 lanes take the odd places.
    ``top`` matters for three bits: the words of the third bit [outputs, 16], each twice.
    """
    if BITS == 1:
        return _unpack_1(words, ZERO, ASM)
    elif BITS == 2:
        return _unpack_2(words, ZERO, ASM)
    elif BITS == 3:
        return _unpack_3(words, top, ZERO, ASM)
    else:
        return _unpack_4(words, ZERO, ASM)


@triton.jit
def _unpack_1(w, ZERO: tl.constexpr, ASM: tl.constexpr):
    half = (tl.arange(0, 16) // 8).to(tl.int16)[None, :]
    if ASM != "":
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [w, tl.broadcast_to(half, w.shape)],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        t = w.to(tl.int32) >> half.to(tl.int32)
        p0, p1 = _bit(t, 0, ZERO), _bit(t, 1, ZERO)
        p2, p3 = _bit(t, 2, ZERO), _bit(t, 3, ZERO)
        p4, p5 = _bit(t, 4, ZERO), _bit(t, 5, ZERO)
        p6, p7 = _bit(t, 6, ZERO), _bit(t, 7, ZERO)
    return tl.reshape(tl.permute(_join_8(p0, p1, p2, p3, p4, p5, p6, p7), (0, 4, 3, 2, 1)), (w.shape[0], 128))


@triton.jit
def _unpack_2(w, ZERO: tl.constexpr, ASM: tl.constexpr):
    if ASM != "":
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
            [w],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        p0, p1 = _value(w, 0, 2, ZERO), _value(w, 1, 2, ZERO)
        p2, p3 = _value(w, 2, 2, ZERO), _value(w, 3, 2, ZERO)
        p4, p5 = _value(w, 4, 2, ZERO), _value(w, 5, 2, ZERO)
        p6, p7 = _value(w, 6, 2, ZERO), _value(w, 7, 2, ZERO)
    return tl.reshape(tl.permute(_join_8(p0, p1, p2, p3, p4, p5, p6, p7), (0, 4, 3, 2, 1)), (w.shape[0], 128))


@triton.jit
def _unpack_3(w, top, ZERO: tl.constexpr, ASM: tl.constexpr):
    half = (tl.arange(0, 16) // 8).to(tl.int16)[None, :]
    if ASM != "":
        p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [w, top, tl.broadcast_to(half, w.shape)],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        t = top.to(tl.int32) >> half.to(tl.int32)
        p0, p1 = _value_3(w, t, 0, ZERO), _value_3(w, t, 1, ZERO)
        p2, p3 = _value_3(w, t, 2, ZERO), _value_3(w, t, 3, ZERO)
        p4, p5 = _value_3(w, t, 4, ZERO), _value_3(w, t, 5, ZERO)
        p6, p7 = _value_3(w, t, 6, ZERO), _value_3(w, t, 7, ZERO)
    return tl.reshape(tl.permute(_join_8(p0, p1, p2, p3, p4, p5, p6, p7), (0, 4, 3, 2, 1)), (w.shape[0], 128))


@triton.jit
def _unpack_4(w, ZERO: tl.constexpr, ASM: tl.constexpr):
    if ASM != "":
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,r", [w], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    else:
        p0, p1 = _value(w, 0, 4, ZERO), _value(w, 1, 4, ZERO)
        p2, p3 = _value(w, 2, 4, ZERO), _value(w, 3, 4, ZERO)
    joined = tl.join(tl.join(p0, p1), tl.join(p2, p3))
    return tl.reshape(tl.permute(joined, (0, 3, 2, 1)), (w.shape[0], 128))


@triton.jit
def _value(w, PLACE: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    code = (w.to(tl.int32) >> (PLACE * BITS)) & (2**BITS - 1)
    return (code.to(tl.float32) - ZERO).to(tl.bfloat16)


@triton.jit
def _bit(t, PLACE: tl.constexpr, ZERO: tl.constexpr):
    return (((t >> (2 * PLACE)) & 1).to(tl.float32) - ZERO).to(tl.bfloat16)


@triton.jit
def _value_3(w, top, PLACE: tl.constexpr, ZERO: tl.constexpr):
    code = ((w.to(tl.int32) >> (2 * PLACE)) & 3) + ((top >> (2 * PLACE)) & 1) * 4
    return (code.to(tl.float32) - ZERO).to(tl.bfloat16)


@triton.jit
def _join_8(p0, p1, p2, p3, p4, p5, p6, p7):
    return tl.join(tl.join(tl.join(p0, p1), tl.join(p2, p3)), tl.join(tl.join(p4, p5), tl.join(p6, p7)))
