"""The contract with vLLM: every flag, variable, route, metric, method and text that iServe relies on, as values.

:func:`read_release` reads a vLLM package's own Python, installed or unpacked from a wheel, with ``ast`` alone;
:func:`breaches` says what iServe would miss there, and in what. Nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from daemon.engines.vllm.sources import (
    ClassFacts,
    Package,
    keys_of_tables,
    option_names,
    returned,
    strings_named,
    strings_starting,
)
from fingerprint.errors import EngineError

__all__ = [
    "ADAPTERS",
    "CACHE_LABELS",
    "FLAGS",
    "FUSED_ALL_REDUCE",
    "METRICS",
    "PROFILING_VALUES",
    "PROFILING_VARIABLES",
    "ROUTES",
    "SOME_FLAGS",
    "SOME_TEXTS",
    "SOME_VALUES",
    "SOME_VARIABLES",
    "STEPS_IN_FLIGHT",
    "TEXTS",
    "VALUES",
    "VARIABLES",
    "Breach",
    "ClassFacts",
    "Part",
    "ReleaseFacts",
    "breaches",
    "read_release",
]

FLAGS = frozenset(
    {"--host", "--port", "--served-model-name", "--tensor-parallel-size", "--pipeline-parallel-size"}
    | {"--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--kv-cache-memory-bytes"}
    | {"--gpu-memory-utilization", "--kv-cache-dtype", "--load-format", "--generation-config"}
    | {"--shutdown-timeout", "--compilation-config", "--disable-uvicorn-access-log", "--middleware"}
)
VARIABLES = frozenset({"VLLM_NO_USAGE_STATS", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_API_KEY"})
# Of launches on several GPUs, with fp8 weights made while loading, without a tokenizer, with drafts, with slots
# of adapters or deltas, with parsers, of a multimodal model as text alone or with images, or of a model that has
# code of its own.
SOME_FLAGS = frozenset(
    {"--quantization", "--distributed-executor-backend", "--skip-tokenizer-init", "--speculative-config"}
    | {"--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"}
    | {"--language-model-only", "--limit-mm-per-prompt", "--trust-remote-code"}
    | {"--enable-lora", "--max-loras", "--max-lora-rank", "--max-cpu-loras", "--additional-config"}
    | {"--enable-expert-parallel"}
)
SOME_VARIABLES = frozenset(
    {"VLLM_PP_LAYER_PARTITION", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"}
)
ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # that load and unload adapters
PROFILING_VARIABLES = frozenset(
    {"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"}
)
# Words that options are given, by the name that lists them in a file of vLLM's.
_FORMATS = "model_executor/model_loader/__init__.py", "LoadFormats"
_KV_TYPES = "config/cache.py", "CacheDType"
VALUES: Mapping[str, tuple[str, str]] = {
    "--load-format=safetensors": _FORMATS,
    "--generation-config=vllm": ("config/model.py", "try_get_generation_config"),
}
SOME_VALUES: Mapping[str, tuple[str, str]] = {
    "--kv-cache-dtype=auto": _KV_TYPES,
    "--kv-cache-dtype=int8_per_token_head": _KV_TYPES,
    "--kv-cache-dtype=fp8": _KV_TYPES,
    "--quantization=fp8": ("model_executor/layers/quantization/__init__.py", "QuantizationMethods"),
    "--distributed-executor-backend=mp": ("config/parallel.py", "DistributedExecutorBackend"),
}
PROFILING_VALUES: Mapping[str, tuple[str, str]] = {"--load-format=dummy": _FORMATS}
_ALL_VALUES = {**VALUES, **SOME_VALUES, **PROFILING_VALUES}
METRICS = frozenset(
    {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens"}
    | {"vllm:generation_tokens", "vllm:iteration_tokens_total", "vllm:cache_config_info"}
)
GRAPH_SETTINGS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")  # of --compilation-config
CACHE_LABELS = ("block_size", "num_gpu_blocks")  # of vllm:cache_config_info: fields of CacheConfig
_KV_CACHE = ("v1/core/kv_cache_utils.py", "v1/core/kv_cache_planning.py")
_REGISTRY, _EXCEPTIONS = ("model_executor/models/registry.py",), ("v1/engine/exceptions.py",)
_SPARSE = ("model_executor/layers/quantization/compressed_tensors/compressed_tensors.py",)
# All of its own words that ``error_patterns`` looks for in its log, by the file that holds them or its successor.
TEXTS: Mapping[str, tuple[str, ...]] = {
    "Free memory on device ": ("v1/worker/utils.py",),
    "on startup is less than desired GPU memory utilization": ("v1/worker/utils.py",),
    "No available memory for the cache blocks": _KV_CACHE,
    "To serve at least one request with the model's max seq len (": _KV_CACHE,
    "estimated maximum model length is ": _KV_CACHE,
    "Model architectures ": _REGISTRY,
    " are not supported for now": _REGISTRY,
    "The Transformers implementation of ": _REGISTRY,
    " is not compatible with vLLM": _REGISTRY,
    "Sparsity support has been removed": _SPARSE,
    "Total number of attention heads (": ("config/model.py",),
    ") must be divisible by tensor parallel size (": ("config/model.py",),
    "Invalid partition string": ("distributed/utils.py",),
    " does not match pp_size=": ("distributed/utils.py",),
    " does not match num_hidden_layers=": ("distributed/utils.py",),
    ") is greater than the derived max_model_len (": ("config/model.py",),
    "max_num_batched_tokens (": ("config/scheduler.py",),
    ") must be greater than or equal to max_num_seqs (": ("config/scheduler.py",),
    "EngineDeadError": _EXCEPTIONS,
    "EngineCore encountered an issue": _EXCEPTIONS,
    "See stack trace": _EXCEPTIONS,
    "See root cause": ("v1/engine/utils.py",),
    "Failed core proc": ("v1/engine/utils.py",),
    "died unexpectedly": ("v1/executor/multiproc_executor.py",),
    "WorkerProc initialization failed": ("v1/executor/multiproc_executor.py",),
    "Failed to infer device type": ("config/device.py",),
    " does not support LoRA yet": ("v1/worker/lora_model_runner_mixin.py",),
    "No supported LoRA modules found in ": ("lora/model_manager.py",),
    "When using LoRA, vocab size must be <= ": ("lora/layers/logits_processor.py",),
    "Monolithic kernels are not supported for Fused MoE LoRA": ("lora/layers/fused_moe.py",),
    " does not support LoRA. For ": ("lora/layers/fused_moe.py",),
    "Unsupported base layer: ": ("lora/layers/utils.py",),
    "LoRA rank ": ("lora/peft_helper.py",),
    " is greater than max_lora_rank ": ("lora/peft_helper.py",),
    " target modules in ": ("lora/lora_model.py",),
    " but received ": ("lora/lora_model.py",),
}
# Words of some of the known releases, which a release may lack.
SOME_TEXTS: Mapping[str, tuple[str, ...]] = {"LoRA is not supported for ": ("config/lora.py",)}

_ARGUMENTS = "engine/arg_utils.py"
_FRONT_ENDS = ("openai/cli_args.py", "launchers/cli_args.py", "common/cli_args.py")  # to 0.28, 0.29, 0.33
_WORKER, _V1, _V2 = "v1/worker/gpu_worker.py", "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
_PASS_CONFIG = "config/compilation.py:PassConfig"
FUSED_ALL_REDUCE = f"{_PASS_CONFIG}.fuse_allreduce_rms"  # set with tensor parallelism
STEPS_IN_FLIGHT = "steps in flight"  # whose tokens a sliding window keeps
_CHAT = "entrypoints/openai/chat_completion/protocol.py"
_DELTAS = ("entrypoints/openai/engine/protocol.py", "entrypoints/generate/base/protocol.py")  # to 0.28, from 0.29
_CARDS = ("entrypoints/openai/engine/protocol.py", "entrypoints/serve/engine/protocol.py")  # likewise
_LORA_ROUTES, _LORA_BODIES = "entrypoints/serve/lora/api_router.py", "entrypoints/serve/lora/protocol.py"
_BODY_FIELDS = {  # of the requests that load and unload
    f"{_LORA_BODIES}:LoadLoRAAdapterRequest": ("lora_name", "lora_path"),
    f"{_LORA_BODIES}:UnloadLoRAAdapterRequest": ("lora_name",),
}
_CARD_FIELDS = ("id", "root", "parent")  # of an entry of GET /v1/models
_CACHE, _OUTPUT, _CONFIG = "v1/kv_cache_interface.py", "v1/core/sched/output.py", "config/vllm.py"
_CLASSES = {  # whose methods, fields and attributes are read
    (_WORKER, "Worker"),
    (_V1, "GPUModelRunner"),
    (_V2, "GPUModelRunner"),
    (_CACHE, "KVCacheTensor"),
    (_CACHE, "KVCacheGroupSpec"),
    (_CACHE, "KVCacheConfig"),
    (_OUTPUT, "SchedulerOutput"),
    (_OUTPUT, "NewRequestData"),
    (_OUTPUT, "CachedRequestData"),
    (_CONFIG, "VllmConfig"),
    ("config/compilation.py", "CompilationConfig"),
    ("config/compilation.py", "PassConfig"),
    (_ARGUMENTS, "EngineArgs"),
    ("entrypoints/llm.py", "LLM"),
    ("entrypoints/offline_utils.py", "OfflineInferenceMixin"),
    ("sampling_params.py", "SamplingParams"),
    ("outputs.py", "RequestOutput"),
    ("outputs.py", "CompletionOutput"),
    ("v1/engine/llm_engine.py", "LLMEngine"),
    ("v1/engine/core_client.py", "EngineCoreClient"),
    ("v1/worker/worker_base.py", "WorkerBase"),
    ("config/cache.py", "CacheConfig"),
    ("config/model.py", "ModelConfig"),
    (_CACHE, "SlidingWindowSpec"),
    (_CHAT, "ChatMessage"),
    *((file, "DeltaMessage") for file in _DELTAS),
    *((file, "ModelCard") for file in _CARDS),
    *((_LORA_BODIES, name.partition(":")[2]) for name in _BODY_FIELDS),
    ("lora/model_manager.py", "LoRAModelManager"),
}
# What a launch with adapter slots rests on beyond its flags and variables, in the words of a breach.
ADAPTERS = frozenset(
    {f"route {route}" for route in ROUTES}
    | {f"class {name}" for name in _BODY_FIELDS}
    | {f"{name}.{field}" for name, fields in _BODY_FIELDS.items() for field in fields}
    | {f"class {file}:ModelCard" for file in _CARDS}
    | {f"{file}:ModelCard.{field}" for file in _CARDS for field in _CARD_FIELDS}
)
_BROKEN_GRAPHS = "compilation/breakable_cudagraph.py", "is_breakable_cudagraph_enabled"
_TOKENS_IN_FLIGHT = "self.max_concurrent_batches * self.scheduler_config.max_num_batched_tokens"


class Part(StrEnum):
    """Part of iServe that a part of the contract carries."""

    SERVING = "serving"
    SOME = "some launches"
    ANSWERS = "answers as they are documented"
    FAILURES = "explaining failures"
    PROFILING = "profiling"
    TIMING = "the step timer"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseFacts:
    """Facts read in one release's Python."""

    flags: tuple[str, ...]
    values: tuple[str, ...]  # of options, as "--option=value"
    variables: tuple[str, ...]
    routes: tuple[str, ...]  # of adapters
    metrics: tuple[str, ...]
    texts: tuple[str, ...]  # of :data:`TEXTS` and :data:`SOME_TEXTS`
    architectures: tuple[str, ...]
    modules: tuple[str, ...]  # of those that are imported or started
    plugin_groups: tuple[str, ...]
    batches_in_flight: tuple[str, ...]  # expressions that ``max_concurrent_batches`` returns
    tokens_in_flight: tuple[str, ...]  # and ``max_in_flight_tokens``, which is there from 0.26 on
    functions: tuple[str, ...]  # of modules, by "file:function"
    classes: Mapping[str, ClassFacts]  # by "file:class"


