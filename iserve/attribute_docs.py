"""Texts below the fields of a class: descriptions of REST fields and help of options alike."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise

__all__ = ["attribute_docstrings"]


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return the text below each field of ``kind`` and of its bases, as the source has it.

    A dataclass field's ``description`` in its metadata is its text where there is none below it.
    """
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if "__annotations__" in vars(base) and base.__module__ != "pydantic.main":
            texts |= _docstrings_of(base.__module__).get(base.__name__, {})
    made = {one.name: one.metadata.get("description", "") for one in fields(kind)} if is_dataclass(kind) else {}
    return {name: text for name, text in made.items() if text} | texts


@cache
def _docstrings_of(module: str) -> dict[str, dict[str, str]]:
    """Return the text below each field of each class of a module; the source is parsed once."""
    found: dict[str, dict[str, str]] = {}
    for definition in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(definition, ast.ClassDef):
            texts = found[definition.name] = {}
            for field, below in pairwise(definition.body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str() as text)
                    ):
                        texts[name] = inspect.cleandoc(text)
    return found
