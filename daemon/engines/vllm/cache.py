"""Room of vLLM's KV cache for the requests that a worker promises (``fingerprint.cache_blocks``)."""

from __future__ import annotations

from daemon.engines.base import WorkerLimits, WorkerSpec
from fingerprint.cache_blocks import CacheRoom, cache_blocks, cache_bytes
from fingerprint.model_spec import ModelSpec

__all__ = ["kv_blocks", "kv_cache_bytes", "step_tokens"]


def kv_cache_bytes(spec: WorkerSpec, model: ModelSpec) -> int:
    """``--kv-cache-memory-bytes``: what a GPU of the stage that needs most takes for ``limits``."""
    return cache_bytes(model, spec.config, [stage.num_layers for stage in spec.stages], _room(spec.limits))


def kv_blocks(spec: WorkerSpec, model: ModelSpec) -> int:
    """Return ``--num-gpu-blocks-override`` for the same promise, of the stage that needs most blocks."""
    return cache_blocks(model, spec.config, [stage.num_layers for stage in spec.stages], _room(spec.limits))


def _room(limits: WorkerLimits) -> CacheRoom:
    return CacheRoom(sequences=limits.max_batch, kv_tokens=limits.kv_tokens, step_tokens=step_tokens(limits))


def step_tokens(limits: WorkerLimits) -> int:
    """Return the tokens of the largest step: no more than all sequences together hold.

    vLLM warns of more ("may lead to unexpected behavior", ``config/scheduler.py``), and the newer model runner of
    0.33 divides a warm-up step among the sequences and writes beyond their block tables (illegal memory access,
    seen on an H200).
    """
    return min(limits.max_batched_tokens, limits.max_batch * limits.max_context_tokens)
