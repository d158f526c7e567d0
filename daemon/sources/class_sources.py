"""Classes of a Python package that is not imported: their bases, followed through the package's own modules."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from daemon.sources.python_sources import parse_python

__all__ = ["ClassSources", "Lineage"]

_MAX_FILE_BYTES = 8 << 20  # the largest of either package is a fortieth of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Class with all the classes that it derives from."""

    names: frozenset[str]  # of classes, those of other packages included
    assigned: frozenset[str]  # names that one of their bodies assigns a value that is true
    is_whole: bool  # False: a base was not found, so that what is missing here may still be there


@dataclass(slots=True)
class _Module:
    """Definitions of a module's own statements, those within ``if`` and ``try`` included."""

    package: str
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imported: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # module and name there, by name here
    aliases: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Gathered:
    """Lineage that is being gathered."""

    names: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    is_whole: bool = True
    met: set[tuple[str, str]] = field(default_factory=set)


class ClassSources:
    """The classes of ``package``, which lies in ``folder``. Each file is parsed once."""

    def __init__(self, folder: Path, package: str) -> None:
        self._folder, self._package = folder, package
        self._modules: dict[str, _Module | None] = {}

    def lineage(self, module: str, name: str) -> Lineage:
        """Return class ``name`` of the dotted ``module`` with its bases; not whole where it is not found."""
        found = _Gathered()
        self._follow(module, name, found)
        return Lineage(
            names=frozenset(found.names),
            assigned=frozenset(found.assigned),
            is_whole=found.is_whole,
        )

    def _follow(self, module: str, name: str, found: _Gathered) -> None:
        """Add the class to ``found``, and what it derives from. A name bound several ways is followed each way."""
        if (module, name) in found.met:
            return
        found.met.add((module, name))
        if module.split(".")[0] != self._package:
            found.names.add(name)
            return
        there = self._module(module)
        if there is None:
            found.is_whole = False
            return
        if (definition := there.classes.get(name)) is not None:
            self._take(module, definition, found)
        elsewhere = [*there.imported.get(name, ()), *((module, alias) for alias in there.aliases.get(name, ()))]
        for origin, original in elsewhere:
            self._follow(origin, original, found)
        if definition is None and not elsewhere:
            found.is_whole = False

    def _take(self, module: str, definition: ast.ClassDef, found: _Gathered) -> None:
        found.names.add(definition.name)
        for statement in definition.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and _is_true(statement.value):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                found.assigned |= {target.id for target in targets if isinstance(target, ast.Name)}
        for base in definition.bases:
            match base.value if isinstance(base, ast.Subscript) else base:
                case ast.Name(id=name):
                    self._follow(module, name, found)
                case ast.Attribute(value=ast.Name(id=owner), attr=name):
                    self._follow_attribute(module, owner, name, found)
                case _:
                    found.is_whole = False

    def _follow_attribute(self, module: str, owner: str, name: str, found: _Gathered) -> None:
        """Follow ``owner.name``, where ``owner`` is an imported module."""
        there = self._module(module)
        origins = there.imported.get(owner, []) if there is not None else []
        for parent, child in origins:
            self._follow(f"{parent}.{child}" if parent and child else parent or child, name, found)
        if not origins:
            found.is_whole = False

    def _module(self, module: str) -> _Module | None:
        if module not in self._modules:
            self._modules[module] = self._read(module)
        return self._modules[module]

    def _read(self, module: str) -> _Module | None:
        where = self._folder.joinpath(*module.split(".")[1:])
        for file, package in (
            (where.with_suffix(".py"), module.rpartition(".")[0]),
            (where / "__init__.py", module),
        ):
            if file.is_file():
                try:
                    if file.stat().st_size > _MAX_FILE_BYTES:
                        return None
                    tree = parse_python(file.read_bytes())
                except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                    return None
                read = _Module(package)
                _gather(tree.body, read)
                return read
        return None


def _gather(statements: Iterable[ast.stmt], into: _Module) -> None:
    for statement in statements:
        match statement:
            case ast.ClassDef():
                into.classes[statement.name] = statement
            case ast.ImportFrom():
                origin = _absolute(statement, into.package)
                for name in statement.names:
                    into.imported.setdefault(name.asname or name.name, []).append((origin, name.name))
            case ast.Import():
                for name in statement.names:
                    parent, _, child = name.name.rpartition(".") if name.asname else ("", "", name.name)
                    into.imported.setdefault(name.asname or name.name, []).append((parent, child))
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Name(id=original)):
                into.aliases.setdefault(target, []).append(original)
            case ast.If() | ast.Try() | ast.With():
                for body in _bodies(statement):
                    _gather(body, into)


def _bodies(statement: ast.If | ast.Try | ast.With) -> Iterator[list[ast.stmt]]:
    yield statement.body
    if isinstance(statement, (ast.If, ast.Try)):
        yield statement.orelse
    if isinstance(statement, ast.Try):
        yield statement.finalbody
        for handler in statement.handlers:
            yield handler.body


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    """Return the dotted name of the module that is imported from."""
    if not statement.level:
        return statement.module or ""
    parents = package.split(".")
    kept = parents[: len(parents) - statement.level + 1]
    return ".".join([*kept, *([statement.module] if statement.module else [])])


def _is_true(value: ast.expr | None) -> bool:
    """Return whether a class attribute is true as far as its text says: a constant that is, or a filled table."""
    if isinstance(value, ast.Constant):
        return bool(value.value)
    return isinstance(value, ast.Dict) and bool(value.keys)
