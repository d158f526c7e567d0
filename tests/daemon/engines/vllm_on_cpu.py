"""vLLM's own Python on a CPU; what it imports beyond torch is found in a site folder, or replaced.

Compiled parts (``vllm._C``, msgspec, zmq and so on) are not there. Modules that only pass them on are given empty
stand-ins, so that its LoRA code, layers and managers run as they are published.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path

__all__ = ["import_vllm"]

# Imported somewhere on the way to LoRA, and not used by it.
_STOOD_IN = (
    *("PIL", "blake3", "cbor2", "cloudpickle", "compressed_tensors", "cpuinfo", "cv2", "depyf", "diskcache"),
    *("gguf", "ijson", "lark", "llguidance", "mcp", "mistral_common", "model_hosting_container_standards"),
    *("msgspec", "numba", "openai", "openai_harmony", "outlines_core", "partial_json_parser", "pybase64"),
    *("prometheus_fastapi_instrumentator", "ray", "sentencepiece", "setproctitle", "tiktoken", "watchfiles"),
    *(
        "xgrammar",
        "zmq",
        "anthropic",
        "av",
        "librosa",
        "soundfile",
        "soxr",
        "scipy",
        "einops",
        "lm_format_enforcer",
    ),
)
_THEIRS_STOOD_IN = ("vllm.parser",)  # which needs the values of a stand-in


class _AnyMember(type):
    """Class of stand-ins for classes: has each member, named as it is asked for."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    """Module that has each class and function."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _any_class(name) if name[:1].isupper() else _any_function
        setattr(self, name, made)
        return made


def _any_function(*args: object, **kwargs: object) -> object:
    """Stand in for a decorator, or for what makes one."""
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _any_function


def _any_class(name: str) -> type:
    from pydantic_core import core_schema

    members = {
        "__init__": lambda self, *args, **kwargs: None,
        "__class_getitem__": classmethod(lambda cls, item: cls),
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
        "__get_pydantic_core_schema__": classmethod(lambda cls, source, handler: core_schema.any_schema()),
    }
    return _AnyMember(name, (), members)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        is_theirs = any(name == one or name.startswith(f"{one}.") for one in _THEIRS_STOOD_IN)
        if is_theirs or name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: members are made as they are asked for."""


def import_vllm(site: Path) -> None:
    """Make ``vllm`` importable from ``site``, on its CPU platform."""
    missing = frozenset(name for name in _STOOD_IN if importlib.util.find_spec(name) is None)
    sys.path.append(str(site))
    sys.meta_path.insert(0, _Finder(missing))
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
