"""PEFT's rules by which names of modules are matched: ``rank_pattern``, ``alpha_pattern`` and ``target_modules``.

The keys of a pattern are regular expressions from outside. Only expressions that cannot nest repetitions are
matched, within a bound on the work: the standard library's matcher has none of its own.
Source of the rules: peft 0.21.2, ``utils/other.py`` (get_pattern_key), ``tuners/tuners_utils.py``
(check_target_module_exists).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fingerprint.config_json import show
from fingerprint.errors import UnsupportedAdapterError

__all__ = ["ModulePatterns", "Targets", "first_keys"]

_MAX_PATTERN_CHARS = 500
_MAX_REPETITIONS = 3  # of one expression
_MAX_STEPS = 1_000_000_000  # of all matches, at most; seconds
_ONE = r"(?:[\w/-]|\\[.\-/]|\\d|\.|\[\^?[\w.-]+\])"  # a character, or a class of characters
_REPEATED = re.compile(rf"{_ONE}[*+?]\??|\)\?")
_PLAIN = re.compile(rf"(?:{_ONE}(?:[*+?]\??)?|\^|\$|\||\((?:\?:)?|\)\??)+")
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")  # the first number behind two names, which is the layer's


@dataclass(frozen=True, slots=True)
class Targets:
    """Modules that a configuration says were adapted, as far as it names them in lists."""

    modules: frozenset[str] | None  # None: an expression, or none given; the tensors alone say
    excluded: frozenset[str]
    layers: frozenset[int]  # empty: all
    layers_lists: tuple[str, ...]  # names of the lists that are counted; empty: any

    def contain(self, name: str) -> bool:
        """Return whether PEFT would adapt the module ``name``."""
        if _is_named(name, self.excluded):
            return False
        if self.modules is None:
            return True
        if not _is_named(name, self.modules):
            return False
        return not self.layers or self._layer(name) in self.layers

    def _layer(self, name: str) -> int | None:
        patterns = (re.compile(rf"(?:^|.*?\.){re.escape(each)}\.(\d+)\.") for each in self.layers_lists)
        for pattern in patterns if self.layers_lists else (_LAYER,):
            found = pattern.match(name)
            if found is not None:
                return int(found[1][:9])
        return None


def _is_named(name: str, names: frozenset[str]) -> bool:
    """Return whether ``name``, or its end behind a dot, is one of ``names``."""
    parts = name.split(".")
    return any(".".join(parts[start:]) in names for start in range(len(parts)))


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Values of the modules whose names match an expression, in the order of ``adapter_config.json``."""

    field: str  # its name, for messages
    values: tuple[tuple[str, float], ...]

    def of_modules(self, names: Sequence[str], default: float) -> list[float]:
        """Return the value of each module: of the first expression that matches, else ``default``.

        Raises:
            UnsupportedAdapterError: an expression that is not matched, or too much work.
        """
        by_key = dict(self.values)
        keys = first_keys([key for key, _ in self.values], names, self.field)
        return [default if key is None else by_key[key] for key in keys]


def first_keys(expressions: Sequence[str], names: Sequence[str], field: str) -> Iterator[str | None]:
    """Return for each of ``names`` the first of ``expressions`` that it, or its end behind a dot, matches.

    Raises:
        UnsupportedAdapterError: as :meth:`ModulePatterns.of_modules`.
    """
    if _num_steps(expressions, names) > _MAX_STEPS:
        raise UnsupportedAdapterError(
            f"{field} has {len(expressions)} expressions for {len(names)} modules, which take too long to match; "
            "write plain names of modules in their place"
        )
    compiled = [(each, _compiled(each, field)) for each in expressions]
    return (next((each for each, pattern in compiled if pattern.match(name)), None) for name in names)


def _num_steps(expressions: Iterable[str], names: Sequence[str]) -> int:
    """Return a bound on the steps of a matcher that tries each repetition's lengths and each alternative."""
    weights: Counter[int] = Counter()
    for each in expressions:
        branches = (1 + each.count("|")) ** max(1, each.count("("))
        weights[min(_num_repetitions(each), _MAX_REPETITIONS)] += branches
    return sum(weight * sum(len(name) ** (1 + power) for name in names) for power, weight in weights.items())


def _num_repetitions(expression: str) -> int:
    return len(_REPEATED.findall(expression))


def _compiled(expression: str, field: str) -> re.Pattern[str]:
    readable = len(expression) <= _MAX_PATTERN_CHARS and _PLAIN.fullmatch(expression) is not None
    if readable and _num_repetitions(expression) <= _MAX_REPETITIONS:
        try:
            return re.compile(rf"(.*\.)?({expression})$")
        except re.error:
            pass
    raise UnsupportedAdapterError(
        f"the expression {show(expression)} of {field} is not one that is matched; write plain names of modules, "
        f"with at most {_MAX_REPETITIONS} repetitions such as .* and none of a group"
    )
