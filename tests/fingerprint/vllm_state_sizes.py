"""Read from a vLLM wheel, without installing it, what state its layers keep of a sequence.

The wheel's own functions are run: the two calculators of ``mamba_utils`` and each class's
``get_mamba_state_shape_from_config`` and ``get_mamba_state_dtype_from_config``. Nothing else of it is loaded.
"""

from __future__ import annotations

import ast
import copy
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_CALCULATORS = "vllm/model_executor/layers/mamba/mamba_utils.py"
_METHODS = ("get_mamba_state_shape_from_config", "get_mamba_state_dtype_from_config")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class VllmWheel:
    """The sources of a vLLM wheel."""

    def __init__(self, file: Path) -> None:
        self._zip = zipfile.ZipFile(file)
        self._names = set(self._zip.namelist())
        self.registry = self._registry()
        folder = "vllm/transformers_utils/configs/"
        sources = [self.source(n) for n in self._names if n.startswith(folder) and n.endswith(".py")]
        self.config_classes = {
            name for text in sources for name in re.findall(r"^class (\w+Config)\b", text, re.M)
        }

    def source(self, path: str) -> str:
        """Return a module's source."""
        return self._zip.read(path).decode()

    def _registry(self) -> dict[str, dict[str, tuple[str, str]]]:
        tables = {}
        for node in ast.parse(self.source("vllm/model_executor/models/registry.py")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and node.value.keys:
                try:
                    tables[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
                except ValueError:
                    continue
        return tables

    def state_bytes(self, architecture: str, config: Any, tp: int = 1) -> int | None:
        """Return the bytes that a recurrent layer keeps of a sequence on one of ``tp`` GPUs; None: it keeps none.

        The model runs in bfloat16 with vLLM's default options.

        Raises:
            ValueError: vLLM divides something by ``tp`` that cannot be divided.
        """
        table = self.registry["_TEXT_GENERATION_MODELS"] | self.registry["_MULTIMODAL_MODELS"]
        if architecture not in table:
            return None
        functions = self._functions(*table[architecture])
        if functions is None:
            return None
        asked = _asked_of(architecture, config, tp)
        shapes, dtypes = (functions[name](None, asked) for name in _METHODS)
        return sum(math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))

    def linear_attention_bytes(self, heads: int, head_dim: int, tp: int) -> int:
        """Return the bytes that lightning attention keeps of a sequence on one of ``tp`` GPUs, in bfloat16."""
        space = self._calculators()
        shapes = space["MambaStateShapeCalculator"].linear_attention_state_shape(heads, tp, head_dim)
        dtypes = space["MambaStateDtypeCalculator"].linear_attention_state_dtype(torch.bfloat16, "auto")
        return sum(math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))

    def _functions(self, module: str, name: str) -> dict[str, Any] | None:
        for path in self._paths(module):
            tree = ast.parse(self.source(path))
            classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
            if name in classes:
                found = self._methods(classes, name)
                helpers = [
                    node for node in tree.body if isinstance(node, ast.FunctionDef) and "state" in node.name
                ]
                return None if len(found) < len(_METHODS) else self._run(found, helpers)
        return None

    def _paths(self, module: str) -> Iterator[str]:
        if not module.startswith("vllm."):
            yield f"vllm/model_executor/models/{module}.py"
        folder = module.replace(".", "/")
        yield from (p for p in (f"{folder}/{x}/model.py" for x in ("nvidia", "common")) if p in self._names)

    def _methods(self, classes: dict[str, ast.ClassDef], name: str) -> dict[str, ast.FunctionDef]:
        """Return the two methods of a class or of its bases in the same module."""
        node = classes.get(name)
        if node is None:
            return {}
        found: dict[str, ast.FunctionDef] = {}
        for base in reversed(node.bases):
            found |= self._methods(classes, ast.unparse(base))
        own = [f for f in node.body if isinstance(f, ast.FunctionDef)]
        return found | {f.name: f for f in own if f.name.startswith("get_") and "mamba_state" in f.name}

    def _run(self, methods: dict[str, ast.FunctionDef], helpers: list[ast.FunctionDef]) -> dict[str, Any]:
        space = self._calculators()
        owner = SimpleNamespace()
        future = ast.parse("from __future__ import annotations").body
        for function in (*helpers, *methods.values()):
            function.decorator_list = []
            exec(compile(ast.Module([*future, function], []), function.name, "exec"), space)
        for name in methods:
            setattr(owner, name, lambda *a, f=space[name]: f(owner, *a))
        return {name: (lambda _, asked, n=name: getattr(owner, n)(asked)) for name in _METHODS}

    def _calculators(self) -> dict[str, Any]:
        tree = ast.parse(self.source(_CALCULATORS))
        names = ("MambaStateDtypeCalculator", "MambaStateShapeCalculator")
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names]
        future = ast.parse("from __future__ import annotations").body
        space: dict[str, Any] = {
            "torch": torch,
            "divide": _divided,
            "is_conv_state_dim_first": lambda: False,
            "get_kv_cache_torch_dtype": lambda cache, model: model if cache == "auto" else _DTYPES[cache],
            "STR_DTYPE_TO_TORCH_DTYPE": _DTYPES,
        }
        exec(compile(ast.Module([*future, *classes], []), _CALCULATORS, "exec"), space)
        return space


def _divided(whole: int, parts: int) -> int:
    if whole % parts:
        raise ValueError(f"{whole} is not divisible by {parts}")
    return whole // parts


def _asked_of(architecture: str, config: Any, tp: int) -> SimpleNamespace:
    """Return the part of vLLM's config that the methods ask, with its defaults on ``tp`` GPUs.

    ``mamba_ssm_cache_dtype`` is resolved as vLLM's ``models/config.py`` does for Nemotron-H and Qwen 3.5.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    recurrent = "auto"
    if architecture.startswith("NemotronH"):
        recurrent = getattr(config, "mamba_ssm_cache_dtype", "float32")
    elif architecture.startswith(("Qwen3_5", "Qwen4Exp")):
        recurrent = getattr(text, "mamba_ssm_dtype", None) or "auto"
    for name, value in _other_names(architecture, text).items():
        setattr(text, name, value)
    model = SimpleNamespace(dtype=torch.bfloat16, hf_config=config, hf_text_config=text)
    cache = SimpleNamespace(mamba_cache_dtype="auto", mamba_ssm_cache_dtype=recurrent, use_replayssm=False)
    return SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        speculative_config=None,
        num_speculative_tokens=0,
    )


def _other_names(architecture: str, text: Any) -> dict[str, Any]:
    """Return fields of a published config.json that transformers' class has under other names."""
    if architecture == "KimiLinearForCausalLM":
        sizes = {"num_heads": text.linear_num_heads, "head_dim": text.linear_head_dim}
        return {"linear_attn_config": sizes | {"short_conv_kernel_size": text.linear_conv_kernel_dim}}
    if architecture == "BailingMoeV3ForCausalLM":
        return {"head_dim": text.linear_head_dim}
    return {"conv_dim": text.hidden_size} if architecture == "Lfm2ForCausalLM" else {}
