"""Python code that a checkpoint brings (``auto_map``): which classes and files its JSON names. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fingerprint.config_json import read_config, show
from fingerprint.errors import CheckpointError

__all__ = ["CODE_PATTERN", "missing_code", "own_code_files", "own_code_kinds"]

CODE_PATTERN = "*.py"
_NAMING_FILES = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_MAX_KINDS = 64
_MAX_CODE_CHARS = 4 * 2**20  # of one file; the largest published ones have 200,000
_KIND = re.compile(r"Auto[A-Za-z0-9]{1,60}")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,120}")
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+\.(\S+)[ \t]*$|from[ \t]+\.(\S+)[ \t]+import)", re.MULTILINE)


def own_code_kinds(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the kinds of classes that ``auto_map`` names, e.g. ``AutoConfig``; empty: it brings no code."""
    named = config.get("auto_map")
    if not isinstance(named, Mapping):
        return ()
    return tuple(sorted(kind for kind in named if isinstance(kind, str) and _KIND.fullmatch(kind))[:_MAX_KINDS])


def own_code_files(directory: Path) -> tuple[str, ...]:
    """Return the names of the Python files that the JSON files in ``directory`` have classes taken from.

    Raises:
        CheckpointError: the code of another repository is named, or what is no name of a file.
    """
    files: set[str] = set()
    for name in _NAMING_FILES:
        if (directory / name).is_file():
            files.update(_files_of(read_config(directory / name), directory / name))
    return tuple(sorted(files))


def _files_of(values: Mapping[str, object], file: Path) -> Iterator[str]:
    named = values.get("auto_map")
    classes = [*named.values()] if isinstance(named, Mapping) else []
    for each in classes:
        for text in each if isinstance(each, list) else [each]:
            if text is None:  # a tokenizer that has a slow class alone
                continue
            module = text.partition(".")[0] if isinstance(text, str) else ""
            if "--" in module:
                raise CheckpointError(
                    f"auto_map of {file} names code of another repository ({show(text)}), which is not fetched; "
                    "put that code into its folder and name it without the repository"
                )
            if not _MODULE.fullmatch(module):
                raise CheckpointError(f"auto_map of {file} names {show(text)}, which is no class of a Python file")
            yield f"{module}.py"


def missing_code(directory: Path) -> tuple[str, ...]:
    """Return the Python files that are named, or that one of them imports from its folder, and are not there.

    Imports are those that transformers looks for as text, and refuses to go without
    (``dynamic_module_utils.get_relative_imports``).

    Raises:
        CheckpointError: as :func:`own_code_files`; a file of the code cannot be read.
        ConfigError: one of the JSON files cannot be read.
    """
    left, found, missing = [*own_code_files(directory)], set[str](), list[str]()
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        if (directory / name).is_file():
            left += _imported_files(directory / name)
        else:
            missing.append(name)
    return tuple(sorted(missing))


def _imported_files(file: Path) -> list[str]:
    try:
        with file.open(encoding="utf-8", errors="replace") as text:
            imports = _IMPORT.findall(text.read(_MAX_CODE_CHARS))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    return [f"{module}.py" for pair in imports for module in pair if _MODULE.fullmatch(module)]
