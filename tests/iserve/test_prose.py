"""The rule of words holds in new prose: no package has more findings than ``docs/prose.json`` records."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load_prose() -> Any:
    """Return ``docs/prose.py`` as a module; docs/ is no package."""
    spec = importlib.util.spec_from_file_location("docs_prose", ROOT / "docs" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


prose = load_prose()


def test_no_count_has_risen() -> None:
    record = prose.Record.read()
    found = prose.findings(record.waiting)
    if fallen := prose.fallen(found, record):
        warnings.warn(
            "counts have fallen, record them with python docs/prose.py --write: " + "; ".join(fallen), stacklevel=1
        )
    risen = prose.risen(found, record)
    assert not risen, "\n\n".join(risen)


def test_waiting_modules_exist() -> None:
    assert [path for path in prose.Record.read().waiting if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    "docstring",
    [
        "Of so many for each.",
        "``It`` is.",
        "Who's there.",
        "What's asked.",
        "Whether, and when, it runs.",
        "(Not) here.",
        "One's own.",
    ],
)
def test_first_line_that_leans_on_its_surroundings(docstring: str) -> None:
    assert not prose.stands_alone(docstring)


@pytest.mark.parametrize(
    "docstring",
    ["Return the rate.", "Interference on shared GPUs.", "Offset of a page.", "Notes.", "", "One-way imports."],
)
def test_first_line_that_stands_alone(docstring: str) -> None:
    assert prose.stands_alone(docstring)


def test_words_outside_code_and_allowed_phrases() -> None:
    assert prose.dialect("Nobody told it to come beside the others.") == [
        "nobody",
        "told",
        "come",
        "beside",
        "others",
    ]
    assert prose.dialect("a stand-in of ``who``, which comes from `others`; users who read it") == []
    assert prose.dialect("becomes standard outcome") == []


def test_docstrings_comments_and_messages_are_read() -> None:
    source = '"""Who waits."""\n# told\nKEY = "asleep"\nraise ValueError("is asleep until then")\n'
    found = [(rule, line) for rule, line, _ in prose.in_source(source, "iserve/x.py")]
    assert sorted(found) == [("first_lines", 1), ("words", 1), ("words", 2), ("words", 4)]
    in_tests = [(rule, line) for rule, line, _ in prose.in_source(source, "tests/x.py")]
    assert ("words", 4) not in in_tests


def test_a_new_finding_is_reported_with_its_place(tmp_path: Path) -> None:
    package = tmp_path / "iserve" / "controller"
    package.mkdir(parents=True)
    (package / "status.py").write_text('"""Status.\n\nIt is told."""\n')
    record = prose.Record((), {"iserve/controller": {"first_lines": 0, "words": 1}})
    found = prose.findings((), tmp_path)
    assert prose.risen(found, record) == []
    assert prose.fallen(found, record) == []

    (package / "snapshot.py").write_text('def rate():\n    """Of one node."""\n')
    (message,) = prose.risen(prose.findings((), tmp_path), record)
    assert "iserve/controller, first_lines: 1, allowed 0" in message
    assert "iserve/controller/snapshot.py:2: Of one node." in message

    (package / "status.py").write_text('"""Status."""\n')
    assert prose.fallen(prose.findings((), tmp_path), record) == ["iserve/controller, words: 0, recorded 1"]


def test_record_is_written_as_it_is_read(tmp_path: Path) -> None:
    record = prose.Record(("planner/rank.py",), {"planner": {"first_lines": 2, "words": 0}})
    record.write(tmp_path / "prose.json")
    assert prose.Record.read(tmp_path / "prose.json") == record
    assert json.loads((tmp_path / "prose.json").read_text())["waiting"] == ["planner/rank.py"]
