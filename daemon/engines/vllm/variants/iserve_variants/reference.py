"""Reference of the kernels in plain torch: what they are tested against, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from iserve_variants.formats import GROUP, CodeFormat
from iserve_variants.recoding import unpack_codes

__all__ = ["adapter_change", "delta_product", "dequantize"]


def dequantize(codes: torch.Tensor, scales: torch.Tensor, format_: CodeFormat) -> torch.Tensor:
    """Return the float32 change [padded outputs, padded inputs] that one delta's words and scales mean.

    Args:
        codes: int16 [tiles, groups, 64, words].
        scales: [groups, padded outputs].
    """
    tiles, groups, rows, _ = codes.shape
    values = unpack_codes(codes, format_.bits)
    matrix = values.permute(0, 2, 1, 3).reshape(tiles * rows, groups, GROUP).float() - format_.zero
    return (matrix * scales.float().t()[:, :, None]).reshape(tiles * rows, groups * GROUP)


def delta_product(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, slot_of_row: torch.Tensor, format_: CodeFormat
) -> torch.Tensor:
    """Return the float32 products [rows, padded outputs] of each row of ``x`` and the delta in its slot.

    Args:
        x: [rows, inputs].
        codes: int16 [slots, tiles, groups, 64, words].
        scales: [slots, groups, padded outputs].
        slot_of_row: integers [rows]; -1: no delta, the product is 0.
    """
    y = torch.zeros(x.shape[0], scales.shape[-1], device=x.device)
    for slot in range(codes.shape[0]):
        rows = (slot_of_row == slot).nonzero()[:, 0]
        if len(rows):
            change = dequantize(codes[slot], scales[slot], format_)[:, : x.shape[1]]
            y[rows] = x[rows].float() @ change.t()
    return y


def adapter_change(
    x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], slot_of_row: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the float32 change [rows, outputs of all slices] of each row of ``x`` by the adapter in its slot.

    Args:
        x: [rows, inputs].
        a: [slots, rank, inputs] of each slice.
        b: [slots, outputs of the slice, rank] of each slice.
        slot_of_row: integers [rows]; -1: a row of the base, whose change is 0.
    """
    change = torch.zeros(x.shape[0], sum(each.shape[-2] for each in b), device=x.device)
    for slot in slot_of_row[slot_of_row >= 0].unique().tolist():
        rows = (slot_of_row == slot).nonzero()[:, 0]
        products = [
            scale * (x[rows].float() @ down[slot].float().t()) @ up[slot].float().t()
            for down, up in zip(a, b, strict=True)
        ]
        change[rows] = torch.cat(products, dim=1)
    return change
