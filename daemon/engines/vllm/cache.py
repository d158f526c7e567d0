"""How many bytes vLLM's KV cache takes for the requests that a worker promises. Arithmetic only.

vLLM makes ``bytes // page // layers of a group`` blocks of what it is given, of all stages the fewest, and keeps
one for itself. A page is a block in one layer, of the same size in all: layers that keep less of a token have more
of them in a block, and beside layers with a state a block has as many as make it no smaller than the state.

Sources: ``v1/core/kv_cache_utils.py``, ``v1/kv_cache_interface.py``, ``v1/core/block_pool.py`` and, of states,
``model_executor/models/config.py`` of vLLM 0.24.0 to 0.33.0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from daemon.engines.base import WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig, KvFormat
from fingerprint.formats import layers_per_block, steps_in_flight
from fingerprint.model_spec import LayerKind, ModelSpec

__all__ = ["BLOCK_TOKENS", "block_tokens", "kv_blocks", "kv_cache_bytes", "step_tokens"]

BLOCK_TOKENS = 16  # the size that every attention backend but those of latents takes on NVIDIA GPUs
_LATENT_BLOCK_TOKENS = 64  # of FlashMLA and the sparse ones (their get_supported_kernel_block_sizes)
_ELEMENT_BYTES = {KvFormat.BITS16: 2, KvFormat.INT8: 1, KvFormat.FP8: 1}
_SCALE_BYTES = {KvFormat.INT8: 4}  # one float32 per token and head, for K and for V


@dataclass(frozen=True, slots=True)
class _Cache:
    """What vLLM keeps for one layer: of tokens, or of a sequence."""

    window: int | None
    token_bytes: int  # on one rank; 0: a state
    state_bytes: int = 0


def kv_cache_bytes(spec: WorkerSpec, model: ModelSpec) -> int:
    """``--kv-cache-memory-bytes``: what a GPU of the stage that needs most takes for ``limits.kv_tokens`` tokens.

    A sequence's last block is partly empty, so each of ``max_batch`` sequences costs one more than its tokens do;
    one more still where a sliding window may begin inside a block. Layers of several kinds share the blocks, in
    groups as large as the rarest kind (the commonest, where they are about as many), the last one filled up; each
    group has tables of its own.
    """
    page_bytes, of_stages = _stages(spec, model)
    pages = (_blocks(spec, caches, page_bytes) * layers_per_block(caches) for caches in of_stages if caches)
    return max([1, *pages]) * page_bytes


def kv_blocks(spec: WorkerSpec, model: ModelSpec) -> int:
    """Return ``--num-gpu-blocks-override`` for the same promise, of the stage that needs most blocks."""
    page_bytes, of_stages = _stages(spec, model)
    return max([1, *(_blocks(spec, caches, page_bytes) for caches in of_stages if caches)])


def _stages(spec: WorkerSpec, model: ModelSpec) -> tuple[int, list[list[_Cache]]]:
    """Return the bytes of a page, the same everywhere, and the caches of each stage's layers."""
    kept = [_caches(spec.config, model, kind) for kind in model.kinds]
    page_bytes = _page_bytes([cache for caches in kept for cache in caches], block_tokens(model))
    of_stages, first = [], 0
    for stage in spec.stages:
        of_stage = model.kind_indexes[first : first + stage.num_layers]
        of_stages.append([cache for kind in of_stage for cache in kept[kind]])
        first += stage.num_layers
    return page_bytes, of_stages


def block_tokens(model: ModelSpec) -> int:
    """``--block-size``."""
    return _LATENT_BLOCK_TOKENS if model.kv_head_elements and model.num_kv_heads == 1 else BLOCK_TOKENS


def step_tokens(limits: WorkerLimits) -> int:
    """Return the tokens of the largest step: no more than all sequences together hold.

    vLLM warns of more ("may lead to unexpected behavior", ``config/scheduler.py``), and the newer model runner of
    0.33 divides a warm-up step among the sequences and writes beyond their block tables (illegal memory access,
    seen on an H200).
    """
    return min(limits.max_batched_tokens, limits.max_batch * limits.max_context_tokens)


def _caches(config: DeploymentConfig, model: ModelSpec, kind: LayerKind) -> list[_Cache]:
    """Of a layer of ``kind`` on one rank: that of its tokens, and that of its state."""
    element, scale = _ELEMENT_BYTES[config.kv], _SCALE_BYTES.get(config.kv, 0)
    elements = round(kind.kv_share * model.kv_elements)
    heads = max(1, model.num_kv_heads // config.tp)
    token_bytes = heads * (elements // model.num_kv_heads * element + 2 * scale) if elements else 0
    state_bytes = -(-kind.shape.state_bytes // config.tp) if kind.shape else 0
    found = [_Cache(kind.window, token_bytes)] if token_bytes else []
    return found + ([_Cache(None, 0, state_bytes)] if state_bytes else [])


def _page_bytes(caches: Sequence[_Cache], tokens: int) -> int:
    """A block of the layers that keep most of a token, of as many tokens as the largest state takes."""
    most = max((cache.token_bytes for cache in caches), default=0)
    state = max((cache.state_bytes for cache in caches), default=0)
    if not most:
        return state
    return most * tokens * max(1, math.ceil(state / (tokens * most)))


def _blocks(spec: WorkerSpec, caches: Sequence[_Cache], page_bytes: int) -> int:
    """Return the blocks of a stage: every group of layers has tables of its own, and vLLM keeps one block."""
    counts, group = Counter(caches), layers_per_block(caches)
    held = (math.ceil(count / group) * _blocks_held(spec, cache, page_bytes) for cache, count in counts.items())
    return 1 + sum(held)


def _blocks_held(spec: WorkerSpec, cache: _Cache, page_bytes: int) -> int:
    """Return the blocks of one group of layers: a window's tokens and all that the steps in flight compute."""
    limits = spec.limits
    if not cache.token_bytes:
        return limits.max_batch
    tokens_of_block = page_bytes // cache.token_bytes
    if cache.window is None:
        return math.ceil(limits.kv_tokens / tokens_of_block) + limits.max_batch
    in_flight = step_tokens(limits) * steps_in_flight(spec.config)
    tokens = min(limits.kv_tokens, limits.max_batch * cache.window + in_flight)
    return math.ceil(tokens / tokens_of_block) + 2 * limits.max_batch
