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
_KIND = re.compile(r"Auto[A-Za-z0-9]{1,60}")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,120}")


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


def missing_code(directory: Path) -> str | None:
    """Return the first Python file that is named and not in ``directory``; None: all are there, or none is named.

    Raises:
        CheckpointError: as :func:`own_code_files`.
        ConfigError: one of the JSON files cannot be read.
    """
    return next((name for name in own_code_files(directory) if not (directory / name).is_file()), None)