@dataclass(frozen=True, slots=True)
class Breach:
    """Something that iServe relies on and a release lacks."""

    part: Part
    what: str


def read_release(package: Path) -> ReleaseFacts:
    """Return the facts of the ``vllm`` package in folder ``package``.

    Raises:
        EngineError: its command line cannot be read.
    """
    source = Package(package)
    if source.tree(_ARGUMENTS) is None:
        raise EngineError(f"{package} has no {_ARGUMENTS} that can be read; install vllm there anew")
    front_ends = [tree for name in _FRONT_ENDS if (tree := source.tree(f"entrypoints/{name}")) is not None]
    classes = {
        f"{file}:{name}": facts for file, name in sorted(_CLASSES) if (facts := source.class_facts(file, name))
    }
    return ReleaseFacts(
        flags=tuple(sorted(option_names(source.tree(_ARGUMENTS), *front_ends))),
        values=tuple(
            option
            for option, (file, name) in _ALL_VALUES.items()
            if option.partition("=")[2] in strings_named(source.tree(file), name)
        ),
        variables=tuple(sorted(strings_starting(source.tree("envs.py"), "VLLM_"))),
        routes=tuple(sorted(strings_starting(source.tree(_LORA_ROUTES), "/v1/"))),
        metrics=tuple(sorted(strings_starting(source.tree("v1/metrics/loggers.py"), "vllm:"))),
        texts=tuple(
            text
            for text, files in {**TEXTS, **SOME_TEXTS}.items()
            if any(source.says(file, text) for file in files)
        ),
        architectures=tuple(sorted(keys_of_tables(source.tree("model_executor/models/registry.py")))),
        modules=tuple(name for name in ("entrypoints/cli/main.py", "third_party/pynvml.py") if source.has(name)),
        plugin_groups=tuple(sorted(strings_starting(source.tree("plugins/__init__.py"), "vllm."))),
        batches_in_flight=tuple(sorted(returned(source.tree(_CONFIG), "max_concurrent_batches"))),
        tokens_in_flight=tuple(sorted(returned(source.tree(_CONFIG), "max_in_flight_tokens"))),
        functions=tuple(f"{file}:{name}" for file, name in (_BROKEN_GRAPHS,) if source.defines(file, name)),
        classes=classes,
    )


