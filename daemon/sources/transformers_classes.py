"""Text-generating model classes of a transformers package, read in its sources: nothing of it is imported.

Its modeling files are generated and formatted alike, so that a pattern finds classes and flags a hundred times
faster than a parser would; a test compares each answer with the classes themselves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import zip_longest
from pathlib import Path

from daemon.sources.python_sources import parse_python
from fingerprint.codec import from_json
from fingerprint.errors import EngineError

__all__ = ["MAPPINGS_FILE", "ModelClass", "Transformers", "read_transformers", "recorded_transformers"]

MAPPINGS_FILE = "models/auto/modeling_auto.py"
_TEXT = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)
_MULTIMODAL = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
_RECORDED = "transformers.json"
_MAX_FILE_BYTES = 8 << 20
_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)
_FLAG = re.compile(r"^    (_supports_attention_backend|_is_stateful) = True$", re.MULTILINE)
# A plan with an entry of a layer ("layers.*.mlp.up_proj"); some hold the embedding alone, which splits no layer.
_PLAN = re.compile(r"^    base_model_tp_plan = \{.*(?:\n {8}.*)*?\.\*\.", re.MULTILINE)
# ``PreTrainedModel._can_set_attn_implementation`` asks just this of a class's module.
_OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)
_INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelClass:
    """Model class with the flags that engines ask it for."""

    families: tuple[str, ...]  # the config's model_type, of all that it is the class of
    multimodal: bool = False
    takes_attention: bool = False  # declares that it works with the attention function of another
    sets_attention: bool = False  # its attention, as far as transformers can tell, goes through the interface
    stateful: bool = False  # keeps a state of each sequence, not K and V of each token
    tp_plan: bool = False  # its config says how the tensors of its layers are split


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformers:
    """A release's classes by name."""

    version: str
    classes: dict[str, ModelClass]


@cache
def recorded_transformers() -> Transformers:
    """Return the newest release that the newest vLLM takes, recorded from its package, where none is installed."""
    data = resources.files("daemon.sources").joinpath(_RECORDED).read_bytes()
    return from_json(data, Transformers, what=_RECORDED)


@dataclass(frozen=True, slots=True)
class _Defined:
    """Class as its file defines it."""

    bases: tuple[str, ...]
    flags: frozenset[str]
    file: Path


def read_transformers(package: Path, version: str) -> Transformers:
    """Return the classes of the ``transformers`` package in folder ``package``.

    Raises:
        EngineError: its tables of classes cannot be read.
    """
    try:
        tree = parse_python(_text(package / MAPPINGS_FILE))
    except (OSError, SyntaxError, ValueError) as error:
        raise EngineError(
            f"{package}/{MAPPINGS_FILE} cannot be read ({error}); install transformers there anew"
        ) from error
    text, multimodal = _mapped(tree, _TEXT), _mapped(tree, _MULTIMODAL)
    if not text:
        raise EngineError(f"{package}/{MAPPINGS_FILE} has no table of causal language models that can be read")
    defined = dict(_definitions(package))
    classes = {
        name: _described(name, (*text.get(name, ()), *multimodal.get(name, ())), name in multimodal, defined)
        for name in sorted({*text, *multimodal})
        if name in defined
    }
    return Transformers(version=version, classes=classes)


def _mapped(tree: ast.Module, tables: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the families by class name; a family may have several classes."""
    found: dict[str, list[str]] = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=table)], value=ast.Call(args=[ast.List(elts=rows)])) if (
                table in tables
            ):
                for row in rows:
                    match row:
                        case ast.Tuple(elts=[ast.Constant(value=str(family)), names]):
                            for node in ast.walk(names):
                                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                                    found.setdefault(node.value, []).append(family)
    return found


def _definitions(package: Path) -> Iterator[tuple[str, _Defined]]:
    for file in sorted(package.glob("models/*/modeling_*.py")):
        try:
            text = _text(file)
        except (OSError, ValueError):
            continue
        heads = list(_CLASS.finditer(text))
        for head, after in zip_longest(heads, heads[1:]):
            end = after.start() if after is not None else len(text)
            flags = frozenset(_FLAG.findall(text, head.end(), end))
            yield head[1], _Defined(tuple(re.findall(r"\w+", head[2] or "")), flags, file)


def _described(name: str, families: tuple[str, ...], multimodal: bool, defined: dict[str, _Defined]) -> ModelClass:
    flags, waiting, met = set[str](), [name], set[str]()
    while waiting:
        one = waiting.pop()
        if one in defined and one not in met:
            met.add(one)
            flags |= defined[one].flags
            waiting += defined[one].bases
    text = _text(defined[name].file)
    return ModelClass(
        families=tuple(dict.fromkeys(families)),
        multimodal=multimodal,
        takes_attention="_supports_attention_backend" in flags,
        sets_attention=_INTERFACE in text or not _OWN_ATTENTION.search(text),
        stateful="_is_stateful" in flags,
        tp_plan=_config_has_plan(defined[name].file),
    )


def _config_has_plan(modeling: Path) -> bool:
    config = modeling.with_name(modeling.name.replace("modeling_", "configuration_"))
    try:
        return _PLAN.search(_text(config)) is not None
    except (OSError, ValueError):
        return False


def _text(file: Path) -> str:
    """Return a file's text. Raises OSError, ValueError: no readable text of a bearable size."""
    if file.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"{file.name} has more than {_MAX_FILE_BYTES} bytes")
    return file.read_text(encoding="utf-8")
