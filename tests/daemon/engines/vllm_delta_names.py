"""Names of vLLM 0.33.0 that the plug-in of variants patches, overrides and reads, recorded with ``ast``.

    python -m tests.daemon.engines.vllm_delta_names FOLDER

reads the package ``vllm`` in ``FOLDER`` and writes ``vllm_delta_names.json``.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daemon.engines.vllm.sources import Package

__all__ = ["RECORDED", "REPLACED", "RUNNERS", "USED", "imports", "read_names", "recorded"]

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "daemon/engines/vllm/variants/iserve_variants"
RECORDED = Path(__file__).with_name("vllm_delta_names.json")
_LAYERS, _LINEAR = "lora/layers", "model_executor/layers/linear.py"
_VOCABULARY = "model_executor/layers/vocab_parallel_embedding.py"
_WITH_LOGITS = (f"{_LAYERS}/classifier.py", f"{_LAYERS}/logits_processor.py")
_MIXIN = "v1/worker/lora_model_runner_mixin.py"
# Methods that are overridden, called or replaced, and attributes that are read, by the class that has them.
USED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    f"{_LAYERS}/base.py:BaseLayerWithLoRA": (("set_lora", "reset_lora", "set_mapping"), ("punica_wrapper",)),
    f"{_LAYERS}/base_linear.py:BaseLinearLayerWithLoRA": (
        ("create_lora_weights", "apply", "_get_quant_method"),
        (
            *("base_layer", "device", "input_size", "lora_a_stacked", "lora_b_stacked", "n_slices"),
            *("output_slices", "tp_rank", "tp_size"),
        ),
    ),
    f"{_LAYERS}/column_parallel_linear.py:ColumnParallelLinearWithLoRA": (("can_replace_layer",), ()),
    f"{_LAYERS}/column_parallel_linear.py:MergedColumnParallelLinearWithLoRA": (
        ("create_lora_weights", "apply", "can_replace_layer"),
        ("output_ids", "output_slices"),
    ),
    f"{_LAYERS}/column_parallel_linear.py:QKVParallelLinearWithLoRA": (("can_replace_layer",), ()),
    f"{_LAYERS}/column_parallel_linear.py:MergedQKVParallelLinearWithLoRA": (
        ("create_lora_weights", "can_replace_layer"),
        ("output_ids", "output_slices"),
    ),
    f"{_LAYERS}/row_parallel_linear.py:RowParallelLinearWithLoRA": (("can_replace_layer",), ("input_size",)),
    f"{_LAYERS}/logits_processor.py:LogitsProcessorWithLoRA": (
        ("_get_logits", "set_lora", "reset_lora"),
        ("lora_a_stacked",),
    ),
    f"{_LAYERS}/classifier.py:BaseClassificationHeadWithLoRA": ((), ()),
    f"{_LAYERS}/vocab_parallel_embedding.py:VocabParallelEmbeddingWithLoRA": (("set_lora", "reset_lora"), ()),
    f"{_LAYERS}/utils.py:LoRAMapping": ((), ("index_mapping", "prompt_mapping", "is_prefill", "type")),
    "lora/lora_model.py:LoRAModel": (("__init__", "from_lora_tensors"), ("id", "loras", "rank")),
    "lora/lora_weights.py:LoRALayerWeights": (("__init__", "optimize"), ("lora_a", "lora_b")),
    "lora/model_manager.py:LoRAModelManager": (
        (
            *("_init_punica_wrapper", "_create_lora_modules", "_set_adapter_mapping", "activate_adapter"),
            *(
                "register_module",
                "set_adapter_mapping",
                "lora_slots",
                "adapter_slots",
                "deactivate_adapter",
                "capacity",
            ),
            *("add_adapter", "remove_adapter", "remove_all_adapters", "list_adapters", "get_adapter"),
            *("_deactivate_adapter", "_add_adapter", "_create_merged_loras_inplace", "_get_lora_layer_weights"),
        ),
        (
            *(
                "model",
                "modules",
                "packed_modules",
                "lora_index_to_id",
                "_registered_adapters",
                "_active_adapters",
            ),
            *("_last_mapping", "punica_wrapper_mapping", "supports_mm", "max_num_batched_tokens"),
            *("max_num_seqs", "lora_config", "device", "is_pooling_model"),
        ),
    ),
    "lora/model_manager.py:LRUCacheLoRAModelManager": (
        ("add_adapter", "activate_adapter", "remove_oldest_adapter"),
        (),
    ),
    "lora/worker_manager.py:WorkerLoRAManager": (
        (
            *("__init__", "_load_adapter", "_apply_adapters", "add_adapter", "remove_adapter", "list_adapters"),
            *("remove_all_adapters", "set_active_adapters", "add_dummy_lora", "dummy_lora_cache", "pin_adapter"),
            *("create_lora_manager", "get_dummy_lora_warmup_rank", "supports_tower_connector_lora"),
        ),
        ("_adapter_manager", "_lora_model_cls"),
    ),
    "lora/worker_manager.py:LRUCacheWorkerLoRAManager": (
        ("create_lora_manager", "_apply_adapters", "add_adapter"),
        ("_manager_cls",),
    ),
    "lora/punica_wrapper/punica_base.py:PunicaWrapperBase": (("add_lora_linear", "update_metadata"), ()),
    "lora/punica_wrapper/punica_gpu.py:PunicaWrapperGPU": (
        ("add_lora_linear", "add_lora_logits", "update_metadata"),
        ("prompt_mapping_meta", "token_mapping_meta"),
    ),
    "lora/ops/triton_ops/lora_kernel_metadata.py:LoRAKernelMeta": (
        ("make", "prepare_tensors", "meta_args"),
        (
            *("active_lora_ids", "lora_token_start_loc", "num_tokens_per_lora"),
            "token_indices_sorted_by_lora_ids",
        ),
    ),
    "utils/cache.py:LRUCache": (("cache", "pop", "touch", "remove_oldest"), ()),
    "lora/request.py:LoRARequest": ((), ("load_inplace", "lora_int_id", "lora_name", "lora_path")),
    "config/lora.py:LoRAConfig": (
        (),
        ("fully_sharded_loras", "max_lora_rank", "max_loras", "specialize_active_lora"),
    ),
    "config/model.py:ModelConfig": ((), ("dtype",)),
    "model_executor/models/utils.py:WeightsMapper": (("get_rename_mapper", "_map_name"), ()),
    "model_executor/models/interfaces.py:SupportsQuant": ((), ("hf_to_vllm_mapper",)),
    "config/vllm.py:VllmConfig": (
        (),
        ("additional_config", "compilation_config", "model_config", "parallel_config", "speculative_config"),
    ),
    "config/parallel.py:ParallelConfig": ((), ("world_size",)),
    "distributed/parallel_state.py:GroupCoordinator": (("is_last_rank",), ("cpu_group", "world_size")),
    "v1/executor/multiproc_executor.py:MultiprocExecutor": (("collective_rpc",), ("response_mqs",)),
    "config/compilation.py:CompilationConfig": ((), ("max_cudagraph_capture_size",)),
    "model_executor/layers/layernorm.py:RMSNorm": (
        ("forward_native",),
        ("has_weight", "variance_epsilon", "variance_size_override", "weight"),
    ),
    "model_executor/layers/logits_processor.py:LogitsProcessor": (("_get_logits", "forward"), ()),
    f"{_LINEAR}:LinearBase": ((), ("prefix", "quant_method")),
    f"{_LINEAR}:MergedColumnParallelLinear": ((), ("output_sizes",)),
    f"{_LINEAR}:QKVParallelLinear": ((), ("num_kv_head_replicas",)),
    f"{_LINEAR}:UnquantizedLinearMethod": (("apply",), ()),
    f"{_VOCABULARY}:VocabParallelEmbedding": ((), ("embedding_dim", "org_vocab_size")),
    f"{_MIXIN}:LoRAModelRunnerMixin": (
        (
            *(
                "load_lora_model",
                "_set_active_loras",
                "set_active_loras",
                "reset_lora_state",
                "_ensure_lora_enabled",
            ),
            *("maybe_setup_dummy_loras", "maybe_select_dummy_loras", "maybe_dummy_run_with_lora"),
            *("maybe_remove_all_loras", "add_lora", "remove_lora", "pin_lora", "list_loras"),
        ),
        ("lora_manager",),
    ),
    "v1/worker/gpu_model_runner.py:GPUModelRunner": (("_get_prompt_logprobs_dict",), ()),
    "v1/worker/gpu/model_runner.py:GPUModelRunner": ((), ("lora_capture_cases", "lora_state")),
    "v1/worker/gpu/lora_utils.py:LoraState": ((), ("lora_requests",)),
    "model_executor/models/interfaces_base.py:VllmModelForTextGeneration": (("compute_logits",), ()),
    "v1/worker/gpu/sample/prompt_logprob.py:PromptLogprobsWorker": (
        ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs"),
        (),
    ),
}
RUNNERS = ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py")  # version 1 and 2
# Names of modules that the plug-in replaces.
REPLACED = {
    _MIXIN: ("LRUCacheWorkerLoRAManager",),
    "lora/utils.py": ("_all_lora_classes",),
    "lora/lora_model.py": ("PIN_MEMORY", "safetensors"),
    "lora/lora_weights.py": ("PIN_MEMORY",),
    "lora/model_manager.py": ("PIN_MEMORY",),
    "v1/worker/gpu/model_runner.py": ("create_lora_capture_hook", "get_num_active_loras_for_dispatch"),
}


def read_names(package: Path) -> dict[str, Any]:
    """Return facts of each class in :data:`USED`, the names of modules, and calls of what is replaced."""
    source = Package(package)
    classes = {}
    for name, (methods, attributes) in USED.items():
        file, _, cls = name.partition(":")
        node, facts = _class(source, file, cls), source.class_facts(file, cls)
        if node is None or facts is None:
            continue
        plain = {
            t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
        }
        known = {*facts.fields, *facts.attributes, *plain}
        classes[name] = {
            "bases": [ast.unparse(base) for base in node.bases],
            "methods": {one: list(facts.methods[one]) for one in methods if one in facts.methods},
            "attributes": [one for one in attributes if one in known],
        }
    wanted = imports()
    names = {
        file: sorted(_names(source, file) & {*wanted.get(_module(file), ()), *REPLACED.get(file, ())})
        for file in sorted({*REPLACED, *(_file(source, module) for module in wanted)})
    }
    runners = {file: _of_adapters(source, file) for file in (*RUNNERS, _MIXIN)}
    return {"classes": classes, "names": names, "calls": _calls(source), "runners": runners}


def _of_adapters(source: Package, file: str) -> list[str]:
    """Return the functions with "lora" in their names, or of the manager, that a module calls."""
    nodes = ast.walk(source.tree(file) or ast.Module([], []))
    called = {ast.unparse(n.func) for n in nodes if isinstance(n, ast.Call)}
    return sorted(one for one in called if "lora" in one.lower() and "(" not in one)


def _calls(source: Package) -> dict[str, list[str]]:
    """Return how vLLM uses what is replaced: the manager, the layers, the slots, the operators' names."""
    asked = {
        _MIXIN: ("LRUCacheWorkerLoRAManager",),
        "lora/utils.py": ("lora_cls", "lora_cls.can_replace_layer", "instance_layer.create_lora_weights"),
        "lora/model_manager.py": ("module.set_lora", "module.reset_lora", "self._set_adapter_mapping"),
        "v1/executor/abstract.py": ("self.collective_rpc",),
        "v1/executor/multiproc_executor.py": (
            *("self.response_mqs.append", "init_logger", "logger.exception", "RuntimeError"),
        ),
        "v1/engine/core.py": ("init_logger", "logger.exception"),
        "lora/lora_model.py": ("safetensors.safe_open", "f.keys", "f.get_tensor"),
        "v1/worker/gpu_model_runner.py": ("self.load_lora_model", "self._get_prompt_logprobs_dict"),
        "v1/worker/gpu/model_runner.py": (
            "self.load_lora_model",
            *("create_lora_capture_hook", "get_num_active_loras_for_dispatch", "ModelCudaGraphManager"),
            "self.prompt_logprobs_worker.compute_prompt_logprobs",
            "self.prompt_logprobs_worker.compute_prompt_token_id_logprobs",
        ),
        "v1/worker/gpu/cudagraph_utils.py": ("lora_capture_hook",),
        "model_executor/layers/logits_processor.py": ("self._get_logits",),
        "plugins/__init__.py": ("load_plugins_by_group",),
        **dict.fromkeys(_WITH_LOGITS, ("self.punica_wrapper.add_lora_logits",)),
    }
    found = {}
    for file, functions in asked.items():
        nodes = ast.walk(source.tree(file) or ast.Module([], []))
        calls = {ast.unparse(n) for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in functions}
        found[file] = sorted(calls)
    return found


