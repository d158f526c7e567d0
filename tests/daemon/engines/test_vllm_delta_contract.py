"""Names of vLLM that the plug-in of deltas patches and overrides, as recorded of 0.33.0 and in its source."""

from __future__ import annotations

import ast
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.engines.vllm.release import RUN_WITH_DELTAS
from fingerprint.engines import traits_of
from tests.daemon.engines.vllm_delta_names import PLUGIN, REPLACED, USED, imports, read_names, recorded
from tests.daemon.engines.vllm_releases import download
from tests.daemon.variant_kernels import variant_module
from tests.golden_words import Golden

NAMES = recorded()
CLASSES, CALLS = NAMES["classes"], NAMES["calls"]
RELEASES = variant_module("settings").RELEASES
SITE = os.environ.get("ISERVE_VLLM_SITE", "")
_EXECUTOR = "v1/executor/multiproc_executor.py"
# Our class, those of vLLM whose methods it overrides.
OVERRIDDEN = {
    "LinearWithDeltas": ("BaseLinearLayerWithLoRA", "MergedColumnParallelLinearWithLoRA"),
    "EmbeddingWithDeltas": ("BaseLayerWithLoRA",),
    "OutputWithDeltas": ("BaseLayerWithLoRA",),
    "DeltaModelManager": ("LoRAModelManager", "LRUCacheLoRAModelManager"),
    "AsideModelManager": ("LoRAModelManager", "LRUCacheLoRAModelManager"),
    "AsideWorkerManager": ("WorkerLoRAManager", "LRUCacheWorkerLoRAManager"),
    "DeltaWorkerManager": ("WorkerLoRAManager", "LRUCacheWorkerLoRAManager"),
}


