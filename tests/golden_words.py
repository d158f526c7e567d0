"""Golden files: the words that users read, in ``tests/golden``, one file per surface and one section per case.

A test asserts the error's class or exit code itself and hands its words here; `make golden` writes the files anew,
and the difference in git is what users will read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

__all__ = ["FOLDER", "Golden", "read", "write"]

FOLDER = Path(__file__).with_name("golden")
REWRITES = bool(os.environ.get("REWRITE_GOLDEN"))
_HEAD = "## "
_VERSION = re.compile(r"(?<![\d.])\d+\.\d+\.\d+(?!\.?\d)")  # of packages, which differ from machine to machine


def read(surface: str) -> dict[str, str]:
    """Return the words of each case of ``surface``; none where there is no such file."""
    path = FOLDER / f"{surface}.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    sections = (section.partition("\n") for section in f"\n{text}".split(f"\n{_HEAD}")[1:])
    return {case: words.strip("\n") for case, _, words in sections}


def write(surface: str, cases: Mapping[str, str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    text = "\n".join(f"{_HEAD}{case}\n{cases[case]}\n" for case in sorted(cases))
    (FOLDER / f"{surface}.txt").write_text(text, encoding="utf-8")


class Golden:
    """The words of one test, by its own name: ``golden("cli-errors", said)``."""

    _written: ClassVar[dict[tuple[str, str], str]] = {}  # in this run

    def __init__(self, case: str, folders: Mapping[str, str], *, rewrites: bool = REWRITES) -> None:
        self._case, self._folders, self._rewrites = case, folders, rewrites

    def __call__(self, surface: str, words: str, what: str = "") -> None:
        """Compare ``words`` with the section of this case; ``what`` tells several of one test apart."""
        for folder, name in self._folders.items():
            words = words.replace(folder, name)
        words = _VERSION.sub("N.N.N", words)
        case = f"{self._case} {what}".strip()
        kept = read(surface)
        if self._rewrites:
            assert self._written.setdefault((surface, case), words) == words, (
                "two words of one case: tell them apart"
            )
            write(surface, kept | {case: words.strip("\n")})
            return
        assert case in kept, f"tests/golden/{surface}.txt has no section `{case}`: run `make golden`"
        assert words.strip("\n") == kept[case], "if these words are meant: run `make golden`"
