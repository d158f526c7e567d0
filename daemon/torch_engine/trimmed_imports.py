"""The imports of torch and transformers, which are most of what a worker's start takes, without what none needs.

2.8 seconds of a core became 1.5 (torch 2.13, transformers 5.24).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from daemon.sources.source_cache import kept_reading

__all__ = ["trimmed_imports"]

_COMPILER = "torch._dynamo"
_TRACING = f"{_COMPILER}._trace_wrapped_higher_order_op"
_LOSSES = "transformers.loss.loss_utils"


@contextmanager
def trimmed_imports() -> Iterator[None]:
    """Import inside the block for good: the collector looks through no imported object, now or later."""
    gc.disable()
    try:
        # No model here is compiled: of the compiler only the marks are needed that it reads on functions.
        if _defer(_COMPILER, allow_in_graph=_same, assume_constant_result=_same, disable=_not_compiled):
            _defer(_TRACING, TransformGetItemToIndex=_index_mode)
            sys.meta_path.insert(0, _CompilerParts())
        _import_transformers()
        # A worker trains nothing; the losses of object detection load scipy. ``model(labels=...)`` fails.
        _defer(_LOSSES, LOSS_MAPPING={})
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Deferred(ModuleType):
    """Module that is loaded when it is asked for a name that it was not given."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's own questions
            raise AttributeError(name)
        return getattr(_load(self), name)


def _defer(name: str, **given: object) -> bool:
    """Return whether module ``name`` will be loaded later; ``given`` is what it answers until then.

    False: it is loaded already, or is none of this release's.
    """
    with suppress(ModuleNotFoundError):
        if name not in sys.modules and (spec := find_spec(name)) is not None:
            module = module_from_spec(spec)
            module.__class__ = _Deferred
            vars(module).update(given)
            sys.modules[name] = module
            return True
    return False


def _load(module: ModuleType) -> ModuleType:
    if isinstance(module, _Deferred):
        module.__class__ = ModuleType
        assert module.__spec__ is not None
        assert module.__spec__.loader is not None
        module.__spec__.loader.exec_module(module)
    return module


class _CompilerParts(MetaPathFinder, Loader):
    """Finder that loads the compiler as a whole: its parts import each other, which works in one order."""

    def find_spec(self, name: str, _path: object, _target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{_COMPILER}."):
            return None
        sys.meta_path.remove(self)
        _load(sys.modules[_COMPILER])
        return spec_from_loader(name, self) if name in sys.modules else find_spec(name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the whole has executed its parts."""


def _same(function: Any) -> Any:
    return function


def _not_compiled(function: Any = None, *_: object, **__: object) -> Any:
    """The compiler's ``disable``, as a decorator with or without arguments."""
    return _same if function is None else function


def _index_mode() -> Any:
    """The mode in which transformers makes masks for another attention than the engine's."""
    return _load(sys.modules[_TRACING]).TransformGetItemToIndex()


@dataclass(frozen=True, slots=True)
class ModelExports:
    """Names that transformers' folders of models export, by module, by the backends that they need."""

    by_backends: tuple[tuple[tuple[str, ...], dict[str, tuple[str, ...]]], ...]


def _import_transformers() -> None:
    """Import transformers with the exported names that are kept: it would read them in its 1,600 files, twice.

    To it torch has no ``torch.distributed``: the engine splits models itself; what transformers would split them
    with takes half a second. Of a release that is made otherwise nothing is imported here.
    """
    spec = find_spec("transformers")
    if "transformers" in sys.modules or spec is None or spec.loader is None or spec.origin is None:
        return
    package = module_from_spec(spec)
    vars(package)["__version__"] = metadata.version("transformers")  # its parts ask for it before it says so
    sys.modules["transformers"] = package
    try:
        utilities = import_module("transformers.utils.import_utils")
        exports = _kept_exports(utilities.define_import_structure, Path(spec.origin).parent / "models")
        utilities.define_import_structure = exports
        spec.loader.exec_module(package)
        for module in (utilities, import_module("transformers.utils")):
            vars(module)["is_torch_distributed_available"] = lambda: False
    except (AttributeError, ImportError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]


def _kept_exports(read: Callable[..., Any], models: Path) -> Callable[..., Any]:
    """Return ``read``, transformers' own function, that reads the folder ``models`` once for all workers."""
    reader = partial(_read_exports, read)

    def exports(path: str | Path, prefix: str | None = None) -> Any:
        if Path(path) not in (models, models / "__init__.py"):
            return read(path, prefix)
        release = metadata.version("transformers")
        kept = kept_reading(reader, ModelExports, models, release, file="__init__.py")
        start = "" if prefix is None else f"{prefix}."
        return {
            frozenset(backends): {start + module: set(names) for module, names in modules.items()}
            for backends, modules in kept.by_backends
        }

    return exports


def _read_exports(read: Callable[..., Any], models: Path, _version: str) -> ModelExports:
    return ModelExports(
        tuple(
            (tuple(sorted(backends)), {module: tuple(sorted(names)) for module, names in modules.items()})
            for backends, modules in read(models).items()
        )
    )
