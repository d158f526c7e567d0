"""Golden files: what is written is read, a difference is found, and each section is of a test there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import golden_words
from tests.golden_words import FOLDER, Golden, read, remove_stale, stale, write
from tests.tiers import GOLDEN_CASES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(golden_words, "FOLDER", tmp_path)
    return tmp_path


def rewriting(case: str, **hidden: str) -> Golden:
    return Golden(case, hidden, rewrites=True)


def reading(case: str, **hidden: str) -> Golden:
    return Golden(case, hidden, rewrites=False)


@pytest.mark.usefixtures("folder")
def test_what_is_written_is_read_and_a_difference_is_found() -> None:
    Golden("test_a[x]", {"/tmp/7": "TMP"}, rewrites=True)("errors", "one\n\n/tmp/7/b is no model\n")
    rewriting("test_a[y]")("errors", "two", "again")
    assert read("errors") == {"test_a[x]": "one\n\nTMP/b is no model", "test_a[y] again": "two"}
    Golden("test_a[x]", {"/tmp/8": "TMP"}, rewrites=False)("errors", "one\n\n/tmp/8/b is no model")
    with pytest.raises(AssertionError, match="make golden"):
        reading("test_a[x]")("errors", "another")
    with pytest.raises(AssertionError, match="no section `test_b`"):
        reading("test_b")("errors", "one")
    with pytest.raises(AssertionError, match="tell them apart"):
        rewriting("test_a[y]")("errors", "three", "again")
    write("errors", read("errors"))
    assert len(read("errors")) == 2


@pytest.mark.usefixtures("folder")
def test_several_words_of_a_test_are_numbered_and_lines_are_joined() -> None:
    for golden in (rewriting("test_n"), reading("test_n")):
        golden("errors", "one")
        golden("errors", ["two", "## of which one looks like a head"])
        golden("notes", "3 of 1,024, 0.5 s", numbers=False)
        golden.finish()
    assert read("errors") == {"test_n": "one", "test_n 2": "two\n\\## of which one looks like a head"}
    assert read("notes") == {"test_n": "N of N, N s"}


@pytest.mark.usefixtures("folder")
def test_an_error_is_expected_by_its_class_and_words() -> None:
    with rewriting("test_r").raises("errors", OSError) as caught:
        raise FileNotFoundError("gone")
    assert type(caught.value) is FileNotFoundError
    with reading("test_r").raises("errors", OSError):
        raise OSError("gone")
    with pytest.raises(AssertionError, match="make golden"), reading("test_r").raises("errors", OSError):
        raise OSError("here")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), reading("test_r").raises("errors", OSError):
        pass
    with pytest.raises(ValueError, match="other"), reading("test_r").raises("errors", OSError):
        raise ValueError("other")


@pytest.mark.usefixtures("folder")
def test_a_section_that_its_test_no_longer_compares_is_found_and_rewriting_removes_it() -> None:
    write("errors", {"test_s": "one", "test_s 2": "two", "test_s[x]": "of another", "test_so": "of another"})
    write("notes", {"test_s": "moved"})
    golden = reading("test_s")
    golden("errors", "one")
    with pytest.raises(AssertionError, match="compares: test_s 2; run"):
        golden.finish()
    golden = rewriting("test_s")
    golden("errors", "one")
    golden.finish()
    assert read("errors") == {"test_s": "one", "test_s[x]": "of another", "test_so": "of another"}
    assert read("notes") == {}
    reading("test_unknown").finish()


def test_a_section_of_no_test_is_found_and_removed(folder: Path) -> None:
    (folder / "test_of_some.py").write_text("def test_a(x): ...\n\n\ndef test_b(x): ...\n")
    words = dict.fromkeys(
        ("test_a[1]", "test_a[1] 2", "test_a[x y]", "test_a[z]", "test_b[not asked]", "test_c"), "w"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(golden_words, "FOLDER", folder / "golden")
        write("errors", words)
        assert stale("errors", ["test_a[1]", "test_a[x y]"]) == {"test_a[z]", "test_c"}
        remove_stale(["test_a[1]", "test_a[x y]"])
        assert read("errors").keys() == words.keys() - {"test_a[z]", "test_c"}


@pytest.mark.usefixtures("folder")
def test_what_differs_between_runs_and_machines_is_hidden() -> None:
    golden = rewriting("test_h")
    golden.hide("w-81", "WORKER")
    golden("errors", "w-81 (pid 4711), torch 2.14.0+cu130, vllm 0.33.0, 127.0.0.1:40123, port 40123, 1.5 GiB  \nx")
    assert read("errors") == {
        "test_h": "WORKER (pid PID), torch N.N.N, vllm 0.33.0, 127.0.0.1:PORT, port PORT, 1.5 GiB\nx"
    }


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_every_section_is_of_a_test_there_is(path: Path, request: pytest.FixtureRequest) -> None:
    unused = stale(path.stem, request.config.stash.get(GOLDEN_CASES, {}).keys())
    assert unused == set(), "no test compares these: run `make golden`"


def test_no_two_tests_have_one_section(request: pytest.FixtureRequest) -> None:
    functions: dict[str, set[str]] = {}
    for case, ids in request.config.stash.get(GOLDEN_CASES, {}).items():
        functions.setdefault(case.partition("[")[0], set()).update(node_id.partition("[")[0] for node_id in ids)
    shared = {name: ids for name, ids in functions.items() if len(ids) > 1}
    assert shared == {}, "sections are named by the test alone: give one another name"
