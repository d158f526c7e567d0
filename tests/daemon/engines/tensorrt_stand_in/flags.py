"""The command line of ``trtllm-serve serve``: documented names, types and defaults; anything else is refused."""

from __future__ import annotations

from .refusal import RefusedError

# name, other names, type, default, the option it sets (None: the server's own)
_FLAGS = (
    ("--tokenizer", (), str, None, None),
    ("--custom_tokenizer", (), str, None, None),
    ("--backend", (), ("pytorch", "tensorrt", "trt", "_autodeploy"), "pytorch", None),
    ("--host", (), str, "localhost", None),
    ("--port", (), int, 8000, None),
    ("--log_level", (), ("internal_error", "error", "warning", "info", "verbose", "debug"), "info", None),
    ("--max_beam_width", (), int, 1, "max_beam_width"),
    ("--max_batch_size", (), int, 2048, "max_batch_size"),
    ("--max_num_tokens", (), int, 8192, "max_num_tokens"),
    ("--max_seq_len", (), int, None, "max_seq_len"),
    ("--tensor_parallel_size", ("--tp_size",), int, 1, "tensor_parallel_size"),
    ("--pipeline_parallel_size", ("--pp_size",), int, 1, "pipeline_parallel_size"),
    ("--context_parallel_size", ("--cp_size",), int, 1, "context_parallel_size"),
    ("--moe_expert_parallel_size", ("--ep_size",), int, None, "moe_expert_parallel_size"),
    ("--moe_cluster_parallel_size", ("--cluster_size",), int, None, None),
    ("--gpus_per_node", (), int, None, "gpus_per_node"),
    ("--free_gpu_memory_fraction", ("--kv_cache_free_gpu_memory_fraction",), float, 0.9, None),
    ("--config", ("--extra_llm_api_options",), str, None, None),
    ("--num_postprocess_workers", (), int, 0, None),
    ("--revision", (), str, None, None),
    ("--reasoning_parser", (), str, None, None),
    ("--tool_parser", (), str, None, None),
    ("--chat_template", (), str, None, None),
    ("--otlp_traces_endpoint", (), str, None, None),
    ("--server_role", (), str, None, None),
    ("--metadata_server_config_file", (), str, None, None),
    ("--disagg_cluster_uri", (), str, None, None),
    ("--custom_module_dirs", (), str, None, None),
)
_SWITCHES = ("--trust_remote_code", "--enable_chunked_prefill", "--fail_fast_on_attention_window_too_large")
_SUBCOMMANDS = ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve")
_USAGE = 2


def parse(argv: list[str]) -> tuple[str, dict[str, object], dict[str, object]]:
    """MODEL, the values by flag, and the options that flags set.

    Raises:
        RefusedError: an unknown flag, a value of another type, no MODEL or more than one, another subcommand.
    """
    words = list(argv)
    if words and words[0] in _SUBCOMMANDS:
        raise RefusedError(f"the stand-in serves only, not {words[0]}", _USAGE)
    if words and words[0] == "serve":
        words.pop(0)
    by_name = {name: flag for flag in _FLAGS for name in (flag[0], *flag[1])}
    values: dict[str, object] = {flag[0]: flag[3] for flag in _FLAGS} | dict.fromkeys(_SWITCHES, False)
    models = []
    while words:
        word, separator, inline = words.pop(0).partition("=")
        if word in _SWITCHES and not separator:
            values[word] = True
        elif word in by_name:
            if not separator and not words:
                raise RefusedError(f"Error: Option '{word}' requires an argument.", _USAGE)
            flag = by_name[word]
            values[flag[0]] = _value(word, flag[2], inline if separator else words.pop(0))
        elif word.startswith("-"):
            raise RefusedError(f"Error: No such option: {word}", _USAGE)
        else:
            models.append(word + separator + inline)
    if len(models) != 1:
        raise RefusedError(f"Error: one MODEL is needed, got {models}", _USAGE)
    options = {flag[4]: values[flag[0]] for flag in _FLAGS if flag[4] is not None}
    options["enable_chunked_prefill"] = values["--enable_chunked_prefill"]
    options["kv_cache_config"] = {"free_gpu_memory_fraction": values["--free_gpu_memory_fraction"]}
    return models[0], values, options


def _value(name: str, kind: object, text: str) -> object:
    if isinstance(kind, tuple):
        if text not in kind:
            raise RefusedError(f"Error: Invalid value for '{name}': {text!r} is not one of {kind}", _USAGE)
        return text
    try:
        return kind(text)  # type: ignore[operator]
    except ValueError:
        raise RefusedError(f"Error: Invalid value for '{name}': {text!r} is not a valid {kind}", _USAGE) from None
