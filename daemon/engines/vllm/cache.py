"""Room of vLLM's KV cache for the requests that a worker promises (``fingerprint.cache_blocks``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from daemon.profile_messages import ProfileLoad
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.cache_blocks import CacheRoom, block_tokens, cache_blocks, cache_bytes
from fingerprint.config import KvFormat
from fingerprint.config_json import read_config
from fingerprint.description.stored import quantization_of
from fingerprint.engines import GRAPH_TOKENS, graph_sizes
from fingerprint.families import load_spec
from fingerprint.families.unsupported import is_multimodal
from fingerprint.model_spec import ModelSpec

__all__ = [
    "graph_settings",
    "in_blocks",
    "kv_blocks",
    "kv_cache_bytes",
    "kv_dtype",
    "plain_kv_dtype",
    "step_tokens",
    "type_of",
]


def kv_cache_bytes(spec: WorkerSpec, model: ModelSpec) -> int:
    """``--kv-cache-memory-bytes``: what a GPU of the stage that needs most takes for ``limits``."""
    return cache_bytes(model, spec.config, [stage.num_layers for stage in spec.stages], _room(spec.limits))


def kv_blocks(spec: WorkerSpec, model: ModelSpec) -> int:
    """Return ``--num-gpu-blocks-override`` for the same promise, of the stage that needs most blocks."""
    return cache_blocks(model, spec.config, [stage.num_layers for stage in spec.stages], _room(spec.limits))


def in_blocks(spec: WorkerSpec, order: ProfileLoad) -> ProfileLoad:
    """Return ``order`` with its KV room in vLLM's own blocks, and without towers.

    Raises:
        ConfigError, UnsupportedModelError: as ``families.load_spec`` of the checkpoint.
    """
    worker = replace(
        spec,
        config=replace(spec.config, weights=order.weights, kv=order.kv),
        stages=tuple(
            replace(stage, num_layers=layers)
            for stage, layers in zip(spec.stages, order.layers_per_stage, strict=True)
        ),
        limits=replace(
            spec.limits,
            max_batch=order.max_batch,
            max_context_tokens=order.max_context_tokens,
            kv_tokens=max(order.kv_tokens or order.max_batch * order.max_context_tokens, order.max_context_tokens),
        ),
    )
    model, config = load_spec(Path(order.checkpoint)), read_config(Path(order.checkpoint))
    return replace(
        order,
        kv_blocks=kv_blocks(worker, model),
        kv_block_tokens=block_tokens(model),
        kv_dtype=kv_dtype(order.kv, plain_kv_dtype(config)),
        graphs=json.dumps(graph_settings(worker.limits)),
        text_only=is_multimodal(config),
    )


def kv_dtype(kv: KvFormat, plain: str) -> str:
    """Return ``--kv-cache-dtype``; ``plain``: that of 16 bits."""
    return {KvFormat.INT8: "int8_per_token_head", KvFormat.FP8: "fp8"}.get(kv, plain)


def plain_kv_dtype(config: Mapping[str, object]) -> str:
    """Return ``--kv-cache-dtype`` of 16 bits for the checkpoint of a config.json.

    It is the model's own type by "auto", which is FP8 where the checkpoint asks for such a cache
    (``resolve_kv_cache_dtype_string`` and ``Attention`` of vLLM 0.33.0): there the type is named.
    """
    quantization = quantization_of(config)
    if not (quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")):
        return "auto"
    return "float16" if type_of(config) == "float16" else "bfloat16"


def type_of(config: Mapping[str, object]) -> str:
    """Return the type of a checkpoint, under its name of transformers 5 or 4."""
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def graph_settings(limits: WorkerLimits) -> dict[str, object]:
    """Return ``--compilation-config``'s part on CUDA graphs: the largest of vLLM's own, or the tokens of each."""
    if limits.graph_tokens == GRAPH_TOKENS:
        return {"max_cudagraph_capture_size": GRAPH_TOKENS}
    return {"cudagraph_capture_sizes": graph_sizes(min(limits.graph_tokens, step_tokens(limits)))}


def _room(limits: WorkerLimits) -> CacheRoom:
    return CacheRoom(sequences=limits.max_batch, kv_tokens=limits.kv_tokens, step_tokens=step_tokens(limits))


def step_tokens(limits: WorkerLimits) -> int:
    """Return the tokens of the largest step: no more than all sequences together hold.

    vLLM warns of more ("may lead to unexpected behavior", ``config/scheduler.py``), and the newer model runner of
    0.33 divides a warm-up step among the sequences and writes beyond their block tables (illegal memory access,
    seen on an H200).
    """
    return min(limits.max_batched_tokens, limits.max_batch * limits.max_context_tokens)
