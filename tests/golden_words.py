"""Golden files: the words that users read, in ``tests/golden``, one file per surface and one section per case.

A test asserts the error's class or exit code itself and hands its words here; `make golden` writes the sections
anew and removes those that no test compares, and the difference in git is what users will read.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, TypeVar

import pytest

__all__ = ["FOLDER", "REWRITES", "Golden", "read", "remove_stale", "stale", "write"]

Error = TypeVar("Error", bound=BaseException)

FOLDER = Path(__file__).with_name("golden")
REWRITES = bool(os.environ.get("REWRITE_GOLDEN"))
_HEAD = "## "
# What differs from machine to machine and from run to run, whatever the test.
_PLACES = {sys.executable: "PYTHON", sys.prefix: "VENV", str(Path(__file__).parents[1]): "SOURCES"}
_VARYING = {
    r"\b(iServe|iServe, here|iserve|python|torch|transformers|uvloop) \d+\.\d+\.\d+(?:[+.]\w+)*": r"\1 N.N.N",
    r"(?<=\(now )\d+\.\d+\.\d+(?:[+.]\w+)*": "N.N.N",
    r"(?m)^(torch \(used\)) +\d\S+ +": r"\1  N.N.N  ",
    r"\bpython3\.\d+\b": "python3.N",
    r"\b(127\.0\.0\.1|localhost):\d{4,5}\b": r"\1:PORT",
    r"\bport \d{4,5}\b": "port PORT",
    r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00": "TIME",
    r"\b(pid|process) \d+\b": r"\1 PID",
    r"\bprofile(-\d+)*-[0-9a-f]{6,}\b": "WORKER",
    r"(?<=-u)[0-9a-f]{8}\b": "UPDATE",
    r"(?<=/iserve-pg-)\w{8}\b": "POSTGRES",
    r"\b0x[0-9a-f]{6,}\b": "ADDRESS",
    r"\bTMP/(home|models|variants)\d+\b": r"TMP/\1N",  # numbered by the tests that ran before in this process
    r"(?<=its disk has )[\d.]+(?= [GM]iB free)|\b[\d.]+(?= MiB are free in )": "N",
}


def read(surface: str) -> Mapping[str, str]:
    """Return the words of each case of ``surface``; none where there is no such file."""
    return _read(FOLDER / f"{surface}.txt")


@cache
def _read(path: Path) -> Mapping[str, str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    sections = (section.partition("\n") for section in f"\n{text}".split(f"\n{_HEAD}")[1:])
    return MappingProxyType({case: words.strip("\n") for case, _, words in sections})


def write(surface: str, cases: Mapping[str, str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    text = "\n".join(f"{_HEAD}{case}\n{cases[case]}\n" for case in sorted(cases))
    (FOLDER / f"{surface}.txt").write_text(text, encoding="utf-8")
    _read.cache_clear()


def change(surface: str, removed: Collection[str] = (), **added: str) -> None:
    """Remove and add sections of ``surface``; other processes may do so at the same time."""
    FOLDER.mkdir(exist_ok=True)
    folder = os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _read.cache_clear()
        before = read(surface)
        after = {case: words for case, words in before.items() if case not in removed} | added
        if after != before:
            write(surface, after)
    finally:
        os.close(folder)


def stale(surface: str, collected: Collection[str]) -> set[str]:
    """Return the sections of ``surface`` that no test compares.

    Those of no function in the sources and, of a function that is among the names of ``collected`` tests, those of
    none of its cases.
    """
    sources = "\n".join(file.read_text() for file in FOLDER.parent.rglob("test_*.py"))
    functions = {name.partition("[")[0] for name in collected}
    found = set()
    for case in read(surface):
        function = re.match(r"\w+", case)[0]
        names = {case[: end.start()] for end in re.finditer(r" |$", case)}  # what follows a space may be a number
        if f"def {function}(" not in sources or (function in functions and names.isdisjoint(collected)):
            found.add(case)
    return found


def remove_stale(collected: Collection[str]) -> None:
    """Remove the sections that no test compares from all golden files."""
    for surface in sorted(path.stem for path in FOLDER.glob("*.txt")):
        if unused := stale(surface, collected):
            change(surface, unused)


def _are_same(words: str, kept: str | None) -> bool:
    """Return whether the words are those kept; lines filled around a test's folder break by its length."""
    if kept is None or "TMP" not in words:
        return words == kept
    return "".join(words.split()) == "".join(kept.split())


