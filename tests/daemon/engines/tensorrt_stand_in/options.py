"""The options of the PyTorch backend (``TorchLlmArgs``): documented keys, types and rules, YAML before flags."""

from __future__ import annotations

from collections.abc import Callable

import yaml

from .refusal import RefusedError

Check = Callable[[object], bool]


def _is(*kinds: type) -> Check:
    return lambda value: type(value) in kinds or (float in kinds and type(value) is int)


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _one_of(*names: str) -> Check:
    return lambda value: value in names


def _ints(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is str for item in value)


_BOOL, _INT, _FLOAT, _STR, _DICT = _is(bool), _is(int), _is(float), _is(str), _is(dict)
_MAYBE_INT, _MAYBE_STR = _maybe(_INT), _maybe(_STR)

_KV = {
    "enable_block_reuse": _BOOL,
    "enable_partial_reuse": _BOOL,
    "max_tokens": _MAYBE_INT,
    "free_gpu_memory_fraction": _FLOAT,
    "max_gpu_total_bytes": _INT,
    "max_attention_window": _maybe(_ints),
    "host_cache_size": _MAYBE_INT,
    "tokens_per_block": _INT,
    "event_buffer_max_size": _INT,
    "dtype": _STR,
}
_GRAPHS = {"batch_sizes": _maybe(_ints), "max_batch_size": _INT, "enable_padding": _BOOL}
_SCHEDULER = {
    "capacity_scheduler_policy": _one_of("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"),
    "context_chunking_policy": _maybe(_one_of("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")),
    "dynamic_batch_config": _maybe(_DICT),
}
_LORA = {
    "lora_dir": _strings,
    "lora_ckpt_source": _one_of("hf", "nemo"),
    "max_lora_rank": _INT,
    "lora_target_modules": _strings,
    "trtllm_modules_to_hf_modules": _DICT,
    "max_loras": _MAYBE_INT,
    "max_cpu_loras": _MAYBE_INT,
}
_PEFT = {
    "max_adapter_size": _INT,
    "device_cache_percent": _FLOAT,
    "host_cache_size": _INT,
}
_BLOCKS = {
    "kv_cache_config": _KV,
    "cuda_graph_config": _GRAPHS,
    "scheduler_config": _SCHEDULER,
    "lora_config": _LORA,
    "peft_cache_config": _PEFT,
}
_KEYS: dict[str, Check] = {
    "dtype": _STR,
    "model_kwargs": _maybe(_DICT),
    "load_format": lambda value: isinstance(value, str) and value.lower() in ("auto", "dummy", "vision_only"),
    "tensor_parallel_size": _INT,
    "pipeline_parallel_size": _INT,
    "context_parallel_size": _INT,
    "gpus_per_node": _MAYBE_INT,
    "moe_expert_parallel_size": _MAYBE_INT,
    "moe_tensor_parallel_size": _MAYBE_INT,
    "moe_cluster_parallel_size": _MAYBE_INT,
    "enable_attention_dp": _BOOL,
    "pp_partition": _maybe(_ints),
    "kv_cache_config": _DICT,
    "cuda_graph_config": _maybe(_DICT),
    "scheduler_config": _DICT,
    "max_batch_size": _INT,
    "max_num_tokens": _INT,
    "max_seq_len": _MAYBE_INT,
    "max_input_len": _INT,
    "max_beam_width": _INT,
    "enable_chunked_prefill": _BOOL,
    "disable_overlap_scheduler": _BOOL,
    "stream_interval": _INT,
    "batch_wait_timeout_ms": _FLOAT,
    "attn_backend": _STR,
    "sampler_type": _STR,
    "sampler_force_async_worker": _BOOL,
    "moe_config": _DICT,
    "speculative_config": _maybe(_DICT),
    "enable_lora": _BOOL,
    "lora_config": _maybe(_DICT),
    "peft_cache_config": _maybe(_DICT),
    "cache_transceiver_config": _maybe(_DICT),
    "orchestrator_type": _maybe(_one_of("rpc", "ray")),
    "enable_iter_perf_stats": _BOOL,
    "enable_iter_req_stats": _BOOL,
    "print_iter_log": _BOOL,
    "return_perf_metrics": _BOOL,
    "perf_metrics_max_requests": _INT,
    "max_stats_len": _INT,
    "allreduce_strategy": _MAYBE_STR,
    "enable_autotuner": _BOOL,
    "torch_compile_config": _maybe(_DICT),
    "checkpoint_format": _MAYBE_STR,
    "guided_decoding_backend": _MAYBE_STR,
}
_OLDER_FLOW = {"quant_config", "calib_config", "build_config", "enable_build_cache", "fast_build"} | {
    "embedding_parallel_mode",
    "batching_type",
    "workspace",
}
_DEFAULTS: dict[str, object] = {
    "pp_partition": None,
    "max_input_len": 1024,
    "enable_iter_perf_stats": False,
    "return_perf_metrics": False,
    "cuda_graph_config": {},
    "lora_config": None,
    "peft_cache_config": None,
    "scheduler_config": {"dynamic_batch_config": {"enable_batch_size_tuning": True}},
}
_KV_DEFAULTS = {"dtype": "auto", "max_tokens": None, "max_gpu_total_bytes": 0, "tokens_per_block": 32}


