"""Operators of linears and embeddings in vLLM's compiled graphs, which find their module by its name."""

# No ``from __future__ import annotations``: schemas of operators are inferred from annotations that are types.

import torch
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from iserve_variants.runtime import EMBEDDINGS, LINEARS

__all__ = ["delta_embedding", "delta_linear", "register_operators"]


def _linear(x: torch.Tensor, bias: torch.Tensor | None, outputs: int, layer_name: LayerNameType) -> torch.Tensor:
    return LINEARS[_resolve_layer_name(layer_name)].multiply(x, bias)


def _linear_fake(
    x: torch.Tensor, bias: torch.Tensor | None, outputs: int, layer_name: LayerNameType
) -> torch.Tensor:
    return x.new_empty((x.shape[0], outputs))


def _embedding(y: torch.Tensor, tokens: torch.Tensor, layer_name: LayerNameType) -> None:
    EMBEDDINGS[_resolve_layer_name(layer_name)].change(y, tokens)


def _embedding_fake(y: torch.Tensor, tokens: torch.Tensor, layer_name: LayerNameType) -> None:
    return


def register_operators() -> None:
    """Define the operators; once in a process."""
    if hasattr(torch.ops.vllm, "iserve_delta_linear"):
        return
    direct_register_custom_op(op_name="iserve_delta_linear", op_func=_linear, fake_impl=_linear_fake)
    direct_register_custom_op(
        op_name="iserve_delta_embedding",
        op_func=_embedding,
        mutates_args=["y"],
        fake_impl=_embedding_fake,
    )


def delta_linear(x: torch.Tensor, bias: torch.Tensor | None, outputs: int, name: str) -> torch.Tensor:
    """Return what the linear ``name`` makes of ``x`` [rows, inputs]."""
    return torch.ops.vllm.iserve_delta_linear(x, bias, outputs, _encode_layer_name(name))


def delta_embedding(y: torch.Tensor, tokens: torch.Tensor, name: str) -> None:
    """Add to the embeddings ``y`` [rows, hidden] what the deltas change of the embedding ``name``."""
    torch.ops.vllm.iserve_delta_embedding(y, tokens, _encode_layer_name(name))
