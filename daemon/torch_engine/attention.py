"""Attention of a mixed batch over the slot cache, as a function in transformers' attention interface.

transformers' model classes call it in place of their own; what it needs beyond q, k and v reaches it through the
keyword that their forward passes along. The work itself is torch's SDPA, once per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from daemon.torch_engine.batch import FlatBatch, Span
from daemon.torch_engine.kv_cache import KvCache

__all__ = ["IMPLEMENTATION", "AttentionStep", "register"]

IMPLEMENTATION = "iserve_slots"


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Handed to the model's forward as ``iserve_step``."""

    batch: FlatBatch
    cache: KvCache


def register() -> None:
    """Make the function known to transformers. No mask function is registered under the name, which is what
    tells transformers to build no mask of its own."""
    AttentionInterface.register(IMPLEMENTATION, _attend)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, head_dim]
    key: torch.Tensor,  # [1, kv_heads, T, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    iserve_step: AttentionStep,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    assert attention_mask is None
    assert softcap is None
    batch, layer = iserve_step.batch, module.layer_idx
    iserve_step.cache.write(layer, batch, key, value)
    out = torch.empty_like(query.transpose(1, 2))  # [1, T, heads, head_dim], what the caller expects
    for span in batch.spans:
        # A query sees the keys of its own position and of the window - 1 before it.
        low = 0 if sliding_window is None else max(0, span.start - sliding_window + 1)
        keys, values = iserve_step.cache.read(layer, span.slot, low, span.end)
        piece = query[:, :, span.first : span.first + span.count]
        attend = _attend_one if span.count == 1 else _attend_piece
        result = attend(batch, span, piece, keys, values, scaling, sliding_window)
        out[0, span.first : span.first + span.count] = result.transpose(1, 2)[0]
    return out, None


def _attend_one(
    batch: FlatBatch,
    span: Span,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One token sees all keys it is given: the heads that share a key go in as rows of one query block, which
    is 5 to 10 times faster on the CPU than ``enable_gqa`` (docs/decisions/0004)."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    grouped = query.reshape(1, kv_heads, heads // kv_heads, -1)
    return scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(1, heads, 1, -1)


def _attend_piece(
    batch: FlatBatch,
    span: Span,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Several tokens: causal among themselves, all of what is cached before them within the window."""
    gqa = query.shape[1] != keys.shape[1]
    whole_prompt = span.start == 0 and (sliding_window is None or span.count <= sliding_window)
    if whole_prompt:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=gqa)
    mask = batch.masks.get((span.slot, sliding_window))
    if mask is None:  # every layer of one window shares it
        mask = _causal_mask(span, keys.shape[2], sliding_window, query.device)
        batch.masks[span.slot, sliding_window] = mask
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=gqa)


def _causal_mask(span: Span, num_keys: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """[count, num_keys] bool, True where the query may look; the last key is the last query's own."""
    queries = torch.arange(span.start, span.end, device=device)[:, None]
    keys = torch.arange(span.end - num_keys, span.end, device=device)[None, :]
    allowed = keys <= queries
    return allowed if sliding_window is None else allowed & (keys > queries - sliding_window)
