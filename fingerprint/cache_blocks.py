"""Blocks of vLLM's KV cache: how many a worker's requests take, and their bytes. Arithmetic only.

vLLM makes ``bytes // page // layers of a group`` blocks of what it is given, of all stages the fewest, and keeps
one for itself. A page is a block in one layer, of the same size in all: layers that keep less of a token have more
of them in a block, and beside layers with a state a block has as many as make it no smaller than the state. Where
all layers look equally far back and none has a state, they are one group, and their pages may differ.

A state takes one block of its group where no layer keeps tokens. With such layers vLLM caches prefixes: a
sequence that passes from one block to the next then has the states of both, and a prompt at its end a third.

Sources: ``v1/core/kv_cache_utils.py``, ``v1/core/kv_cache_planning.py``, ``v1/kv_cache_interface.py``
(``MambaSpec.max_memory_usage_bytes``), ``v1/core/block_pool.py``, ``platforms/interface.py`` and, of states,
``model_executor/models/config.py`` of vLLM 0.24.0 to 0.33.0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fingerprint.config import DeploymentConfig, KvFormat, Workload, even_split
from fingerprint.engines import traits_of
from fingerprint.model_spec import LayerKind, ModelSpec
from fingerprint.weight_bytes import (
    kv_tokens_per_layer,
    layer_state_bytes_per_gpu,
    layers_per_block,
    steps_in_flight,
)

__all__ = [
    "BLOCK_TOKENS",
    "CacheRoom",
    "block_bytes",
    "block_tokens",
    "cache_blocks",
    "cache_bytes",
    "in_large_blocks",
    "layer_kept_bytes",
]

BLOCK_TOKENS = 16  # the size that every attention backend but those of latents takes on NVIDIA GPUs
_LATENT_BLOCK_TOKENS = 64  # of FlashMLA and the sparse ones (their get_supported_kernel_block_sizes)
# With states, a block's tokens are a multiple of these (update_block_size_for_backend of the platform).
_LATENT_STEP_TOKENS = 128
_GATED_DELTA_STEP_TOKENS = 64  # FLASHINFER_GDN_CHECKPOINT_ALIGNMENT
_ELEMENT_BYTES = {KvFormat.BITS16: 2, KvFormat.INT8: 1, KvFormat.FP8: 1}
_SCALE_BYTES = {KvFormat.INT8: 4}  # one float32 per token and head, for K and for V
_STATES_OF_SEQUENCE = 2  # in a model that keeps tokens too


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRoom:
    """Requests that a cache holds at once."""

    sequences: int
    kv_tokens: int  # of all sequences together
    step_tokens: int  # of the largest step


@dataclass(frozen=True, slots=True)
class _Cache:
    """Cache that vLLM keeps for one layer: of tokens, or of a sequence."""

    window: int | None
    token_bytes: int  # on one rank; 0: a state
    state_bytes: int = 0


def cache_bytes(model: ModelSpec, config: DeploymentConfig, stages: Sequence[int], room: CacheRoom) -> int:
    """Return what a GPU of the stage that needs most takes for ``room``; ``stages``: the layers of each.

    A sequence's last block is partly empty, so each sequence costs one more than its tokens do; one more still
    where a sliding window may begin inside a block. Layers of several kinds share the blocks, in groups as large
    as the rarest kind (the commonest, where they are about as many), the last one filled up; each group has tables
    of its own.
    """
    every, of_stages = _caches_of_stages(model, config, stages)
    held = (
        _blocks(caches, every, model, config, room) * _bytes_of_block(caches, every, model)
        for caches in of_stages
        if caches
    )
    return max([_page_bytes(every, model), *held])


def cache_blocks(model: ModelSpec, config: DeploymentConfig, stages: Sequence[int], room: CacheRoom) -> int:
    """Return the blocks of the stage that needs most of them for ``room``; ``stages``: the layers of each."""
    every, of_stages = _caches_of_stages(model, config, stages)
    return max([1, *(_blocks(caches, every, model, config, room) for caches in of_stages if caches)])


def _caches_of_stages(
    model: ModelSpec, config: DeploymentConfig, stages: Sequence[int]
) -> tuple[list[_Cache], list[list[_Cache]]]:
    """Return the caches of all kinds of layers, and those of each stage's layers."""
    kept = [_caches(config, model, kind) for kind in model.kinds]
    ends = list(accumulate(stages, initial=0))
    indexes = model.kind_indexes
    of_stages = [[cache for kind in indexes[first:end] for cache in kept[kind]] for first, end in pairwise(ends)]
    return [cache for caches in kept for cache in caches], of_stages


def _blocks(
    caches: Sequence[_Cache],
    every: Sequence[_Cache],
    model: ModelSpec,
    config: DeploymentConfig,
    room: CacheRoom,
) -> int:
    """Return the blocks of a stage: every group of layers has tables of its own, and vLLM keeps one block."""
    groups = _groups(caches, every).items()
    return 1 + sum(count * _blocks_held(cache, every, model, config, room) for cache, count in groups)