def merged(flags: dict[str, object], text: str | None) -> dict[str, object]:
    """The options that hold: the file's, then the command line's, then the defaults.

    Raises:
        RefusedError: the file is no mapping, an unknown key, one of the other backend, a value of another type.
    """
    given = {} if text is None else yaml.safe_load(text)
    if not isinstance(given, dict):
        raise RefusedError(f"ValueError: the options file holds a {type(given).__name__}, not a mapping")
    if older := sorted(_OLDER_FLOW & given.keys()):
        raise RefusedError(f"ValueError: The following arguments are specific to TensorRT backend: {older}")
    for key, value in given.items():
        if key not in _KEYS:
            raise RefusedError(f"ValueError: LLM got invalid argument: {key}")
        if not _KEYS[key](value):
            raise RefusedError(f"ValidationError: {key}: {value!r} is not a valid value")
        _check_block(key, value)
    kv = _KV_DEFAULTS | flags["kv_cache_config"] | given.get("kv_cache_config", {})  # type: ignore[operator]
    options = _DEFAULTS | flags | given | {"kv_cache_config": kv}
    _check_rules(options)
    return options


def _check_block(name: str, block: object) -> None:
    if name in _BLOCKS and isinstance(block, dict):
        for key, value in block.items():
            if key not in _BLOCKS[name]:
                raise RefusedError(f"ValidationError: {name}.{key}: Extra inputs are not permitted")
            if not _BLOCKS[name][key](value):
                raise RefusedError(f"ValidationError: {name}.{key}: {value!r} is not a valid value")


def _check_rules(options: dict[str, object]) -> None:
    kv, graphs = options["kv_cache_config"], options["cuda_graph_config"] or {}
    assert isinstance(kv, dict)
    assert isinstance(graphs, dict)
    if kv["dtype"] not in ("auto", "fp8", "nvfp4"):
        raise RefusedError(f"ValueError: Overriding KV cache quantization with an invalid type {kv['dtype']!r}")
    if not 0 < kv["free_gpu_memory_fraction"] <= 1:
        raise RefusedError("ValidationError: kv_cache_config.free_gpu_memory_fraction must be in (0, 1]")
    sizes, largest = graphs.get("batch_sizes"), graphs.get("max_batch_size")
    if sizes and largest and max(sizes) != largest:
        raise RefusedError("ValueError: cuda_graph_config.batch_sizes and max_batch_size do not agree")
    for key in ("max_batch_size", "max_num_tokens", "max_beam_width", "tensor_parallel_size"):
        if options[key] < 1:  # type: ignore[operator]
            raise RefusedError(f"ValidationError: {key} must be at least 1")
