"""From a worker's spec to vLLM's command line, every limit enforced. Arithmetic and text; starts nothing.

Source: ``engine/arg_utils.py`` of vLLM 0.24.0 to 0.33.0.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daemon.devices import Device
from daemon.engine_options import option_words
from daemon.engines.base import Burst
from daemon.engines.vllm.cache import (
    graph_settings,
    kv_cache_bytes,
    kv_dtype,
    plain_kv_dtype,
    step_tokens,
    type_of,
)
from daemon.engines.vllm.own_options import check_vllm_options, parser_words, use_words
from daemon.engines.vllm.variant_plug_in import (
    PLUG_IN_NAME,
    additional_config,
    arena_mib,
    may_use_plug_in,
    needs_plug_in,
)
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.cache_blocks import block_tokens
from fingerprint.checkpoint import INDEX_FILE, SINGLE_FILE
from fingerprint.config import WeightFormat
from fingerprint.config_json import read_config
from fingerprint.description.stored import quantization_of
from fingerprint.engine_caches import with_caches
from fingerprint.errors import CheckpointError, ConfigError
from fingerprint.families import is_tabled, load_spec, read_spec
from fingerprint.model_spec import ModelSpec
from fingerprint.quantized import BY_HEADERS, METHODS

__all__ = [
    "DRAIN_S",
    "KEPT_PER_SLOT",
    "Model",
    "arguments",
    "environment",
    "read_model",
    "warm_up_bursts",
]

_SHORTEST_NGRAM, _LONGEST_NGRAM = 2, 4  # tokens at the end of a text that are looked up in it, for a draft
KEPT_PER_SLOT = 2  # deltas in the host's memory
DRAIN_S = 30  # between SIGTERM and the end of what is being answered; the daemon kills after 35

_QUANTIZED_BY = {
    WeightFormat.GPTQ4: frozenset({"gptq", "gptq_marlin"}),
    WeightFormat.INT4: frozenset({"awq", "awq_marlin", "compressed-tensors"}),
    WeightFormat.FP8: frozenset({"fp8", "compressed-tensors"}),
    WeightFormat.STORED: frozenset(METHODS + BY_HEADERS) | {"gptq_marlin", "awq_marlin"},
}
_DELTAS_DTYPE = "bfloat16"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, slots=True)
class Model:
    """Facts of a checkpoint that a launch needs."""

    spec: ModelSpec
    quantized_by: str  # quant_method of its config.json; empty for 16-bit weights
    has_tokenizer: bool
    plain_kv_dtype: str = "auto"  # ``--kv-cache-dtype`` of 16 bits


def read_model(spec: WorkerSpec) -> Model:
    """The checkpoint of ``spec``.

    Raises:
        BadInputError: it cannot be read, has no safetensors though its weights are wanted, or its weights are not
            stored in the format that the configuration names.
    """
    folder = Path(spec.checkpoint)
    config = read_config(folder)
    quantization = quantization_of(config)
    quantized_by = str(quantization.get("quant_method", ""))
    _check_stored_as(spec, quantized_by)
    if spec.config.has_delta_slots and (dtype := type_of(config)) != _DELTAS_DTYPE:
        raise CheckpointError(
            f"deltas are served on vllm next to a base in {_DELTAS_DTYPE} alone, and dtype in the config.json of "
            f"{folder} is {dtype or 'not given'}; merge each into a deployment of its own (`iserve variant "
            "deploy`)"
        )
    if not spec.dummy_weights and not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        raise CheckpointError(
            f"{folder} has no safetensors files; fetch the weights, or ask for dummy weights to measure its shape"
        )
    return Model(
        spec=with_caches(_spec_of(folder, config), spec.layer_caches),
        quantized_by=quantized_by,
        has_tokenizer=any((folder / name).is_file() for name in _TOKENIZER_FILES),
        plain_kv_dtype=plain_kv_dtype(config),
    )


def _spec_of(folder: Path, config: Mapping[str, object]) -> ModelSpec:
    """Return the model's spec, of a family with a row without quantization, which changes no size of a launch."""
    if not is_tabled(config):
        return load_spec(folder)
    return read_spec({name: value for name, value in config.items() if name != "quantization_config"})


def _check_stored_as(spec: WorkerSpec, quantized_by: str) -> None:
    weights = spec.config.weights
    made_while_loading = weights in (WeightFormat.BITS16, WeightFormat.FP8)
    if (quantized_by or not made_while_loading) and quantized_by not in _QUANTIZED_BY.get(weights, frozenset()):
        takes = " or ".join(sorted(_QUANTIZED_BY.get(weights, frozenset()))) or "one that is not quantized"
        raise CheckpointError(
            f"weights={weights} on vllm takes a checkpoint made by {takes}, "
            f"{spec.checkpoint} is {f'quantized by {quantized_by}' if quantized_by else 'not quantized'}; "
            "quantize it first, or choose another weight format"
        )