def imports() -> dict[str, set[str]]:
    """Return the names that the plug-in imports, by the module of vLLM."""
    found: dict[str, set[str]] = {}
    for file in sorted(PLUGIN.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return found


def recorded() -> dict[str, Any]:
    """Return the recorded names."""
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def _class(source: Package, file: str, name: str) -> ast.ClassDef | None:
    nodes = ast.walk(source.tree(file) or ast.Module([], []))
    return next((n for n in nodes if isinstance(n, ast.ClassDef) and n.name == name), None)


def _names(source: Package, file: str) -> set[str]:
    """Return what a module defines or imports at its top level, and the modules next to a package's file."""
    tree, found = source.tree(file), set()
    for node in ast.walk(tree or ast.Module([], [])):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
    if file.endswith("/__init__.py"):
        folder = file.removesuffix("__init__.py")
        found |= {name for names in imports().values() for name in names if source.has(f"{folder}{name}.py")}
    return found


def _file(source: Package, module: str) -> str:
    path = module.removeprefix("vllm.").replace(".", "/")
    return f"{path}.py" if source.has(f"{path}.py") else f"{path}/__init__.py"


def _module(file: str) -> str:
    return "vllm." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def main() -> None:
    """Record a package's names."""
    RECORDED.write_text(json.dumps(read_names(Path(sys.argv[1]) / "vllm"), indent=1) + "\n")


if __name__ == "__main__":
    main()