def layer_kept_bytes(
    model: ModelSpec, config: DeploymentConfig, workload: Workload, step_tokens: int, token_bytes: float
) -> float:
    """Return what one layer of one GPU keeps of tokens and sequences at the end of ``workload``, as a mean.

    Where vLLM keeps states, blocks are as large as a state, and partly empty ones are a large part of the cache:
    they count exactly. Else it is ``token_bytes`` for each of
    :func:`~fingerprint.weight_bytes.kv_tokens_per_layer`.

    Raises:
        ConfigError: more stages than layers.
    """
    if not in_large_blocks(model, config.engine):
        tokens = kv_tokens_per_layer(model, config, workload, step_tokens)
        return token_bytes * tokens + layer_state_bytes_per_gpu(model, config, workload.batch)
    stages = even_split(model.num_layers, config.pp)
    room = CacheRoom(
        sequences=workload.batch, kv_tokens=workload.kv_tokens(config.engine), step_tokens=step_tokens
    )
    return cache_bytes(model, config, stages, room) / min(stages)


def in_large_blocks(model: ModelSpec, engine: str) -> bool:
    """Return whether a block is as large as a sequence's state, and what is partly empty is counted exactly."""
    return model.keeps_state and traits_of(engine).has_grouped_blocks


def block_bytes(model: ModelSpec, config: DeploymentConfig, first: int, layers: int) -> int:
    """Return the bytes of one block on a GPU of the stage that has ``layers`` from ``first`` on."""
    every, (_, caches) = _caches_of_stages(model, config, (first, layers))
    return _bytes_of_block(caches, every, model)


def block_tokens(model: ModelSpec) -> int:
    """``--block-size``."""
    return _LATENT_BLOCK_TOKENS if _is_latent(model) else BLOCK_TOKENS


def _is_latent(model: ModelSpec) -> bool:
    return bool(model.kv_head_elements) and model.num_kv_heads == 1


def _caches(config: DeploymentConfig, model: ModelSpec, kind: LayerKind) -> list[_Cache]:
    """Return the caches of a layer of ``kind`` on one rank: that of its tokens, and that of its state."""
    of_layer = model.kv_heads_of(kind)
    heads = max(1, of_layer // config.tp)
    elements = round(kind.kv_share * model.kv_elements)
    packed = kind.shape.kv_fp8_bytes if kind.shape and config.kv is KvFormat.FP8 else 0
    scale = _SCALE_BYTES.get(config.kv, 0)
    of_head = packed // of_layer or elements // of_layer * _ELEMENT_BYTES[config.kv]
    token_bytes = heads * (of_head + 2 * scale) if elements else 0
    state_bytes = math.ceil(kind.shape.state_bytes_of_rank(config.tp)) if kind.shape else 0
    found = [_Cache(kind.window, token_bytes)] if token_bytes else []
    return found + ([_Cache(None, 0, state_bytes)] if state_bytes else [])


def _is_one_group(every: Sequence[_Cache]) -> bool:
    """Return whether all layers have the same table of blocks, and pages as large as each needs."""
    return all(cache.token_bytes for cache in every) and len({cache.window for cache in every}) <= 1


def _page_bytes(every: Sequence[_Cache], model: ModelSpec) -> int:
    """A block of the layers that keep most of a token, of as many tokens as the largest state takes."""
    most = max((cache.token_bytes for cache in every), default=0)
    state = max((cache.state_bytes for cache in every), default=0)
    if not most:
        return max(state, 1)
    if not state:
        return most * block_tokens(model)
    mixers = {shape.mixer.removesuffix(", experts") for shape in model.layer_shapes}
    step = _GATED_DELTA_STEP_TOKENS if "gated delta" in mixers else block_tokens(model)
    step = _LATENT_STEP_TOKENS if _is_latent(model) else step
    return most * step * max(1, math.ceil(state / (step * most)))


def _groups(caches: Sequence[_Cache], every: Sequence[_Cache]) -> dict[_Cache, int]:
    """Return the groups of each kind of cache in a stage."""
    if _is_one_group(every):
        return {max(caches, key=lambda cache: cache.token_bytes): 1} if caches else {}
    counts = Counter(caches)
    group = layers_per_block(caches) if caches else 1
    return {cache: math.ceil(count / group) for cache, count in counts.items()}


def _bytes_of_block(caches: Sequence[_Cache], every: Sequence[_Cache], model: ModelSpec) -> int:
    """Return the bytes of one block over all layers of a stage that share it."""
    if _is_one_group(every):
        return block_tokens(model) * sum(cache.token_bytes for cache in caches)
    return _page_bytes(every, model) * layers_per_block(caches) if caches else 0


def _blocks_held(
    cache: _Cache, every: Sequence[_Cache], model: ModelSpec, config: DeploymentConfig, room: CacheRoom
) -> int:
    """Return the blocks of one group of layers: a window's tokens and all that the steps in flight compute."""
    if not cache.token_bytes:
        return room.sequences if not model.keeps_tokens else _STATES_OF_SEQUENCE * room.sequences + 1
    one_group = _is_one_group(every)
    tokens_of_block = block_tokens(model) if one_group else _page_bytes(every, model) // cache.token_bytes
    if cache.window is None:
        return math.ceil(room.kv_tokens / tokens_of_block) + room.sequences
    in_flight = room.step_tokens * steps_in_flight(config)
    tokens = min(room.kv_tokens, room.sequences * cache.window + in_flight)
    return math.ceil(tokens / tokens_of_block) + 2 * room.sequences