def _memory_fraction(spec: WorkerSpec, devices: Mapping[str, Device]) -> str:
    """``--gpu-memory-utilization``: vLLM starts only where that part of every GPU is free; rounded down.

    One number for all its GPUs, so it is that of the GPU which was promised the smallest part. It does not bound
    what vLLM takes: weights, steps and the KV cache's exact bytes add up to that.
    """
    parts = {}
    for device_id, promised_bytes in spec.promised_bytes().items():
        total_bytes = devices[device_id].total_bytes
        parts[device_id] = math.floor(10_000 * promised_bytes / total_bytes) / 10_000
        if not 0 < parts[device_id] <= 1:
            raise ConfigError(
                f"{promised_bytes} bytes of {device_id} must be above 0.01% and at most all of its {total_bytes}; "
                "change memory_bytes_per_device"
            )
    return f"{min(parts.values()):.4f}"


def _check(spec: WorkerSpec, model: ModelSpec, devices: Mapping[str, Device]) -> None:
    limits = spec.limits
    if cpus := sorted(device.device_id for device in devices.values() if device.kind != "cuda"):
        raise ConfigError(f"vllm needs NVIDIA GPUs, {cpus[0]} is none; choose other devices or engine torch")
    if sum(stage.num_layers for stage in spec.stages) != model.num_layers:
        counts = [stage.num_layers for stage in spec.stages]
        raise ConfigError(f"the stages' layers {counts} do not add up to the model's {model.num_layers}")
    if limits.max_batched_tokens < limits.max_batch:
        raise ConfigError(
            f"max_batched_tokens={limits.max_batched_tokens} is less than max_batch={limits.max_batch}: vllm "
            "decodes a token of each sequence in one step; raise it"
        )
    sampled = limits.max_batch * (spec.config.draft_tokens + 1)
    if spec.config.adapter_slots and step_tokens(limits) < sampled:
        raise ConfigError(
            f"with adapter slots vllm verifies drafts in steps of at least {sampled} tokens ({limits.max_batch} "
            f"sequences x {spec.config.draft_tokens + 1}), and steps here have {step_tokens(limits)} at most; "
            "raise max_batched_tokens, or take fewer draft tokens"
        )
    if limits.kv_tokens < limits.max_context_tokens:
        raise ConfigError(
            f"kv_tokens={limits.kv_tokens} does not hold one sequence of max_context_tokens="
            f"{limits.max_context_tokens}; raise it or shorten the context"
        )


def arguments(
    spec: WorkerSpec, model: Model, devices: Mapping[str, Device], *, with_plug_in: bool = True
) -> tuple[str, ...]:
    """Return the arguments after ``vllm``.

    Args:
        with_plug_in: whether our plug-in is found, to which settings are passed on.

    Raises:
        ConfigError: vLLM has no way to keep what ``spec`` asks.
    """
    _check(spec, model.spec, devices)
    check_vllm_options(spec.options)
    config, limits = spec.config, spec.limits
    options: dict[str, object] = {
        "--host": spec.host,
        "--port": spec.port,
        "--served-model-name": spec.served_model,
        "--tensor-parallel-size": config.tp,
        "--pipeline-parallel-size": config.pp,
        "--max-model-len": limits.max_context_tokens,
        "--max-num-seqs": limits.max_batch,
        "--max-num-batched-tokens": step_tokens(limits),
        "--block-size": block_tokens(model.spec),
        "--kv-cache-memory-bytes": kv_cache_bytes(spec, model.spec),
        "--gpu-memory-utilization": _memory_fraction(spec, devices),
        "--kv-cache-dtype": kv_dtype(config.kv, model.plain_kv_dtype),
        "--load-format": "dummy" if spec.dummy_weights else "safetensors",  # never pickles
        "--generation-config": "vllm",  # a request means the same whatever the checkpoint recommends
        "--shutdown-timeout": DRAIN_S,
    }
    if config.weights is WeightFormat.FP8 and not model.quantized_by:
        options["--quantization"] = "fp8"
    compilation = graph_settings(limits)
    if config.tp > 1:
        compilation["pass_config"] = {"fuse_allreduce_rms": False}
    options["--compilation-config"] = json.dumps(compilation)
    if config.draft_tokens:
        options["--speculative-config"] = json.dumps(
            {
                "method": "ngram",
                "num_speculative_tokens": config.draft_tokens,
                "prompt_lookup_min": _SHORTEST_NGRAM,
                "prompt_lookup_max": _LONGEST_NGRAM,
            }
        )
    if config.adapter_slots:
        from fingerprint.lora.slot_bytes import LEAST_RANK  # loads NumPy: a daemon without such slots does not

        options["--max-loras"] = config.adapter_slots
        options["--max-lora-rank"] = config.adapter_rank or LEAST_RANK
        options["--max-cpu-loras"] = config.loaded_adapters
    if config.has_delta_slots:
        # An unload takes the name alone: with no more places than slots, what is loaded next could put out a delta
        # that has its name yet, and is read from its folder within a step then.
        options["--max-cpu-loras"] = KEPT_PER_SLOT * config.adapter_slots
    if with_plug_in and needs_plug_in(config):
        kept_mib = arena_mib(spec, devices) if config.has_delta_slots else 0
        options["--additional-config"] = json.dumps(additional_config(config, kept_mib=kept_mib))
    if config.num_gpus > 1:
        options["--distributed-executor-backend"] = "mp"
    # --name=value, so that no value is ever taken for an option
    flags = ["--disable-uvicorn-access-log"] + ["--skip-tokenizer-init"] * (not model.has_tokenizer)
    flags += ["--enable-lora"] * bool(config.adapter_slots)
    flags += ["--enable-expert-parallel"] * config.expert_parallel
    given = (*use_words(spec.options.use), *parser_words(spec.options), *option_words(spec.options))
    return ("serve", spec.checkpoint, *(f"{name}={value}" for name, value in options.items()), *flags, *given)