def _ours() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file in sorted(PLUGIN.glob("vllm_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                yield from ((node.name, one) for one in node.body if isinstance(one, ast.FunctionDef))


def _theirs(name: str) -> dict[str, list[str]]:
    return next(facts["methods"] for full, facts in CLASSES.items() if full.endswith(f":{name}"))


def _parameters(node: ast.FunctionDef) -> list[str]:
    """Return parameters as the record has them: without self, with = behind those that have a default."""
    names = [one.arg for one in node.args.args]
    first_default = len(names) - len(node.args.defaults)
    return [f"{name}=" if at >= first_default else name for at, name in enumerate(names)][1:]


def test_every_name_that_is_used_is_recorded() -> None:
    for name, (methods, attributes) in USED.items():
        assert set(methods) <= CLASSES[name]["methods"].keys(), name
        assert set(attributes) == set(CLASSES[name]["attributes"]), name


def test_every_name_that_is_imported_is_recorded() -> None:
    known = {
        "vllm." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): set(names)
        for file, names in NAMES["names"].items()
    }
    for module, names in imports().items():
        assert names <= known[module], module
    for file, replaced in REPLACED.items():
        assert set(replaced) <= set(NAMES["names"][file])


def test_what_overrides_takes_what_is_overridden() -> None:
    compared = set()
    nearer = {("WorkerLoRAManager", name) for name in _theirs("LRUCacheWorkerLoRAManager")}  # which overrides them
    for ours, node in _ours():
        for theirs in OVERRIDDEN.get(ours, ()):
            if (theirs, node.name) in nearer:
                continue
            if node.name in _theirs(theirs) and node.name != "can_replace_layer":  # which passes all on
                assert _parameters(node) == _theirs(theirs)[node.name], f"{ours}.{node.name}"
                compared.add((ours, node.name))
    assert {name for ours, name in compared if ours == "DeltaModelManager"} == {
        "_init_punica_wrapper",
        "_create_lora_modules",
        "_set_adapter_mapping",
        "activate_adapter",
    }
    assert {name for ours, name in compared if ours == "LinearWithDeltas"} == {
        "create_lora_weights",
        "apply",
    }
    of_workers = {name for ours, name in compared if ours in ("DeltaWorkerManager", "AsideWorkerManager")}
    assert of_workers == {"_load_adapter", "_apply_adapters", "add_adapter", "create_lora_manager"}


def test_logits_are_asked_for_as_they_are_answered() -> None:
    (inner,) = (
        node
        for node in ast.walk(ast.parse((PLUGIN / "vllm_modules.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "get_logits"
    )
    ours = [one.arg for one in inner.args.args]
    for name in ("LogitsProcessor", "LogitsProcessorWithLoRA"):
        assert [one.rstrip("=") for one in _theirs(name)["_get_logits"]] == ours
    assert CALLS["model_executor/layers/logits_processor.py"] == [
        "self._get_logits(hidden_states, lm_head, embedding_bias, skip_gather)"
    ]


def test_both_runners_ask_for_logits_of_prompts_as_the_plug_in_watches() -> None:
    """Views of the step's hidden states, given by their place, to methods that our own replace."""
    first = next(one for one in CALLS["v1/worker/gpu_model_runner.py"] if "prompt_logprobs" in one)
    assert first.startswith("self._get_prompt_logprobs_dict(hidden_states[:num_scheduled_tokens],")
    second = [one for one in CALLS["v1/worker/gpu/model_runner.py"] if "prompt_logprobs" in one]
    assert len(second) == 2
    assert all("(self.model.compute_logits, hidden_states, " in one and "=" not in one for one in second)
    of_first, of_second = _theirs("GPUModelRunner"), _theirs("PromptLogprobsWorker")
    assert of_first["_get_prompt_logprobs_dict"][0] == "hidden_states"
    assert {tuple(names[:2]) for names in of_second.values()} == {("logits_fn", "hidden_states")}
    watched = {
        node.attr
        for node in ast.walk(ast.parse((PLUGIN / "vllm_prompts.py").read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert {*of_first, *of_second} <= watched


def test_both_runners_make_the_manager_that_is_replaced() -> None:
    for file in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):
        assert "LoRAModelRunnerMixin" in CLASSES[f"{file}:GPUModelRunner"]["bases"]
        made = [one for one in CALLS[file] if "load_lora_model" in one]
        assert made == ["self.load_lora_model(self.model, self.vllm_config, self.device)"]
    (made,) = CALLS["v1/worker/lora_model_runner_mixin.py"]
    assert made == "LRUCacheWorkerLoRAManager(vllm_config, device, model.embedding_modules)"
    assert CLASSES["lora/worker_manager.py:LRUCacheWorkerLoRAManager"]["bases"] == ["WorkerLoRAManager"]


def test_the_newer_runner_keys_graphs_by_what_the_plug_in_gives() -> None:
    file = "v1/worker/gpu/model_runner.py"
    assert set(CLASSES[f"{file}:GPUModelRunner"]["attributes"]) == {"lora_capture_cases", "lora_state"}
    (manager,) = (one for one in CALLS[file] if one.startswith("ModelCudaGraphManager"))
    assert "lora_capture_cases=self.lora_capture_cases" in manager
    assert "create_lora_capture_hook(self.lora_config, self)" in CALLS[file]
    assert (
        "get_num_active_loras_for_dispatch(self.lora_config, self.lora_state, req_ids, dummy_run)" in CALLS[file]
    )
    assert CALLS["v1/worker/gpu/cudagraph_utils.py"] == [
        "lora_capture_hook(desc.num_active_loras, num_reqs, num_tokens)"
    ]


def test_adapters_are_read_by_the_names_that_pause() -> None:
    assert CALLS["lora/lora_model.py"] == [
        "f.get_tensor(module)",
        "f.keys()",
        "safetensors.safe_open(lora_tensor_path, framework='pt')",
    ]


def test_refusals_are_hidden_where_vllm_logs_errors_of_calls() -> None:
    """Loggers that two modules name as themselves, and the words for an error of a worker's process."""
    files = {"v1/engine/core.py": "'Invocation", _EXECUTOR: "'WorkerProc hit"}
    for file, words in files.items():
        assert "init_logger(__name__)" in CALLS[file]
        assert any(one.startswith(f"logger.exception({words} ") for one in CALLS[file])
    refusals = variant_module("refusals")
    assert set(refusals.LOGGERS) == {f"vllm.{file.removesuffix('.py').replace('/', '.')}" for file in files}
    (said,) = (one for one in CALLS[_EXECUTOR] if "{result}" in one)
    words = ast.literal_eval(said.removeprefix("RuntimeError(f").removesuffix(")"))
    assert refusals.hides(RuntimeError(words.format(result=refusals.StillReadError("delta", "a"))))
    assert not refusals.hides(RuntimeError(words.format(result="no memory")))


def test_layers_are_filled_and_emptied_as_the_plug_in_takes_them() -> None:
    assert CALLS["lora/model_manager.py"] == [
        "module.reset_lora(index)",
        "module.set_lora(index, module_lora.lora_a, module_lora.lora_b)",
        "self._set_adapter_mapping(mapping)",
    ]
    assert "instance_layer.create_lora_weights(max_loras, lora_config, model_config)" in CALLS["lora/utils.py"]
    assert CLASSES["lora/lora_weights.py:LoRALayerWeights"]["methods"]["__init__"] == [
        "module_name", "rank", "lora_alpha", "lora_a", "lora_b", "scaling="
    ]  # fmt: skip


def test_deltas_are_offered_once_the_plug_in_ran() -> None:
    """Until then plans refuse them on vLLM, and say how to export them."""
    assert traits_of("vllm").serves_deltas == bool(RUN_WITH_DELTAS)
    assert {f"{major}.{minor}.0" for major, minor in RUN_WITH_DELTAS} <= set(RELEASES)


def test_the_table_of_engines_names_the_formats_that_the_plug_in_has() -> None:
    page = (Path(__file__).parents[3] / "docs/engine-tables.md").read_text()
    section = page.partition("## Deltas of full fine-tunes")[2].partition("Reasons:")[0]
    head, _, *rows = (
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    )
    found = {row[0].replace("`", ""): dict(zip(head, row, strict=True)) for row in rows}
    formats = set(variant_module("formats").FORMATS)
    assert {name for name, cell in found[f"vllm {RELEASES[0]}"].items() if cell == "yes"} == formats | {"merged"}
    for other in ("vllm, other releases", "tensorrt-llm"):
        assert [name for name, cell in found[other].items() if cell == "yes"] == ["merged"]
    assert [name for name, cell in found["torch"].items() if cell == "yes"] == ["--delta-mib", "merged"]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.34.0+cu130", ""])
def test_other_releases_are_refused(version: str, golden: Golden) -> None:
    with golden.raises("engines", RuntimeError):
        variant_module("settings").check_release(version)


def test_the_release_that_was_read_is_taken() -> None:
    for version in RELEASES:
        variant_module("settings").check_release(version)
        variant_module("settings").check_release(f"{version}+cu130")


@pytest.mark.long
def test_the_names_are_those_of_the_source(tmp_path: Path) -> None:
    if SITE:
        assert read_names(Path(SITE) / "vllm") == NAMES
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            download(f"vllm=={RELEASES[0]}", Path(folder))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"the wheel cannot be downloaded: {error.stderr.decode()[-200:]}")
        assert read_names(Path(folder) / "vllm") == NAMES
