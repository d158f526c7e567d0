"""Wording is asserted in golden files: tests hold no more sentences than are recorded in docs/."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def load_counter() -> Any:
    """Return ``docs/asserted_sentences.py`` as a module; docs/ is no package."""
    spec = importlib.util.spec_from_file_location(
        "docs_asserted_sentences", ROOT / "docs" / "asserted_sentences.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


counter = load_counter()


def lines(source: str) -> list[int]:
    return [sentence.line for sentence in counter.in_source(source, "tests/test_x.py")]


def test_no_more_sentences_are_asserted_than_recorded() -> None:
    found, allowed = counter.findings(), counter.allowed()
    if len(found) < allowed:
        warnings.warn(
            f"{len(found)} sentences are asserted in tests, {allowed} are recorded: record them with "
            "python docs/asserted_sentences.py --write",
            stacklevel=1,
        )
    assert len(found) <= allowed, "give new wording to the golden fixture (docs/testing.md): see " + ", ".join(
        sorted({sentence.path for sentence in found})
    )


def test_a_sentence_has_four_words() -> None:
    assert counter.words("the model's KV-cache (`is`) full: 7 of x/y") == 6
    assert lines('assert "is out of memory" in said\nassert "out of memory" in said\n') == [1]
    assert lines('assert said == f"{name} is out of the {what}"\nassert said == f"{a} of {b}"\n') == [1]


def test_what_is_compared_is_asserted() -> None:
    assert lines('assert said.startswith("a word and another")') == [1]
    assert lines('assert (code, said) == (2, "a word and another")') == [1]
    assert lines('assert any("a word and another" in note for note in notes)') == [1]
    assert lines('assert error == ConfigError("a word and another")') == [1]
    assert lines('with pytest.raises(OSError, match="a word and another"):\n    pass') == [1]
    assert lines('with pytest.raises(OSError, match=re.escape("a word and another")):\n    pass') == [1]


def test_names_of_sentences_are_followed() -> None:
    assert lines('WORDS = "a word and another"\nassert WORDS in said') == [1]
    assert lines(
        'for at, words in [(1, "a word and another"), (2, "two words")]:\n    assert words in said[at]'
    ) == [1]
    columns = '@pytest.mark.parametrize(("at", "words"), [(1, "a word and another"){}])\ndef test(at, words):\n'
    assert lines(columns.format("") + "    assert words in said") == [1]
    assert lines(
        columns.format(', pytest.param(2, "some more words here", id="x")') + "    assert words in said"
    ) == [
        1,
        1,
    ]
    assert lines(columns.format("") + "    assert words not in said") == []


def test_inputs_and_absent_words_are_not() -> None:
    assert lines('assert answer("a word and another") == 3') == []
    assert lines('assert "a word and another" not in said') == []
    assert lines('assert said, "a word and another"') == []
    assert lines('say("a word and another")') == []
