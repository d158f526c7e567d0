"""Names of vLLM in the plug-in, found in its source: each is in the contract, for both model runners."""

from __future__ import annotations

import ast
import logging
import os
import pathlib
import threading
from collections.abc import ItemsView, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import pytest
import torch

from daemon.engines.vllm.sources import Package
from tests.daemon.engines.test_vllm_delta_contract import OVERRIDDEN
from tests.daemon.engines.vllm_delta_names import PLUGIN, REPLACED, RUNNERS, USED, recorded

NAMES = recorded()
CLASSES = {full.partition(":")[2]: facts for full, facts in NAMES["classes"].items()}
SITE = os.environ.get("ISERVE_VLLM_SITE", "")
# What a name or an attribute of that name is in the plug-in.
HELD = {
    "vllm_config": "VllmConfig",
    "model_config": "ModelConfig",
    "parallel_config": "ParallelConfig",
    "compilation_config": "CompilationConfig",
    "lora_config": "LoRAConfig",
    "lora_request": "LoRARequest",
    "mapping": "LoRAMapping",
    "_active_adapters": "LRUCache",
    "_registered_adapters": "LRUCache",
    "tensor": "GroupCoordinator",
    "pipeline": "GroupCoordinator",
}
OURS_IN_TORCH = {"iserve_adapter_linear", "iserve_delta_embedding", "iserve_delta_linear", "vllm"}  # torch.ops
CHECKPOINTS = {"config"}  # of the model: transformers', with tie_word_embeddings


@cache
def _trees() -> dict[str, ast.Module]:
    """Return the plug-in's modules that import vLLM, by file."""
    found = {file.name: ast.parse(file.read_text()) for file in sorted(PLUGIN.glob("*.py"))}
    return {name: tree for name, tree in found.items() if any(_imports_vllm(node) for node in ast.walk(tree))}


def _imports_vllm(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.partition(".")[0] == "vllm" for name in names)


def _own() -> set[str]:
    """Return all names that the plug-in defines itself: functions, classes, fields, attributes of its objects."""
    found: set[str] = set()
    for file in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return found


def _of_python_and_torch() -> set[str]:
    kinds: list[Any] = [str, dict, list, set, tuple, int, float, pathlib.Path, logging, logging.Logger]
    kinds += [FunctionType, type, ItemsView, threading, threading.local, threading.Event]
    kinds += [torch.cuda, torch.cuda.Stream, torch.cuda.Event]
    kinds += [torch, torch.Tensor, torch.nn, torch.nn.Module, torch.nn.functional]
    return {name for kind in kinds for name in dir(kind)}


def _recorded_names() -> set[str]:
    found = {name for names in NAMES["names"].values() for name in names}
    return found | {
        name for facts in NAMES["classes"].values() for name in (*facts["methods"], *facts["attributes"])
    }