def breaches(facts: ReleaseFacts) -> tuple[Breach, ...]:
    """Return what iServe relies on and the release lacks, in the order of :class:`Part`."""
    parts = (_serving, _of_some_launches, _of_answers, _profiling, _timing)
    found = [breach for part in parts for breach in part(facts)]
    found += [Breach(Part.FAILURES, f"text {text!r}") for text in TEXTS if text not in facts.texts]
    order = list(Part)
    return tuple(sorted(found, key=lambda breach: order.index(breach.part)))


def _serving(facts: ReleaseFacts) -> Iterator[Breach]:
    part = Part.SERVING
    yield from _without(part, "flag", FLAGS, facts.flags)
    yield from _without(part, "value", VALUES, facts.values)
    yield from _without(part, "variable", VARIABLES, facts.variables)
    yield from _without(part, "metric", METRICS, facts.metrics)
    yield from _without(part, "module", {"entrypoints/cli/main.py"}, facts.modules)
    yield from _lacking(facts, part, "config/compilation.py:CompilationConfig", *GRAPH_SETTINGS)
    yield from _lacking(facts, part, "config/cache.py:CacheConfig", *CACHE_LABELS)
    yield from _called(facts, part, "config/cache.py:CacheConfig", "metrics_info")


def _of_some_launches(facts: ReleaseFacts) -> Iterator[Breach]:
    part = Part.SOME
    yield from _without(part, "flag", SOME_FLAGS, facts.flags)
    yield from _without(part, "value", SOME_VALUES, facts.values)
    yield from _without(part, "variable", SOME_VARIABLES, facts.variables)
    yield from _without(part, "route", ROUTES, facts.routes)
    yield from _lacking(facts, part, _PASS_CONFIG, FUSED_ALL_REDUCE.rpartition(".")[2])
    for name, fields in _BODY_FIELDS.items():
        yield from _lacking(facts, part, name, *fields)
    yield from _lacking(facts, part, _place_of(facts, "ModelCard", _CARDS), *_CARD_FIELDS)
    if not _keeps_known_steps(facts):
        yield Breach(part, STEPS_IN_FLIGHT)


