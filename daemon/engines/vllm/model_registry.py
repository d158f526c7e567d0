"""Architectures that a vLLM release lists, read in its own registry's source: nothing of it is imported."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from daemon.sources.class_sources import ClassSources
from daemon.sources.python_sources import parse_python
from fingerprint.errors import EngineError

__all__ = ["REGISTRY_FILE", "Registered", "Registry", "read_registry", "registry_digest"]

REGISTRY_FILE = "model_executor/models/registry.py"
_MAX_BYTES = 8 << 20
_ALL = "_VLLM_MODELS"
_TEXT, _MULTIMODAL = "_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS"
_BACKED, _BACKEND = "_TRANSFORMERS_SUPPORTED_MODELS", "_TRANSFORMERS_BACKEND_MODELS"
_REMOVED, _PLUGINS = "_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """Entry of the registry that generates text. None: the sources do not tell."""

    multimodal: bool = False
    by_transformers: bool = False  # no class of vLLM's own: transformers' class, through the Transformers backend
    lora: bool | None = None
    pp: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Registry:
    """Architectures of one release, by what it does with them."""

    version: str
    digest: str  # of the registry's file
    text: dict[str, Registered]  # that generate text, multimodal ones included
    others: tuple[str, ...]  # listed to embed, to classify, to draft, or as the Transformers backend itself
    removed: dict[str, str]  # the last release that had it
    plugins: dict[str, str]  # where the plug-in is that has it now
    backend: Registered | None  # what the Transformers backend can do; None: the release has none


def registry_digest(package: Path) -> str:
    """Return the digest of the registry of the ``vllm`` package in folder ``package``.

    Raises:
        EngineError: it has none that can be read.
    """
    return hashlib.sha256(_bytes(package / REGISTRY_FILE)).hexdigest()


def read_registry(package: Path, version: str) -> Registry:
    """Return what the ``vllm`` package in folder ``package`` lists; a few seconds, for the classes' interfaces.

    Raises:
        EngineError: its registry is not there, or not made of the tables that this reads.
    """
    source = _bytes(package / REGISTRY_FILE)
    try:
        tables = dict(_tables(parse_python(source)))
        entries = {table: _entries(tables[table]) for table in (_TEXT, _MULTIMODAL, _BACKED, _BACKEND)}
        removed, plugins = _entries(tables[_REMOVED]), _entries(tables[_PLUGINS])
        joined = [value.id for key, value in _items(tables[_ALL]) if key is None and isinstance(value, ast.Name)]
        listed = {name for table in joined for name in _entries(tables[table])}
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise EngineError(
            f"{package}/{REGISTRY_FILE} is not the registry that iServe reads: {error!r}"[:300]
        ) from error
    classes = _Interfaces(package)
    text = {
        name: classes.registered(entry, multimodal=table == _MULTIMODAL)
        for table in (_BACKED, _MULTIMODAL, _TEXT)
        for name, entry in entries[table].items()
    }
    backend = entries[_BACKEND].get("TransformersForCausalLM")
    return Registry(
        version=version,
        digest=hashlib.sha256(source).hexdigest(),
        text=dict(sorted(text.items())),
        others=tuple(sorted(listed - text.keys())),
        removed={name: str(release) for name, release in sorted(removed.items())},
        plugins={name: str(where) for name, where in sorted(plugins.items())},
        backend=None if backend is None else classes.registered(backend, multimodal=False),
    )


def _bytes(file: Path) -> bytes:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise EngineError(f"{file} has more than {_MAX_BYTES} bytes, which no registry of vLLM has")
        return file.read_bytes()
    except OSError as error:
        raise EngineError(f"{file} cannot be read: {error.strerror or error}") from error


def _tables(tree: ast.Module) -> Iterator[tuple[str, ast.Dict]]:
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as table):
                yield name, table
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as table):
                yield name, table


def _items(table: ast.Dict) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    return zip(table.keys, table.values, strict=True)


def _entries(table: ast.Dict) -> dict[str, object]:
    """Return the rows that are written out; those taken from another table are read there.

    Raises:
        ValueError: they are not by name.
    """
    rows = [(ast.literal_eval(key), ast.literal_eval(value)) for key, value in _items(table) if key is not None]
    if not all(isinstance(name, str) for name, _ in rows):
        raise ValueError("an architecture that is no text")
    return dict(rows)


class _Interfaces:
    """Interfaces that the registered classes derive from."""

    def __init__(self, package: Path) -> None:
        self._sources = ClassSources(package, "vllm")

    def registered(self, entry: object, *, multimodal: bool) -> Registered:
        """Return what the class of ``entry``, module and name, says of itself."""
        match entry:
            case (str(module), str(name)):
                pass
            case _:
                return Registered(multimodal=multimodal)
        by_transformers = module == "transformers"
        whole = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        lineage = self._sources.lineage(whole, name)

        def has(interface: str, flag: str) -> bool | None:
            if interface in lineage.names or flag in lineage.assigned:
                return True
            return False if lineage.is_whole else None

        return Registered(
            multimodal=multimodal or (by_transformers and "MultiModal" in name),
            by_transformers=by_transformers,
            lora=has("SupportsLoRA", "supports_lora"),
            pp=has("SupportsPP", "supports_pp"),
        )
