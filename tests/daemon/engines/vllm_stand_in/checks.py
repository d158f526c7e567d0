"""Checks of vLLM (0.24 to 0.33) on options, model and machine before it starts, with the documented texts.

They are alike behind its server and its ``LLM`` class.
"""

import os

ARCHITECTURES = {
    "LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "FalconForCausalLM", "GPTJForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
}  # fmt: skip
QUANTIZATIONS = {"fp8", "fp8_per_tensor", "fp8_per_block", "mxfp8", "gptq", "gptq_marlin", "awq", "awq_marlin",
                 "compressed-tensors"}  # fmt: skip
# Bytes of an element, and of a scale for every token and head.
KV_DTYPES = {"auto": (2, 0), "float16": (2, 0), "bfloat16": (2, 0), "fp8": (1, 0), "fp8_e4m3": (1, 0),
             "int8_per_token_head": (1, 4)}  # fmt: skip
# PyTorch and NCCL read these too; the stand-in wants them where vLLM would use NVLink multicast.
MULTICAST_OFF = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}  # fmt: skip


def check_options(*, max_num_seqs, max_num_batched_tokens, max_model_len, gpu_memory_utilization):
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({max_num_batched_tokens}) must be greater than or equal to max_num_seqs "
            f"({max_num_seqs})."
        )
    if max_num_batched_tokens > max_num_seqs * max_model_len:  # a warning; 0.33 then writes out of its bounds
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}")


def check_folder(folder, config, *, max_model_len, load_format, skip_tokenizer_init):
    longest = config["max_position_embeddings"]
    if max_model_len > longest:
        raise ValueError(
            f"User-specified max_model_len ({max_model_len}) is greater than the derived max_model_len "
            f"(max_position_embeddings={longest}.0 or model_max_length=None in model's config.json)."
        )
    if load_format != "dummy" and not list(folder.glob("*.safetensors")):
        raise RuntimeError(f"Cannot find any model weights with `{folder}`")
    if not skip_tokenizer_init and not (folder / "tokenizer.json").exists():
        raise OSError(f"Can't load tokenizer for '{folder}'.")


def check_code(folder, config, *, trusted):
    """Code is named by ``auto_map``; where it may run, its files have to be there. Here nothing of it is run."""
    named = {name.partition(".")[0] for name in config.get("auto_map", {}).values()}
    if named and not trusted:
        raise ValueError(
            f"The repository {folder} contains custom code which must be executed to correctly load the model."
        )
    for name in sorted(named):
        if not (folder / f"{name}.py").is_file():
            raise OSError(f"{folder} does not appear to have a file named {name}.py.")


def check_engine(config, *, tp, pp, compilation):
    """Check as the core does, as it starts on the GPUs that it sees."""
    if not set(config["architectures"]) & ARCHITECTURES:
        raise ValueError(
            f"Model architectures {config['architectures']} are not supported for now. "
            f"Supported architectures: dict_keys({sorted(ARCHITECTURES)})"
        )
    if config["num_attention_heads"] % tp:
        raise ValueError(
            f"Total number of attention heads ({config['num_attention_heads']}) must be divisible by tensor "
            f"parallel size ({tp})."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(visible) != tp * pp or not all(v.isdigit() for v in visible):
        raise RuntimeError(f"Failed to infer device type (CUDA_VISIBLE_DEVICES={visible})")
    if unknown := compilation.keys() - {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "pass_config"}:
        raise ValueError(f"Unexpected keyword argument: {sorted(unknown)}")
    if not compilation.get("cudagraph_capture_sizes", [1]):
        raise AssertionError("cudagraph_capture_sizes should contain at least one element when using cuda graph.")
    if compilation.get("max_cudagraph_capture_size", 1) < 1:
        raise AssertionError("Maximum cudagraph size should be greater than or equal to 1")
    if tp > 1:
        passes = compilation.get("pass_config", {})
        on = [name for name, value in MULTICAST_OFF.items() if os.environ.get(name) != value]
        if on or passes.get("fuse_allreduce_rms") is not False:
            raise RuntimeError(f"CUDA driver error: multicast is not supported on this host ({on})")


def page_bytes(config, *, tp, kv_dtype, block_tokens):
    """Return the bytes of K and V of one block and layer on one GPU."""
    element_bytes, scale_bytes = KV_DTYPES[kv_dtype]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = max(1, config["num_key_value_heads"] // tp)
    return 2 * block_tokens * heads * (head_dim * element_bytes + scale_bytes)
