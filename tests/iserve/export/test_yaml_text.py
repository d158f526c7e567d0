"""Written YAML is what a YAML reader reads, whatever the strings are."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from iserve.export.yaml_text import comment, document

TEXT = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",))),
    st.text("ab \n\t:#-'\"|>{}[]&*!%@`$0=\\"),
    st.sampled_from(["no", "Yes", "null", "~", "1e3", "0x1", "1_000", "2001-01-01", "=", "<<", ".inf", "", " "]),
)
KEYS = TEXT.filter(lambda text: len(text) < 50)  # a reader takes at most 1024 characters, escapes included
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(0.001, 1e6), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
def test_a_reader_gets_back_what_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load(document(value)) == value


@pytest.mark.parametrize("text", ['{\n  "a": 1\n}\n', "one\n\n  two \nthree\n", "#\n"])
def test_lines_stay_lines(text: str) -> None:
    written = document({"file": text, "next": 1})
    assert "file: |\n" in written
    assert yaml.safe_load(written) == {"file": text, "next": 1}


@given(st.lists(TEXT))
def test_a_comment_says_nothing_to_a_reader(lines: list[str]) -> None:
    assert yaml.safe_load(comment(lines) + document({"a": 1})) == {"a": 1}
