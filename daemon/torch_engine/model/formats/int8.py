"""``int8``, W8A16: symmetric int8 weights with one scale per output channel; activations stay in 16 bit.

``w ~ q * scale`` with ``scale = max|w| / 127`` of the row, so each weight is off by at most ``scale / 2`` (and
the scale's own rounding to 16 bit).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from fingerprint.config import WeightFormat

__all__ = ["Int8Format", "Int8Linear", "quantize_int8"]

# torch's packed int8 kernel on the CPU reads 16 columns at a time and does not check (measured: other widths give
# NaN or a crash). Up to 12 tokens it beats turning the weight back into 16 bit; docs/decisions/0004 has the table.
_PACKED_COLUMNS = 16
_PACKED_MAX_TOKENS = 12


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a [out, in] weight to (int8 [out, in], scale [out] in the weight's dtype); a row of zeros gets
    scale 1.

    The scale is rounded to its dtype first and the weights are divided by the rounded one, so that its rounding
    costs no accuracy; a weight that is then beyond 127 is clamped.
    """
    largest = weight.abs().amax(dim=1).float()
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest)).to(weight.dtype)
    quantized = (weight.float() / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return quantized, scale


class Int8Linear(nn.Module):
    """``x @ (q * scale).T + bias``."""

    def __init__(self, out_features: int, in_features: int, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.register_buffer("quantized", torch.empty(out_features, in_features, dtype=torch.int8, device=meta))
        self.register_buffer("scale", torch.empty(out_features, dtype=dtype, device=meta))
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self._packed(rows):
            out = torch._weight_int8pack_mm(rows, self.quantized, self.scale)
        else:
            out = linear(rows, self.quantized.to(x.dtype)) * self.scale
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _packed(self, rows: torch.Tensor) -> bool:
        return (
            rows.device.type == "cpu"
            and rows.shape[0] <= _PACKED_MAX_TOKENS
            and rows.shape[1] % _PACKED_COLUMNS == 0
            and hasattr(torch, "_weight_int8pack_mm")
        )


class Int8Format:
    name = WeightFormat.INT8

    def refusal(self, layers: nn.ModuleList) -> str | None:
        if any(parameter.dim() == 3 for parameter in layers.parameters()):
            return "the experts of this family are joined tensors, and int8 is done for plain linears only"
        for module in layers.modules():
            if not isinstance(module, nn.Linear) and any(p.dim() == 2 for p in module.parameters(recurse=False)):
                return (
                    f"its layers hold matrices as {type(module).__name__}, and int8 is done for plain linears only"
                )
        return None

    def replace(self, linear: nn.Linear) -> nn.Module:
        return Int8Linear(linear.out_features, linear.in_features, linear.bias, linear.weight.dtype)

    def store(self, module: nn.Module, weight: torch.Tensor) -> None:
        module.quantized, module.scale = quantize_int8(weight)
