"""Count of docstrings and words that break the rule of words, by package.

``python docs/prose.py`` prints the counts and, given a package's folder, the findings in it. ``--write`` records
the counts in ``prose.json``, and a test fails when one rises. The rules are in ``prose.md``.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
PYTHON_FOLDERS = (
    "daemon",
    "docs",
    "fingerprint",
    "iserve",
    "notebooks",
    "placement",
    "planner",
    "tests",
    "traces",
)
RULES_FILE = "docs/prose.py"  # quotes the words that it counts
PAGES = ("README.md", "docs/*.md", "docs/decisions/*.md")

FIRST_LINES = "first_lines"
WORDS = "words"
RULES = (FIRST_LINES, WORDS)

# A first line that begins with one of these depends on its surroundings, or is no sentence of its own.
_LEANING = re.compile(
    r"(of|as|by|with|that|those|who|whose|what|whether|where|one|it|its|they|nobody|somebody|nothing|not|no|how|why|when"
    r"|which)"
)
# The words of rules 2 and 5. ``whose`` is plain English of things too, and is no such word.
_WORD = re.compile(
    r"\b(who|nobody|somebody|whoever|others|those to come|told|wish|wishes|wished|beside|come|comes|came|coming"
    r"|stand|stands|stood|standing|refus(?:e|es|ed|ing) late|asleep)\b",
    re.IGNORECASE,
)
# Phrases in which such a word is the usual one, each with its reason.
ALLOWED = {
    r"\bstand(?:s[-\s]in|[-\s]ins?)\b": "a test double",
    r"\bstands?\s+alone\b": "rule 1 itself",
    r"\bfirst[-\s]come,?\s+first[-\s]served\b": "the queue discipline",
    r"\bstanding\s+costs?\b": "the cost per second of a placement, whatever is sent to it",
    r"\b(?:come|comes|came|coming)\s+from\b": "an origin",
    r"\b(?:come|comes|came)\s+(?:first|last|next)\b": "an order",
    r"\btold\s+apart\b": "distinguished",
    r"\b(?:users?|people|operators?|authors?|readers?|those)\s+who\b": "people",
}
_ALLOWED = re.compile("|".join(ALLOWED), re.IGNORECASE)
_CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
_LINK = re.compile(r"\]\([^)]*\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
_MESSAGE_WORDS = 3  # a string of fewer is a key or a name


@dataclass(frozen=True, slots=True)
class Finding:
    """Place where a rule is broken."""

    rule: str  # FIRST_LINES or WORDS
    package: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True, slots=True)
class Record:
    """Counts that are allowed today, by package and rule."""

    waiting: tuple[str, ...]  # modules that are rebuilt soon, counted as one package of their own
    counts: dict[str, dict[str, int]]

    @classmethod
    def read(cls, path: Path = RECORD) -> Record:
        """Return the record in ``path``."""
        fields = json.loads(path.read_text())
        return cls(tuple(fields["waiting"]), fields["counts"])

    def write(self, path: Path = RECORD) -> None:
        """Replace the record in ``path``."""
        path.write_text(json.dumps({"waiting": list(self.waiting), "counts": self.counts}, indent=2) + "\n")

    def allowed(self, package: str, rule: str) -> int:
        """Return the count allowed in ``package``, 0 in a new one."""
        return self.counts.get(package, {}).get(rule, 0)


def first_word(docstring: str) -> str:
    """Return the first word of ``docstring`` in lower case, without punctuation and possessive."""
    words = docstring.split(maxsplit=1)
    return re.sub(r"['’]\w*$", "", words[0].strip("`*\"'().,:;!?–—-")).lower() if words else ""


def stands_alone(docstring: str) -> bool:
    """Return whether the first line of ``docstring`` can be read without what is around it."""
    return _LEANING.fullmatch(first_word(docstring)) is None


def dialect(prose: str) -> list[str]:
    """Return the words of rules 2 and 5 in ``prose``, outside code and the allowed phrases."""
    return [word for _, word in dialect_lines(prose)]


def dialect_lines(prose: str) -> Iterator[tuple[int, str]]:
    """Yield (line, word) of each word of rules 2 and 5 in ``prose``; a phrase may go over the end of a line."""
    for pattern in (_CODE, _LINK, _ALLOWED):
        prose = pattern.sub(_blank, prose)
    for match in _WORD.finditer(prose):
        yield prose.count("\n", 0, match.start()) + 1, match.group().lower()


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group().count("\n") or " "


def package_of(path: str) -> str:
    """Return the package of a file: its folder, or the topmost two of them."""
    return "/".join(Path(path).parts[:-1][:2]) or "."


def findings(waiting: tuple[str, ...], root: Path = ROOT) -> list[Finding]:
    """Return every break of the rules under ``root``, in the order of packages and files."""
    found: list[Finding] = []
    for folder in PYTHON_FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if path == RULES_FILE:
                continue
            package = "waiting" if path in waiting else package_of(path)
            found += (
                Finding(rule, package, path, line, text) for rule, line, text in in_source(file.read_text(), path)
            )
    for pattern in PAGES:
        for file in sorted(root.glob(pattern)):
            path = file.relative_to(root).as_posix()
            package = "docs/decisions" if "decisions" in path else "docs"
            found += (Finding(WORDS, package, path, line, text) for line, text in _in_page(file.read_text()))
    return sorted(found, key=lambda finding: (finding.package, finding.path, finding.line))


def in_source(source: str, path: str) -> Iterator[tuple[str, int, str]]:
    """Yield (rule, line, text) for the docstrings, comments and messages of a module."""
    tree, docstrings = ast.parse(source), set()
    for node in _definitions(tree):
        text = ast.get_docstring(node)
        if text is not None:
            constant = node.body[0].value  # type: ignore[attr-defined]
            docstrings.add(id(constant))
            if not stands_alone(text):
                yield FIRST_LINES, constant.lineno, text.splitlines()[0]
    if _WORD.search(source) is None:
        return  # most files: walking through all expressions takes longer than all else
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                where = "docstring"
            elif not path.startswith("tests/") and len(node.value.split()) >= _MESSAGE_WORDS:
                where = "message"
            else:
                continue
            yield from _words(where, node.lineno, node.value)
    if not any(_WORD.search(line.partition("#")[2]) for line in source.splitlines()):
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _words("comment", token.start[0], token.string)


def _definitions(
    node: ast.AST,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield what can have a docstring: expressions are not looked through."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        parts = getattr(node, block, ())
        for part in parts if isinstance(parts, list) else ():
            yield from _definitions(part)


def _words(where: str, line: int, prose: str) -> Iterator[tuple[str, int, str]]:
    for word in dialect(prose):
        yield WORDS, line, f"{word!r} in a {where}"


def _in_page(page: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of a Markdown page, its code left out; none of a page generated from the code."""
    if "docs/generate.py" in "".join(page.splitlines(keepends=True)[:4]):
        return

    for line, word in dialect_lines(_INDENTED.sub("", _FENCE.sub(_blank, page))):
        yield line, f"{word!r} in a page"