def _keeps_known_steps(facts: ReleaseFacts) -> bool:
    """Return whether a sliding window keeps at most the tokens of pp + 1 steps beyond itself."""
    window = facts.classes.get(f"{_CACHE}:SlidingWindowSpec", ClassFacts())
    counted = window.methods.get("max_admission_blocks_per_request")
    if counted == ("max_num_batched_tokens", "max_model_len"):  # 0.24 and 0.25: of one step
        return True
    return (
        counted == ("max_in_flight_tokens", "max_model_len")
        and facts.tokens_in_flight == (_TOKENS_IN_FLIGHT,)
        and bool(facts.batches_in_flight)
        and set(facts.batches_in_flight) <= {"pp_size + 1", "2", "pp_size"}
    )


def _of_answers(facts: ReleaseFacts) -> Iterator[Breach]:
    for name in (f"{_CHAT}:ChatMessage", _place_of(facts, "DeltaMessage", _DELTAS)):
        yield from _lacking(facts, Part.ANSWERS, name, "reasoning")


def _place_of(facts: ReleaseFacts, name: str, files: tuple[str, ...]) -> str:
    """Return the class of ``name`` in that of ``files`` which has it; in the last of them where none has."""
    return next((found for file in files if (found := f"{file}:{name}") in facts.classes), f"{files[-1]}:{name}")