class Golden:
    """The words of one test, by its own name: ``golden("cli-errors", said)``."""

    _written: ClassVar[dict[tuple[str, str], str]] = {}  # in this run

    def __init__(self, case: str, hidden: Mapping[str, str], *, rewrites: bool = REWRITES) -> None:
        self._case, self._hidden, self._rewrites = case, dict(hidden), rewrites
        self._calls: Counter[tuple[str, str]] = Counter()
        self._used: set[tuple[str, str]] = set()

    def __call__(self, surface: str, words: str | Iterable[str], what: str = "", *, numbers: bool = True) -> None:
        """Compare ``words``, or the lines of several, those of a set sorted, with the next section of this case.

        The sections of a test with several calls are numbered in their order; ``what`` gives one a name instead.
        Without ``numbers`` each number is an N: where they are measured, or those of the machine.
        """
        if not isinstance(words, str):
            words = "\n".join(sorted(words) if isinstance(words, Set) else words)
        words = self._settled(words)
        if not numbers:
            words = re.sub(r"(?<![A-Za-z\d])\d+(?:[.,]\d+)*", "N", words)
        self._calls[surface, what] += 1
        number = self._calls[surface, what]
        case = f"{self._case} {what or (number if number > 1 else '')}".strip()
        self._used.add((surface, case))
        kept = read(surface)
        if self._rewrites:
            assert self._written.setdefault((surface, case), words) == words, (
                "two words of one case: tell them apart"
            )
            if not _are_same(words, kept.get(case)):
                change(surface, **{case: words})
            return
        assert case in kept, f"tests/golden/{surface}.txt has no section `{case}`: run `make golden`"
        if not _are_same(words, kept[case]):
            assert words == kept[case], "if these words are meant: run `make golden`"

    @contextmanager
    def raises(
        self,
        surface: str,
        kind: type[Error] | tuple[type[Error], ...],
        what: str = "",
        *,
        numbers: bool = True,
    ) -> Iterator[pytest.ExceptionInfo[Error]]:
        """Expect an error of ``kind``, as ``pytest.raises`` does, whose words are those of the next section."""
        with pytest.raises(kind) as caught:
            yield caught
        self(surface, str(caught.value), what, numbers=numbers)

    def hide(self, value: object, name: str) -> None:
        """Write ``name`` for ``value`` in the words of this test: what no two runs have in common."""
        self._hidden[str(value)] = name

    def finish(self) -> None:
        """Raise AssertionError for a section that this test has, of any surface, and did not compare.

        Rewriting removes it.
        """
        for surface in sorted(path.stem for path in FOLDER.glob("*.txt")):
            kept = read(surface)
            unused = {
                case
                for case in kept
                if (case == self._case or case.startswith(f"{self._case} ")) and (surface, case) not in self._used
            }
            if unused and self._rewrites:
                change(surface, unused)
            elif unused:
                raise AssertionError(
                    f"tests/golden/{surface}.txt has sections that no test compares: {', '.join(sorted(unused))}; "
                    "run `make golden`"
                )

    def _settled(self, words: str) -> str:
        """Return ``words`` as they are in every run and on every machine."""
        hidden = {**_PLACES, **self._hidden}
        for value in sorted(hidden, key=len, reverse=True):
            words = words.replace(value, hidden[value])
        for varying, name in _VARYING.items():
            words = re.sub(varying, name, words)
        lines = (line.rstrip() for line in words.split("\n"))
        return "\n".join(f"\\{line}" if line.startswith(_HEAD) else line for line in lines).strip("\n")
