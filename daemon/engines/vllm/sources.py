"""Facts of Python files, read with ``ast`` alone: classes, strings, options. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from daemon.sources.python_sources import parse_python

__all__ = [
    "ClassFacts",
    "Package",
    "keys_of_tables",
    "option_names",
    "returned",
    "strings_named",
    "strings_starting",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFacts:
    """Class that a release defines."""

    fields: tuple[str, ...] = ()  # annotated in its body
    attributes: tuple[str, ...] = ()  # that its methods assign to self
    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # parameters; with *, ** as written


class Package:
    """The Python files of a package, each parsed once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}
        self.says = cache(self._says)

    def has(self, file: str) -> bool:
        return (self._folder / file).is_file()

    def tree(self, file: str) -> ast.Module | None:
        if file not in self._trees:
            try:
                self._trees[file] = parse_python((self._folder / file).read_bytes())
            except (OSError, SyntaxError, ValueError):
                self._trees[file] = None
        return self._trees[file]

    def _says(self, file: str, text: str) -> bool:
        """Return whether a string of the file holds the text, or a class, whose name a traceback prints, is it."""
        tree = self.tree(file)
        classes = (node.name for node in _nodes(tree) if isinstance(node, ast.ClassDef))
        return any(text in said for said in _strings(tree)) or text in classes

    def defines(self, file: str, function: str) -> bool:
        tree = self.tree(file)
        return tree is not None and any(isinstance(n, ast.FunctionDef) and n.name == function for n in tree.body)

    def class_facts(self, file: str, name: str) -> ClassFacts | None:
        tree = self.tree(file)
        found = next((n for n in _nodes(tree) if isinstance(n, ast.ClassDef) and n.name == name), None)
        if found is None:
            return None
        fields = (
            n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        )
        return ClassFacts(
            fields=tuple(fields),
            attributes=tuple(sorted(_assigned(found))),
            methods={n.name: _parameters(n) for n in found.body if isinstance(n, ast.FunctionDef)},
        )


def _nodes(*trees: ast.AST | None) -> Iterator[ast.AST]:
    for tree in trees:
        if tree is not None:
            yield from ast.walk(tree)


def _strings(*trees: ast.AST | None) -> Iterator[str]:
    """Yield string constants; adjacent ones are one already, and so are the pieces of formatted ones."""
    for node in _nodes(*trees):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def strings_starting(tree: ast.AST | None, prefix: str) -> set[str]:
    return {text for text in _strings(tree) if text.startswith(prefix) and " " not in text}


def strings_named(tree: ast.AST | None, name: str) -> set[str]:
    """Return the strings in the assignment to ``name`` or the function of that name."""
    named = (
        node
        for node in _nodes(tree)
        if (isinstance(node, ast.FunctionDef) and node.name == name)
        or (isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets))
    )
    return set(_strings(*named))


def option_names(*trees: ast.AST | None) -> set[str]:
    """Return options named as such, and those that the front end makes of its classes' fields."""
    options = {text for text in _strings(*trees) if text.startswith("--") and text != "--" and " " not in text}
    for node in _nodes(*trees):
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            names = (
                n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            )
            options |= {f"--{name.replace('_', '-')}" for name in names}
    return options


def keys_of_tables(tree: ast.AST | None) -> set[str]:
    """Return the keys of the registry's tables."""
    keys = (key for node in _nodes(tree) if isinstance(node, ast.Dict) for key in node.keys)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def returned(tree: ast.AST | None, function: str) -> set[str]:
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return {
                ast.unparse(n.value) for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None
            }
    return set()


def _assigned(found: ast.ClassDef) -> set[str]:
    """Return the attributes of ``self`` that the class's methods assign."""
    targets: list[ast.expr] = []
    for node in ast.walk(found):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets.append(node.target)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            targets += [item.optional_vars for item in node.items if item.optional_vars is not None]
    return set(_self_attributes(targets))


def _self_attributes(targets: Iterable[ast.expr]) -> Iterator[str]:
    for target in targets:
        if isinstance(target, ast.Tuple):
            yield from _self_attributes(target.elts)
        elif (
            isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
        ):
            yield target.attr


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    """Return the parameters after ``self``; those with a default end in ``=``."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    with_default = len(plain) - len(arguments.defaults)
    named = [f"{a.arg}=" if i >= with_default else a.arg for i, a in enumerate(plain)]
    named += [
        a.arg if default is None else f"{a.arg}="
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    named += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    named += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return tuple(named[1:] if named and named[0] in ("self", "cls") else named)
