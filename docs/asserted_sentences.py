"""Count of the sentences that tests assert outside the golden files.

A *sentence* is a string, also an f-string, of four words or more: words are runs of letters (with ``-`` and ``'``)
between spaces, without the punctuation around them. It is *asserted* where it is

* an operand of a comparison, or an element of one, within an ``assert``; there also in a constructor and in a call
  that compares text (``startswith``, ``endswith``, ``count``, ``index``, ``re.search`` and the like);
* the ``match`` of ``pytest.raises`` or ``pytest.warns``;
* the value of a name that is such an operand: a variable of the function or the module, a target of a loop over a
  literal, or a column of ``pytest.mark.parametrize``.

Not asserted are the absence of words (``not in``, ``!=``), the message of an ``assert``, and what is given to
other calls: inputs.

``python docs/asserted_sentences.py`` prints the counts by file and, given files, the sentences in them;
``--write`` records the sum in ``asserted_sentences.json``, and a test fails when it rises (``testing.md``).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
FEWEST_WORDS = 4
MACHINERY = ("golden_words.py", "test_golden.py")  # of the golden files

_WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
_AROUND = "`*\"'’()[]{}.,:;!?–—-\\^$|"
_COMPARING = {"startswith", "endswith", "count", "index", "search", "match", "fullmatch", "escape", "dedent"}
_MATCHING = {"raises", "warns"}
_ABSENCE = (ast.NotIn, ast.NotEq)


@dataclass(frozen=True, slots=True, order=True)
class Sentence:
    """Place of one asserted sentence."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def words(text: str) -> int:
    """Return the number of words in ``text``."""
    return sum(_WORD.fullmatch(word.strip(_AROUND)) is not None for word in text.split())


def in_source(source: str, path: str) -> list[Sentence]:
    """Return the sentences that a test file asserts, each once, in the order of lines."""
    module, functions = _scopes(ast.parse(source))
    everywhere = _bound(module)
    found: dict[tuple[int, int], Sentence] = {}
    for nodes in (module, *functions):
        bound = everywhere | _bound(nodes)
        for operand in _operands(nodes):
            values = [operand, *bound.get(operand.id, ())] if isinstance(operand, ast.Name) else [operand]
            for literal in (literal for value in values for literal in _literals(value)):
                text = _text(literal)
                if words(text) >= FEWEST_WORDS:
                    place = literal.lineno, literal.col_offset
                    found[place] = Sentence(path, literal.lineno, " ".join(text.split()))
    return sorted(found.values())


def findings(root: Path = ROOT) -> list[Sentence]:
    """Return the sentences that the tests under ``root`` assert outside the golden files."""
    files = sorted(file for file in (root / "tests").rglob("*.py") if file.name not in MACHINERY)
    return [
        sentence for file in files for sentence in in_source(file.read_text(), file.relative_to(root).as_posix())
    ]


def allowed(record: Path = RECORD) -> int:
    """Return how many asserted sentences are recorded."""
    return int(json.loads(record.read_text())["asserted_sentences"])


def _scopes(tree: ast.Module) -> tuple[list[ast.AST], list[list[ast.AST]]]:
    """Return the nodes outside functions, and those of each function with what is nested in it."""
    functions: list[list[ast.AST]] = []
    module = _nodes(tree, functions)
    return module, functions


def _nodes(tree: ast.AST, functions: list[list[ast.AST]] | None = None) -> list[ast.AST]:
    """Return the nodes below ``tree``; each function goes to ``functions`` with its own, where that is given."""
    nodes = [tree]
    for node in nodes:  # grows
        for value in vars(node).values():
            for child in value if isinstance(value, list) else (value,):
                if functions is not None and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    functions.append(_nodes(child))
                elif isinstance(child, ast.AST):
                    nodes.append(child)
    return nodes


def _operands(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """Yield what is compared with text: leaves of the comparisons of each ``assert``, and each ``match``."""
    for node in nodes:
        if isinstance(node, ast.Assert):
            yield from _leaves(node.test)
        elif isinstance(node, ast.Call) and _name(node) in _MATCHING:
            for keyword in node.keywords:
                if keyword.arg == "match":
                    yield from _leaves(keyword.value)


def _leaves(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the strings and names below ``node`` that are compared, none that is absent or an input."""
    match node:
        case ast.Constant() | ast.JoinedStr() | ast.Name():
            yield node
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            absent = any(isinstance(op, _ABSENCE) for op in ops)
            for child in () if absent else (left, *comparators):
                yield from _leaves(child)
        case ast.Call(func=func) if not (_name(node) in _COMPARING or _name(node)[:1].isupper()):
            given = (*node.args, *(keyword.value for keyword in node.keywords))
            for child in (func, *(child for child in given if _is_comparison(child))):
                yield from _leaves(child)
        case ast.Subscript(value=value):
            yield from _leaves(value)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _leaves(child)


def _is_comparison(node: ast.AST) -> bool:
    """Return whether an argument, such as the generator in ``all(...)``, compares on its own."""
    return isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.Compare | ast.BoolOp)


def _bound(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """Return, by name, the literals that assignments, loops and parametrized columns give to it."""
    bound: dict[str, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                bound[name].append(value)
            case ast.For(target=target, iter=rows) | ast.comprehension(target=target, iter=rows):
                _bind(bound, [n.id if isinstance(n, ast.Name) else "" for n in _elements(target)], rows)
            case ast.Call(args=[names, rows, *_]) if _name(node) == "parametrize":
                columns = [part.strip() for name in _elements(names) for part in _text(name).split(",")]
                _bind(bound, columns, rows)
            case _:
                pass
    return bound


def _bind(bound: dict[str, list[ast.expr]], columns: Sequence[str], rows: ast.expr) -> None:
    if not isinstance(rows, ast.List | ast.Tuple):
        return
    for row in rows.elts:
        param = isinstance(row, ast.Call) and _name(row) == "param"
        cells = row.args if isinstance(row, ast.Call) and param else _elements(row)
        if len(columns) == 1 and not param:
            cells = [row]
        for column, cell in zip(columns, cells, strict=False):
            bound[column].append(cell)


def _literals(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yield the whole strings in a value: of a collection its elements, of a call nothing."""
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            yield node
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() | ast.BinOp() | ast.Starred():
            for child in ast.iter_child_nodes(node):
                yield from _literals(child)
        case _:
            pass


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple | ast.List) else [node]


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) or "0" for value in values)
        case _:
            return ""


def _name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def main() -> int:
    """Print or record the counts; return 1 when ``--write`` would raise the sum."""
    parser = argparse.ArgumentParser(description="Count the sentences that tests assert outside the golden files.")
    parser.add_argument(
        "files", nargs="*", help="print the sentences in these files, such as tests/iserve/test_auth.py"
    )
    parser.add_argument("--write", action="store_true", help="record the sum in docs/asserted_sentences.json")
    arguments = parser.parse_args()
    found = findings()
    if arguments.files:
        print(*(sentence for sentence in found if sentence.path in arguments.files), sep="\n")
        return 0
    for path, count in Counter(sentence.path for sentence in found).most_common():
        print(f"{path:60} {count:5}")
    print(f"{'total':60} {len(found):5}")
    if arguments.write:
        if RECORD.exists() and len(found) > allowed():
            print(f"not written: {allowed()} were recorded; give new wording to `golden`", file=sys.stderr)
            return 1
        RECORD.write_text(json.dumps({"asserted_sentences": len(found)}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
