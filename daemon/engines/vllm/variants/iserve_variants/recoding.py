"""Codes of a narrower format in a wider one: the same values, with the same scales.

Levels of dense formats are half-way between whole numbers, and those of a wider one contain those of a narrower
one: ``code - 1.5`` of 2 bits is ``(code + 6) - 7.5`` of 4. So matrices of several widths share slots of the widest
format.
"""

from __future__ import annotations

import torch

from iserve_variants.formats import FORMATS, GROUP, CodeFormat

__all__ = ["format_in", "recode_into", "unpack_codes"]

_PIECE_WEIGHTS = 2**22  # recoded at a time, which takes 2 bytes each a few times over
_WORD_BITS = 16


def format_in(words: int, slots: CodeFormat) -> CodeFormat | None:
    """Return the format with ``words`` words a group whose values ``slots`` hold; None: there is none."""
    found = (one for one in FORMATS.values() if one.words == words and slots.holds(one))
    return next(found, None)


def recode_into(out: torch.Tensor, codes: torch.Tensor, of: CodeFormat, to: CodeFormat) -> None:
    """Write ``codes`` of format ``of`` to ``out`` in format ``to``, on the device of ``out``.

    Args:
        out: int16 [tiles, groups, 64, words of ``to``].
        codes: int16 [tiles, groups, 64, words of ``of``], of any device.

    Raises:
        ValueError: ``to`` does not hold the values of ``of``.
    """
    if not to.holds(of):
        raise ValueError(f"{to} does not hold the values of {of}")
    if of == to:
        out.copy_(codes, non_blocking=True)
        return
    offset = int(to.zero - of.zero)
    tiles = max(1, _PIECE_WEIGHTS // (codes[0].numel() // of.words * GROUP))
    for first in range(0, len(codes), tiles):
        piece = codes[first : first + tiles].to(out.device, non_blocking=True)
        out[first : first + tiles].copy_(_pack(unpack_codes(piece, of.bits) + offset, to.bits))


def unpack_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes [..., 128] that ``words`` [..., words] hold, int16 both, in the order of inputs."""
    values, first, low = None, 0, 0
    for width in _planes(bits):
        end = first + GROUP * width // _WORD_BITS
        plane = words[..., first:end]
        places = torch.cat([(plane >> at) & (2**width - 1) for at in range(0, _WORD_BITS, width)], dim=-1)
        values = places if values is None else values | (places << low)
        first, low = end, low + width
    assert values is not None
    return values


def _pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words of codes [..., 128]."""
    planes, low = [], 0
    for width in _planes(bits):
        places = ((values >> low) & (2**width - 1)).unflatten(-1, (_WORD_BITS // width, -1))
        words = places[..., 0, :].clone()
        for place in range(1, _WORD_BITS // width):
            words |= places[..., place, :] << (width * place)
        planes.append(words)
        low += width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=-1)


def _planes(bits: int) -> tuple[int, ...]:
    """Return the widths that divide a word, which together are ``bits``."""
    return (2, 1) if bits == 3 else (bits,)
