"""Inline assembly that makes values of codes: spliced into the mantissa of a constant, which is subtracted.

A bfloat16 with exponent e, in whose mantissa a code lies from bit a on, is ``2**e * (1 + code * 2**a / 128)``; for
``e = 7 - a`` that is ``2**e + code``. Subtracting ``2**e + zero`` leaves ``code - zero`` without any rounding,
since for a >= 1 all three are bfloat16 numbers. Two words share a 32-bit register, so that one three-input logic
operation and one packed addition make two values; what a shift carries from one word into the other is masked.
"""

from __future__ import annotations

__all__ = ["splice_asm"]

_TWICE = 0x00010001


def splice_asm(bits: int, zero: float) -> str:
    """Return the inline assembly that makes all values of two words of ``bits`` bits a code, around ``zero``.

    Outputs are one register for each place. Inputs are the words; of 3 bits the words of the third bit; and of 1
    and 3 bits the half of the 16 lanes: words of single bits are given to two lanes, of which the second takes the
    odd places.
    """
    places = 4 if bits == 4 else 8
    spacing, width = 16 // places, 2 if bits == 3 else bits
    room = 7 - (1 if bits == 3 else 0)  # of three bits the third follows the two
    at_of, shifts = [], []
    bit = 0
    while bit < 16:
        shifts.append(1 - bit)  # places the code at ``bit`` at bit 1
        at = 1
        while at + width <= room and bit < 16:
            at_of.append((len(shifts) - 1, at))
            at, bit = at + spacing, bit + spacing
    registers = ["one", "zero", "half", "odd", "m", *(f"s{i}" for i in range(len(shifts)))]
    lines, source = ["mov.b32 one, 0x3F803F80;"], f"${places}"
    if bits in (1, 3):
        lines += [f"and.b32 half, ${places + (bits + 1) // 2}, 1;"]
        lines += [f"shr.b32 odd, ${places + bits // 2}, half;"]
        source = source if bits == 3 else "odd"
    lines += [_shift(f"s{i}", source, amount) for i, amount in enumerate(shifts)]
    moved = None
    for place, (shift, at) in enumerate(at_of):
        base = (134 - at) << 7
        mask = (2**width - 1) << at
        lines.append(f"lop3.b32 ${place}, s{shift}, {mask * _TWICE:#x}, {base * _TWICE:#x}, 0xEA;")
        if bits == 3:
            amount = at + 2 - 2 * place  # bit 2 * place of the third plane belongs to this place
            if amount != moved:
                lines.append(_shift("m", "odd", amount))
                moved = amount
            lines.append(f"lop3.b32 ${place}, m, {(4 << at) * _TWICE:#x}, ${place}, 0xEA;")
        # The negative of 2**(7 - at) + zero: the constant of the splice with ``zero`` as its code, and the sign.
        offset = 0x8000 | (base + int(zero * 2**at))
        lines += [f"mov.b32 zero, {offset * _TWICE:#x};", f"fma.rn.bf16x2 ${place}, ${place}, one, zero;"]
    return "{ .reg .b32 " + ", ".join(registers) + ";\n" + "\n".join(lines) + " }"


def _shift(target: str, source: str, left: int) -> str:
    return f"shl.b32 {target}, {source}, {left};" if left > 0 else f"shr.b32 {target}, {source}, {-left};"