def _attributes() -> Iterator[tuple[str, ast.Attribute]]:
    for file, tree in _trees().items():
        yield from ((file, node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def _path(module: str | None) -> str:
    return (module or "").removeprefix("vllm.").replace(".", "/")


def _last(node: ast.expr) -> str:
    """Return the last name of an expression: ``model_config`` of ``vllm_config.model_config``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_there_is_a_plug_in_to_look_at() -> None:
    assert {"plugin.py", "vllm_manager.py", "vllm_adapters.py", "vllm_layers.py"} <= set(_trees())
    assert all(name in CLASSES for name in HELD.values())


def test_every_attribute_is_ours_pythons_torchs_or_recorded() -> None:
    """A name of vLLM that is used anew fails here until ``USED`` has it, and so the record."""
    known = _own() | _of_python_and_torch() | _recorded_names() | OURS_IN_TORCH | CHECKPOINTS | {"__version__"}
    unknown = {f"{file}: {ast.unparse(node)}" for file, node in _attributes() if node.attr not in known}
    assert unknown == set()


def test_attributes_of_vllms_objects_are_recorded_with_their_class() -> None:
    """Names that torch has as well, ``dtype`` for one, are vLLM's where a variable says what an object is."""
    seen, own = set[str](), _own() - _recorded_names()
    for file, node in _attributes():
        if (cls := HELD.get(_last(node.value))) is not None:
            facts = CLASSES[cls]
            known = {*facts["methods"], *facts["attributes"]}
            assert node.attr in known | own, f"{file}: {ast.unparse(node)} of {cls}"
            seen |= {cls} if node.attr in known else set()
    assert seen == set(HELD.values())


def test_every_module_of_vllm_is_used_by_recorded_names() -> None:
    """``utils`` and ``mixin`` of plugin.py: what is read of a module, and what is put in its place."""
    looked, replaced = set(), set()
    for file, tree in _trees().items():
        modules = {
            alias.asname or alias.name: f"{_path(node.module)}/{alias.name}.py"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and _imports_vllm(node)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                of = modules.get(node.value.id)
                if of in NAMES["names"]:
                    assert node.attr in NAMES["names"][of], f"{file}: {ast.unparse(node)}"
                    looked.add(of)
                    replaced |= {(of, node.attr)} if isinstance(node.ctx, ast.Store) else set()
    assert looked == set(REPLACED)
    assert replaced == {(file, name) for file, names in REPLACED.items() for name in names}


def test_every_attribute_of_vllms_that_is_replaced_is_recorded() -> None:
    """Assignments to objects but our own: methods of vLLM's classes and of its objects."""
    known = _recorded_names()
    ours = {"runtime", "routes", "delta", "_adapter_manager"}
    for file, node in _attributes():
        if not isinstance(node.ctx, ast.Store) or node.attr.startswith("iserve_"):
            continue
        owner = _last(node.value)
        if owner in {"self", *ours} or isinstance(node.value, ast.Call):
            continue
        modules = {"mixin", "utils", "lora_model", "model_runner"}
        is_module = any(node.attr in names for names in REPLACED.values()) and owner in modules
        assert is_module or node.attr in known, f"{file}: {ast.unparse(node)} is replaced"


def test_what_is_called_of_a_base_class_is_recorded() -> None:
    methods = {name for facts in NAMES["classes"].values() for name in facts["methods"]}
    called = set()
    for file, node in _attributes():
        if (
            isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "super"
            and node.attr != "__init__"
        ):
            assert node.attr in methods | _own(), f"{file}: {ast.unparse(node)}"
            called.add(node.attr)
    assert {"add_adapter", "activate_adapter", "_apply_adapters", "_load_adapter", "apply"} <= called


@pytest.mark.parametrize("file", RUNNERS)
def test_a_runner_reaches_adapters_by_the_mixin_and_the_manager_alone(file: str) -> None:
    """All that it calls for adapters, in version 1 and 2, is what the plug-in's manager has or inherits."""
    mixin = CLASSES["LoRAModelRunnerMixin"]["methods"]
    manager = {*CLASSES["WorkerLoRAManager"]["methods"], *CLASSES["LRUCacheWorkerLoRAManager"]["methods"]}
    called = NAMES["runners"][file]
    own = {"self.lora_state.", "self.input_batch.", "self.model."}  # the runner's rows, and the model
    for one in called:
        if one.startswith("self.lora_manager."):
            assert one.removeprefix("self.lora_manager.") in manager, one
        elif one.startswith("self.") and not any(one.startswith(prefix) for prefix in own):
            assert one.removeprefix("self.") in mixin, one
    assert "self.load_lora_model" in called
    assert {"self.set_active_loras", "self._set_active_loras"} & set(called)
    of_mixin = NAMES["runners"]["v1/worker/lora_model_runner_mixin.py"]
    assert {one.removeprefix("self.lora_manager.") for one in of_mixin if "lora_manager." in one} <= manager


@pytest.mark.long
@pytest.mark.skipif(not SITE, reason="ISERVE_VLLM_SITE names no folder with vLLM 0.33.0")
def test_nothing_of_vllms_is_overridden_that_is_not_recorded() -> None:
    """Names of our classes' methods that vLLM's classes have, by accident too."""
    source = Package(pathlib.Path(SITE) / "vllm")
    ours = {
        node.name: {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    for name, theirs in OVERRIDDEN.items():
        for full, (methods, _) in USED.items():
            file, _, cls = full.partition(":")
            if cls in theirs:
                facts = source.class_facts(file, cls)
                assert facts is not None
                assert ours[name] & set(facts.methods) <= set(methods) | {"__init__"}, (name, cls)