def counts(found: list[Finding]) -> dict[str, dict[str, int]]:
    """Return how many findings there are, by package and rule."""
    tally = Counter((finding.package, finding.rule) for finding in found)
    packages = sorted({package for package, _ in tally})
    return {package: {rule: tally[package, rule] for rule in RULES} for package in packages}


def risen(found: list[Finding], record: Record) -> list[str]:
    """Return a message for each package and rule that has more findings than recorded, with the findings."""
    messages = []
    for package, rules in counts(found).items():
        for rule, count in rules.items():
            allowed = record.allowed(package, rule)
            if count > allowed:
                listed = [str(f) for f in found if (f.package, f.rule) == (package, rule)]
                messages.append(
                    f"{package}, {rule}: {count}, allowed {allowed} (docs/prose.md)\n" + "\n".join(listed)
                )
    return messages


def fallen(found: list[Finding], record: Record) -> list[str]:
    """Return a line for each package and rule that has fewer findings than recorded."""
    now = counts(found)
    return [
        f"{package}, {rule}: {now.get(package, {}).get(rule, 0)}, recorded {recorded}"
        for package, rules in record.counts.items()
        for rule, recorded in rules.items()
        if now.get(package, {}).get(rule, 0) < recorded
    ]


def total(by_package: dict[str, dict[str, int]], rule: str) -> int:
    """Return the sum of a rule's counts over all packages."""
    return sum(rules.get(rule, 0) for rules in by_package.values())


def main() -> int:
    """Print or record the counts; return 1 when ``--write`` would raise a sum."""
    parser = argparse.ArgumentParser(description="Count docstrings and words that break the rule of words.")
    parser.add_argument("package", nargs="?", help="list the findings of this package, such as iserve/controller")
    parser.add_argument("--write", action="store_true", help="record the counts in docs/prose.json")
    arguments = parser.parse_args()
    record = Record.read()
    found = findings(record.waiting)
    now = counts(found)
    if arguments.package:
        print(*(f"{f}  [{f.rule}]" for f in found if f.package == arguments.package), sep="\n")
        return 0
    for package, rules in now.items():
        print(f"{package:32}", *(f"{rule} {count:5}" for rule, count in rules.items()))
    print(f"{'total':32}", *(f"{rule} {total(now, rule):5}" for rule in RULES))
    if arguments.write:
        # A sum that is kept lets files move from package to package.
        up = [rule for rule in RULES if record.counts and total(now, rule) > total(record.counts, rule)]
        if up:
            print(f"not written: the sum of {' and '.join(up)} has risen; rewrite what is new:", file=sys.stderr)
            print(*risen(found, record), sep="\n", file=sys.stderr)
            return 1
        Record(record.waiting, now).write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
