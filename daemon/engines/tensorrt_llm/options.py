"""Options file of one ``trtllm-serve``: every limit of a worker, in TensorRT-LLM's own words.

The file overrides the command line (``update_llm_args_with_extra_dict``), so each limit is written here and
nowhere else. Values in, values out. Keys: ``tensorrt_llm/llmapi/llm_args.py`` (``TorchLlmArgs``).
"""

from __future__ import annotations

import json

from daemon.engines.tensorrt_llm.lora import TARGETS
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig, KvFormat, even_split
from fingerprint.model_spec import KV_ELEMENT_BYTES, ModelSpec
from fingerprint.weight_bytes import kv_heads_per_gpu

__all__ = ["TOKENS_PER_BLOCK", "as_yaml", "kv_blocks", "kv_bytes_per_gpu", "llm_options"]

TOKENS_PER_BLOCK = 32  # its default, given all the same: the block count rests on it

# Of what is free once weights and activations are there, unlike vLLM's fraction of the whole GPU. The smallest of
# the KV limits wins; this one only has to leave the exact ones room, or the cache would shrink without an error.
_KV_FRACTION_OF_REST = 0.95

# "auto" is the checkpoint's own; the adapter has refused one whose own is not 16 bits (checkpoint.py).
_KV_DTYPE = {KvFormat.BITS16: "auto", KvFormat.FP8: "fp8"}


def llm_options(spec: WorkerSpec, model: ModelSpec) -> dict[str, object]:
    """Return options that hold ``spec`` to its limits; ``spec.config.kv`` is one of the PyTorch backend's."""
    limits, config = spec.limits, spec.config
    blocks = kv_blocks(limits)
    options: dict[str, object] = {
        "max_batch_size": limits.max_batch,
        "max_num_tokens": limits.max_batched_tokens,
        "max_seq_len": limits.max_context_tokens,
        "max_input_len": limits.max_context_tokens,  # its default is 1024
        "max_beam_width": 1,
        "tensor_parallel_size": config.tp,
        "pipeline_parallel_size": config.pp,
        # without it a prompt above max_num_tokens is refused
        "enable_chunked_prefill": limits.max_batched_tokens < limits.max_context_tokens,
        "kv_cache_config": {
            "dtype": _KV_DTYPE[config.kv],
            "tokens_per_block": TOKENS_PER_BLOCK,
            "max_tokens": blocks * TOKENS_PER_BLOCK,
            "max_gpu_total_bytes": kv_bytes_per_gpu(spec, model, tokens=blocks * TOKENS_PER_BLOCK),
            "free_gpu_memory_fraction": _KV_FRACTION_OF_REST,
        },
        # given whole: left out, the server tunes the batch size while it runs
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "cuda_graph_config": {"max_batch_size": limits.max_batch},  # its default ends at 128
        "enable_iter_perf_stats": True,  # or /metrics stays empty
    }
    if config.adapter_slots:
        options |= _adapter_options(config)
    if spec.dummy_weights:
        options["load_format"] = "dummy"
    layers = tuple(stage.num_layers for stage in spec.stages)
    if layers != even_split(sum(layers), config.pp):  # its own default, which it takes without the key
        options["pp_partition"] = list(layers)
    return options


def _adapter_options(config: DeploymentConfig) -> dict[str, object]:
    """Return the options without which the engine leaves adapters out of its answers, and says nothing.

    ``lora_config`` alone switches them on, next to which ``enable_lora`` is ignored. Its caches refuse to start
    where they do not hold one adapter of ``max_adapter_size``, which is 64 by default, whatever the rank
    (``PeftCacheManager::getPageManagerConfig``). There are no CUDA graphs: 1.2 was not read to serve adapters in
    them, and the answers of releases before it differed (pull request 5480).
    """
    return {
        "lora_config": {
            "lora_target_modules": list(TARGETS),
            "max_lora_rank": config.adapter_rank,
            "max_loras": config.adapter_slots,
            "max_cpu_loras": config.loaded_adapters,
        },
        "peft_cache_config": {"max_adapter_size": config.adapter_rank},
        "cuda_graph_config": None,
    }


def kv_blocks(limits: WorkerLimits) -> int:
    """Return the blocks that hold ``kv_tokens`` when every sequence of a full batch has its equal part of them.

    A sequence fills its last block alone, so the room is rounded up per sequence, not once.
    """
    tokens_per_sequence = -(-limits.kv_tokens // limits.max_batch)
    return limits.max_batch * -(-tokens_per_sequence // TOKENS_PER_BLOCK)


def kv_bytes_per_gpu(spec: WorkerSpec, model: ModelSpec, *, tokens: int) -> int:
    """Return the bytes of ``tokens`` in the KV cache of one GPU of the longest stage, without quantization scales.

    Source: 2 (K, V) x layers of the stage x local KV heads x head_dim x bytes of an element.
    """
    element_bytes = KV_ELEMENT_BYTES[spec.config.kv]
    per_layer = 2 * kv_heads_per_gpu(model, spec.config.tp) * model.head_dim * element_bytes
    return round(tokens * max(stage.num_layers for stage in spec.stages) * per_layer)


def as_yaml(options: dict[str, object]) -> str:
    """Return JSON, which YAML includes: numbers, true and false, decimal fractions and text mean the same."""
    return json.dumps(options, indent=2) + "\n"