def _without(part: Part, kind: str, needed: Iterable[str], there: Iterable[str]) -> Iterator[Breach]:
    for name in sorted(set(needed) - set(there)):
        yield Breach(part, f"{kind} {name}")


def _profiling(facts: ReleaseFacts) -> Iterator[Breach]:
    part, worker = Part.PROFILING, f"{_WORKER}:Worker"
    yield from _without(part, "variable", PROFILING_VARIABLES, facts.variables)
    yield from _without(part, "value", PROFILING_VALUES, facts.values)
    if "third_party/pynvml.py" not in facts.modules:
        yield Breach(part, "module third_party/pynvml.py")
    if "vllm.general_plugins" not in facts.plugin_groups:
        yield Breach(part, "plug-in group vllm.general_plugins")
    yield from _lacking(
        facts, part, f"{_ARGUMENTS}:EngineArgs",
        "model", "load_format", "skip_tokenizer_init", "enable_prefix_caching", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "gpu_memory_utilization", "num_gpu_blocks_override", "block_size",
        "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "seed", "compilation_config",
        "quantization", "language_model_only", "trust_remote_code",
    )  # fmt: skip
    sampling = ("max_tokens", "min_tokens", "ignore_eos", "temperature", "detokenize")
    yield from _lacking(facts, part, "sampling_params.py:SamplingParams", *sampling)
    yield from _called(
        facts,
        part,
        _llm_of(facts, "generate"),
        "generate",
        "prompts",
        "sampling_params",
        "use_tqdm",
        "lora_request",
    )
    yield from _called(
        facts, part, _llm_of(facts, "collective_rpc"), "collective_rpc", "method", "timeout", "args"
    )
    yield from _lacking(facts, part, "entrypoints/llm.py:LLM", "llm_engine")
    yield from _lacking(facts, part, "v1/engine/llm_engine.py:LLMEngine", "engine_core", "model_config")
    yield from _called(facts, part, "config/model.py:ModelConfig", "get_vocab_size")
    yield from _called(facts, part, "v1/engine/core_client.py:EngineCoreClient", "shutdown")
    yield from _lacking(facts, part, "outputs.py:RequestOutput", "outputs")
    yield from _lacking(facts, part, "outputs.py:CompletionOutput", "token_ids")
    yield from _lacking(facts, part, "v1/worker/worker_base.py:WorkerBase", "cache_config", "model_config")
    yield from _lacking(facts, part, "config/model.py:ModelConfig", "enforce_eager")
    yield from _called(facts, part, worker, "load_model")
    yield from _called(facts, part, worker, "initialize_from_config", "kv_cache_config")
    counted = ("peak_activation_memory", "cudagraph_memory_estimate", "requested_memory")
    yield from _lacking(facts, part, worker, *counted, "available_kv_cache_memory_bytes", "model_runner")
    attributes = facts.classes.get(worker, ClassFacts()).attributes
    if not {"non_torch_memory", "total_consumed"} & set(attributes):
        yield Breach(part, f"{worker} assigns neither non_torch_memory nor total_consumed")
    for runner in (f"{_V1}:GPUModelRunner", f"{_V2}:GPUModelRunner"):
        yield from _lacking(facts, part, runner, "model_memory_usage")
        yield from _called(facts, part, runner, "capture_model")
    yield from _lacking(
        facts, part, f"{_CACHE}:KVCacheConfig", "num_blocks", "kv_cache_tensors", "kv_cache_groups"
    )
    yield from _lacking(facts, part, f"{_CACHE}:KVCacheGroupSpec", "layer_names", "kv_cache_spec")
    tensor = set(facts.classes.get(f"{_CACHE}:KVCacheTensor", ClassFacts()).fields)
    if not tensor >= {"size", "shared_by"} and not tensor >= {"size", "layers", "layer_stride", "block_stride"}:
        yield Breach(part, f"{_CACHE}:KVCacheTensor has the fields {', '.join(sorted(tensor)) or 'of none'}")