def environment(
    spec: WorkerSpec, devices: Mapping[str, Device], *, with_plug_in: bool = True
) -> tuple[tuple[str, str], ...]:
    """For the worker's processes.

    GPUs are named by index, as for every engine. NVLink multicast stays off: where a fabric
    manager does not offer it, vLLM's all-reduce fails on it at the start.

    Args:
        with_plug_in: whether our plug-in is found, so that it is named among those that are loaded.
    """
    indexes = [str(devices[device_id].index) for stage in spec.stages for device_id in stage.device_ids]
    env = [
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("CUDA_VISIBLE_DEVICES", ",".join(indexes)),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("NO_COLOR", "1"),
        ("PYTHONUNBUFFERED", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "86400"),  # how long a start may take is the daemon's to say
        # Else vLLM keeps kernels by model, and each fingerprint would compile those of experts anew.
        ("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))),
    ]
    if spec.profiling:  # random weights would route tokens to experts by chance
        env.append(("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"))
    if len(spec.stages) > 1 and not spec.profiling:  # profiling loads fingerprints of various depths
        env.append(("VLLM_PP_LAYER_PARTITION", ",".join(str(stage.num_layers) for stage in spec.stages)))
    if spec.config.adapter_slots:
        env.append(("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1"))  # else there are no routes that load adapters
    plug_ins = os.environ.get("VLLM_PLUGINS")
    if with_plug_in and may_use_plug_in(spec) and plug_ins is not None:  # those that are loaded, where not all are
        names = dict.fromkeys((*filter(None, plug_ins.split(",")), PLUG_IN_NAME))
        env.append(("VLLM_PLUGINS", ",".join(names)))
    if spec.config.tp > 1:
        env += [
            ("VLLM_ALLREDUCE_USE_SYMM_MEM", "0"),
            ("VLLM_ALLREDUCE_USE_FLASHINFER", "0"),  # of 0.33, over multicast where there is a switch
            ("NCCL_NVLS_ENABLE", "0"),
            ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        ]
    return tuple(env)


def warm_up_bursts(limits: WorkerLimits) -> tuple[Burst, ...]:
    """Return bursts whose steps have every size of prompt for which Triton makes a kernel of its own.

    A kernel is chosen by the size of the step, mostly by its power of two, and made anew where that is no multiple
    of 16: so each power of two up to the largest step, and one token less. A last burst has prompts of several
    requests in one step and decodes them together.
    """
    longest = min(limits.max_batched_tokens, limits.max_context_tokens - 2)
    lengths, tokens = [1], 16
    while tokens <= longest:
        lengths += [tokens - 1, tokens]
        tokens *= 2
    alone = [Burst(1, length, 2) for length in (*lengths, longest) if length <= longest]
    many = min(8, limits.max_batch)
    together = [Burst(many, length, 4) for length in (64, 1024) if length + 4 <= limits.max_context_tokens]
    return tuple(dict.fromkeys((*alone, *together)))
