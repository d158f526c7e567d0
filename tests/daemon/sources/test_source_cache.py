"""Readings that are kept: read once, and again when what is installed there is another."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from daemon.sources import source_cache
from daemon.sources.source_cache import kept_reading
from fingerprint.errors import EngineError


@dataclass(frozen=True)
class Facts:
    text: str


@pytest.fixture
def package(tmp_path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "main.py").write_text("first")
    (folder / "other.py").write_text("one")
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("ISERVE_HOME", str(folder))
    return folder


@pytest.fixture
def read(package):
    """``read()``: the facts, of how many readings so far, as another process would ask for them."""
    readings = []

    def reader(folder: Path, version: str) -> Facts:
        readings.append(version)
        return Facts((folder / "main.py").read_text())

    def ask(version: str = "1", **options) -> tuple[str, int]:
        source_cache._kept.cache_clear()
        facts = kept_reading(reader, Facts, package, version, file="main.py", **options)
        return facts.text, len(readings)

    return ask


def test_a_package_is_read_once(home, read):
    assert [read(), read(), read()] == [("first", 1)] * 3


def test_it_is_read_again_when_it_is_installed_anew(home, read, package):
    assert read() == ("first", 1)
    (package / "main.py").write_text("second")
    assert [read(), read()] == [("second", 2)] * 2
    assert read("2") == ("second", 3)
    assert len(list((home / source_cache._FOLDER).iterdir())) == 1


@pytest.mark.parametrize("is_editable", [True, False])
def test_another_file_counts_where_the_sources_can_be_edited(home, read, package, is_editable):
    assert [read(is_editable=is_editable), read(is_editable=is_editable)] == [("first", 1)] * 2
    os.utime(package / "other.py", ns=(1, 1))
    assert [read(is_editable=is_editable)] * 2 == [("first", 2 if is_editable else 1)] * 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"text": 1}', b"\xff"])
@pytest.mark.parametrize("of_the_answer", [True, False])
def test_a_damaged_file_is_read_over(home, read, damage, of_the_answer):
    read()
    (kept,) = (home / source_cache._FOLDER).iterdir()
    kept.write_bytes(kept.read_bytes().partition(b"\n")[0] + b"\n" + damage if of_the_answer else damage)
    assert [read(), read()] == [("first", 2)] * 2


def test_without_a_home_nothing_is_written(tmp_path, monkeypatch, read):
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "absent"))
    assert [read(), read()] == [("first", 1), ("first", 2)]
    assert not (tmp_path / "absent").exists()


def test_a_home_that_cannot_be_written_is_done_without(home, read):
    (home / source_cache._FOLDER).write_text("a file where the folder would be")
    assert [read(), read()] == [("first", 1), ("first", 2)]


def test_a_package_that_is_not_there_is_an_error(home, tmp_path):
    with pytest.raises(EngineError, match=r"main\.py cannot be read"):
        kept_reading(lambda *_: Facts(""), Facts, tmp_path / "absent", "1", file="main.py")