def _timing(facts: ReleaseFacts) -> Iterator[Breach]:
    part = Part.TIMING
    if (function := ":".join(_BROKEN_GRAPHS)) not in facts.functions:
        yield Breach(part, f"function {function}")
    yield from _called(facts, part, f"{_WORKER}:Worker", "execute_model", "scheduler_output")
    yield from _called(facts, part, f"{_WORKER}:Worker", "sample_tokens", "grammar_output")
    for runner in (f"{_V1}:GPUModelRunner", f"{_V2}:GPUModelRunner"):
        yield from _called(facts, part, runner, "get_model")
    steps = ("num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_cached_reqs", "scheduled_new_reqs")
    yield from _lacking(facts, part, f"{_OUTPUT}:SchedulerOutput", *steps)
    yield from _lacking(facts, part, f"{_OUTPUT}:CachedRequestData", "req_ids", "num_computed_tokens")
    yield from _lacking(facts, part, f"{_OUTPUT}:NewRequestData", "req_id", "num_computed_tokens")
    slots = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "additional_config")
    yield from _lacking(facts, part, f"{_ARGUMENTS}:EngineArgs", *slots, "enable_expert_parallel")
    yield from _called(facts, part, "v1/engine/llm_engine.py:LLMEngine", "add_lora", "lora_request")


def _llm_of(facts: ReleaseFacts, method: str) -> str:
    """Return the class that defines the method of ``vllm.LLM``: itself or a class that it is mixed from."""
    mixed = "entrypoints/offline_utils.py:OfflineInferenceMixin"
    return mixed if method in facts.classes.get(mixed, ClassFacts()).methods else "entrypoints/llm.py:LLM"


def _lacking(facts: ReleaseFacts, part: Part, name: str, *wanted: str) -> Iterator[Breach]:
    there = facts.classes.get(name)
    if there is None:
        yield Breach(part, f"class {name}")
        return
    for attribute in wanted:
        if attribute not in (*there.fields, *there.attributes):
            yield Breach(part, f"{name}.{attribute}")


def _called(facts: ReleaseFacts, part: Part, name: str, method: str, *parameters: str) -> Iterator[Breach]:
    """Yield a breach unless the method takes these parameters, and needs no others."""
    there = facts.classes.get(name, ClassFacts()).methods.get(method)
    if there is None:
        yield Breach(part, f"method {name}.{method}")
        return
    optional = {p.rstrip("=") for p in there if p.endswith("=") or p.startswith("*")}
    needed = [p for p in there if p.rstrip("=") not in optional]
    known = {p.rstrip("=") for p in there}
    if not set(parameters) <= known or not set(needed) <= set(parameters):
        yield Breach(part, f"method {name}.{method}({', '.join(there)}), called with ({', '.join(parameters)})")
