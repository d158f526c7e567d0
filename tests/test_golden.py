"""Golden files: what is written is read, a difference is found, and each section is of a test there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import golden_words
from tests.golden_words import FOLDER, Golden, read, write

TESTS = Path(__file__).parent


def test_what_is_written_is_read_and_a_difference_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden_words, "FOLDER", tmp_path)
    Golden("test_a[x]", {"/tmp/7": "TMP"}, rewrites=True)("errors", "one\n\n/tmp/7/b is no model\n")
    Golden("test_a[y]", {}, rewrites=True)("errors", "two", "again")
    assert read("errors") == {"test_a[x]": "one\n\nTMP/b is no model", "test_a[y] again": "two"}
    Golden("test_a[x]", {"/tmp/8": "TMP"}, rewrites=False)("errors", "one\n\n/tmp/8/b is no model")
    with pytest.raises(AssertionError, match="make golden"):
        Golden("test_a[x]", {}, rewrites=False)("errors", "another")
    with pytest.raises(AssertionError, match="has no section `test_b`"):
        Golden("test_b", {}, rewrites=False)("errors", "one")
    with pytest.raises(AssertionError, match="two words of one case"):
        Golden("test_a[y]", {}, rewrites=True)("errors", "three", "again")
    write("errors", read("errors"))
    assert len(read("errors")) == 2


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_every_section_is_of_a_test_there_is(path: Path) -> None:
    names = {re.match(r"\w+", case)[0] for case in read(path.stem)}
    sources = "\n".join(file.read_text() for file in TESTS.rglob("test_*.py"))
    assert {name for name in names if f"def {name}(" not in sources} == set()
