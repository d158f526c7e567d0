"""Files of a model directory in addition to config and weights: tokenizer, generation settings, Python code."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterable
from pathlib import Path

from fingerprint.errors import CheckpointError
from fingerprint.own_code import CODE_PATTERN

__all__ = ["COMPANION_FILES", "copy_code", "copy_companions", "copy_files", "differing_companions"]

COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_MAX_COPIED_BYTES = 512 * 2**20
_MAX_CODE_FILES = 256


def copy_companions(source: Path, target: Path) -> None:
    """Copy those of ``COMPANION_FILES`` that ``source`` has.

    Raises:
        CheckpointError: a file of over 512 MiB.
    """
    copy_files((source / name for name in COMPANION_FILES), target)


def copy_code(source: Path, target: Path) -> None:
    """Copy the Python files of ``source``; errors of :func:`copy_companions`. Nothing is run."""
    copy_files(sorted(source.glob(CODE_PATTERN))[:_MAX_CODE_FILES], target)


def copy_files(files: Iterable[Path], target: Path) -> None:
    """Copy those of ``files`` that are there, by their names; errors of :func:`copy_companions`."""
    for file in files:
        if file.is_file():
            if file.stat().st_size > _MAX_COPIED_BYTES:
                raise CheckpointError(
                    f"{file} has {file.stat().st_size} bytes; at most {_MAX_COPIED_BYTES} are copied"
                )
            shutil.copyfile(file, target / file.name)


def differing_companions(folder: Path, other: Path) -> tuple[str, ...]:
    """Return the names of ``COMPANION_FILES`` that ``folder`` has, and ``other`` has not or with other content."""
    names = (name for name in COMPANION_FILES if (folder / name).is_file())
    return tuple(name for name in names if not _is_same(folder / name, other / name))


def _is_same(file: Path, other: Path) -> bool:
    """Return whether two files have the same bytes; files too large to be copied are not compared."""
    if not other.is_file() or file.stat().st_size > _MAX_COPIED_BYTES:
        return False
    return filecmp.cmp(file, other, shallow=False)
