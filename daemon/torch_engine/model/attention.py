"""Attention of a mixed batch over the slot cache, as a function in transformers' attention interface.

transformers' model classes call it in place of their own; what it needs beyond q, k and v reaches it through the
keyword that their forward passes along. The work itself is torch's SDPA, once per sequence. SDPA can neither cap
logits (Gemma 2) nor add a sink to them (GPT-OSS): these are computed as they are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from daemon.torch_engine.model.batch import FlatBatch, Span
from daemon.torch_engine.model.kv_cache import KeysValues, KvCache

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
    s_aux: torch.Tensor | None = None,  # [heads]
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    assert attention_mask is None
    batch = iserve_step.batch
    found = iserve_step.cache.add(module.layer_idx, batch, key, value)
    out = torch.empty_like(query.transpose(1, 2))  # [1, T, heads, head_dim], what the caller expects
    for span, (keys, values) in zip(batch.spans, found, strict=True):
        piece = query[:, :, span.first : span.first + span.count]
        seen = _seen(span, keys, values, sliding_window)
        if softcap is not None or s_aux is not None:
            mask = None if span.count == 1 else _mask_of(batch, span, seen[0], sliding_window)
            result = _attend_written_out(piece, *seen, mask, scaling, softcap, s_aux)
        elif span.count == 1:
            result = _attend_one(piece, *seen, scaling)
        else:
            result = _attend_piece(batch, span, piece, *seen, scaling, sliding_window)
        out[0, span.first : span.first + span.count] = result.transpose(1, 2)[0]
    return out, None


def _seen(span: Span, keys: torch.Tensor, values: torch.Tensor, sliding_window: int | None) -> KeysValues:
    """Return what some query of the span may look at: its own position and the window - 1 before the first's."""
    most = span.end if sliding_window is None else span.count + sliding_window - 1
    first = max(0, keys.shape[2] - most)
    return keys[:, :, first:], values[:, :, first:]


def _attend_written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``softmax([cap(q k / sqrt d), sink])`` without the sink's share, times v.

    The heads that share a key go in as rows of one query block.
    """
    heads, count, kv_heads = query.shape[1], query.shape[2], keys.shape[1]
    grouped = query.reshape(kv_heads, heads // kv_heads * count, -1)
    logits = torch.matmul(grouped, keys[0].transpose(1, 2)).reshape(heads, count, -1) * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.reshape(-1, 1, 1).expand(-1, count, 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)[..., : keys.shape[2]]
    return torch.matmul(weights.reshape(kv_heads, heads // kv_heads * count, -1), values[0]).reshape(query.shape)


def _attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the attention of one token to all keys that it is given.

    The heads that share a key go in as rows of one query block, which is 5 to 10 times faster on the CPU than
    ``enable_gqa`` (docs/decisions/0004).
    """
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
    """Attend several tokens: causal among themselves, all of what is cached before them within the window."""
    gqa = query.shape[1] != keys.shape[1]
    whole_prompt = span.start == 0 and (sliding_window is None or span.count <= sliding_window)
    if whole_prompt:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=gqa)
    mask = _mask_of(batch, span, keys, sliding_window)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=gqa)


def _mask_of(batch: FlatBatch, span: Span, keys: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    mask = batch.masks.get((span.slot, sliding_window))
    if mask is None:  # every layer of one window shares it
        mask = _causal_mask(span, keys.shape[2], sliding_window, keys.device)
        batch.masks[span.slot, sliding_window] = mask
    return mask


def _causal_mask(span: Span, num_keys: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """Return [count, num_keys] bool, True where the query may look; the last key is the last query's own."""
    queries = torch.arange(span.start, span.end, device=device)[:, None]
    keys = torch.arange(span.end - num_keys, span.end, device=device)[None, :]
    allowed = keys <= queries
    return allowed if sliding_window is None else allowed & (keys > queries - sliding_window)
