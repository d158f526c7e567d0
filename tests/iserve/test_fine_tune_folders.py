"""Folders in which ``variant add`` compresses fine-tunes: made once, held by one command, gone in the end."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.delta import is_delta
from fingerprint.delta.manifest import MANIFEST_FILE
from iserve.deltas import CompressOptions
from iserve.fine_tune_folders import compression_key, held_delta
from iserve.settings import Settings

KEY = "0123456789abcdef"
PATIENCE_S = 300.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


class Maker:
    """Counts what it makes."""

    def __init__(self) -> None:
        self.made: list[Path] = []

    def __call__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / MANIFEST_FILE).write_text("{}")
        self.made.append(folder)


def never() -> None:
    pytest.fail("nobody holds it")


def test_it_is_made_once_and_gone_after_the_block_that_ends_well(settings: Settings) -> None:
    make, work = Maker(), settings.compressing_folder
    with pytest.raises(RuntimeError), held_delta(settings, KEY, make, never) as folder:
        raise RuntimeError("the controller refused it")
    assert is_delta(folder)
    with held_delta(settings, KEY, make, never) as again:
        assert again == folder
        assert is_delta(folder)
    assert make.made == [folder]
    assert not list(work.iterdir())
    assert not list(settings.run_folder.iterdir())


@pytest.mark.parametrize("left", [KEY, f".removing-{KEY}"])
def test_what_a_killed_removal_left_is_no_delta(settings: Settings, left: str) -> None:
    make, work = Maker(), settings.compressing_folder
    (work / left).mkdir(parents=True)
    (work / left / "delta-00001.safetensors").write_bytes(b"a part")
    with held_delta(settings, KEY, make, never) as folder:
        assert [file.name for file in folder.iterdir()] == [MANIFEST_FILE]
    assert not list(work.iterdir())


def test_one_command_at_a_time_holds_it(settings: Settings) -> None:
    make, waits, ends = Maker(), threading.Event(), threading.Event()

    def second() -> bool:
        with held_delta(settings, KEY, make, waits.set) as folder:
            return is_delta(folder)

    with ThreadPoolExecutor(2) as pool:
        with held_delta(settings, KEY, make, never) as folder:
            later = pool.submit(second)
            assert waits.wait(PATIENCE_S)
            assert not later.done()
            with held_delta(settings, KEY[::-1], make, never):  # another fine-tune waits for none
                pass
            assert is_delta(folder)
        ends.set()
        assert later.result(PATIENCE_S)
    assert make.made == [folder, folder.with_name(KEY[::-1]), folder]


def test_folders_of_commands_that_were_given_up_are_removed(settings: Settings) -> None:
    work = settings.compressing_folder
    for name, age_days in (("old", 31), (".old.compressing", 31), ("recent", 29)):
        folder = work / name
        folder.mkdir(parents=True)
        then = folder.stat().st_mtime - 86_400 * age_days
        os.utime(folder, (then, then))
    with held_delta(settings, KEY, Maker(), never):
        pass
    assert [folder.name for folder in work.iterdir()] == ["recent"]


def test_what_killed_merges_of_any_fine_tune_left_is_removed_and_not_what_one_writes(settings: Settings) -> None:
    work = settings.compressing_folder
    names = (".other.merged.01234567.part", ".another.merged.89abcdef.part", ".other.compressing")
    for name in names:
        (work / name / "model").mkdir(parents=True)
    handle = os.open(work / names[1], os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with held_delta(settings, KEY, Maker(), never):
            pass
    finally:
        os.close(handle)
    assert sorted(entry.name for entry in work.iterdir()) == sorted(names[1:])


class TestKey:
    OPTIONS = CompressOptions(format_name="int2", calibration=None, max_error=None)

    @pytest.fixture
    def models(self, tmp_path: Path) -> tuple[Path, Path]:
        for name in ("base", "tuned"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_bytes(b"weights")
            (tmp_path / name / "config.json").write_text("{}")
        return tmp_path / "base", tmp_path / "tuned"

    def test_it_is_the_same_by_every_way_to_the_files(
        self, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        (tmp_path / "texts.txt").write_text("a text")
        named = [
            replace(self.OPTIONS, calibration=Path(name)) for name in ("texts.txt", "~/texts.txt", "./texts.txt")
        ]
        keys = {compression_key(models[0], Path("tuned"), options) for options in named}
        assert keys == {compression_key(Path("base"), models[1], named[0])}
        assert compression_key(*models, self.OPTIONS) not in keys

    @pytest.mark.parametrize(
        "name", ["base/model.safetensors", "base/config.json", "tuned/config.json", "texts.txt"]
    )
    def test_another_content_is_another_delta(self, models: tuple[Path, Path], tmp_path: Path, name: str) -> None:
        (tmp_path / "texts.txt").write_text("a text")
        options = replace(self.OPTIONS, calibration=tmp_path / "texts.txt")
        before = compression_key(*models, options)
        (tmp_path / name).write_bytes(b"{} and more")
        assert compression_key(*models, options) != before

    def test_texts_that_judge_are_not_those_that_calibrate(
        self, models: tuple[Path, Path], tmp_path: Path
    ) -> None:
        texts = tmp_path / "texts.txt"
        texts.write_text("a text")
        limited = replace(self.OPTIONS, max_quality_loss=0.1)
        roles = [replace(limited, calibration=texts), replace(limited, text=texts)]
        assert len({compression_key(*models, options) for options in roles}) == 2

    @pytest.mark.parametrize(
        "other",
        [
            {"format_name": "int3"},
            {"max_error": 0.1},
            {"max_quality_loss": 0.1},
        ],
    )
    def test_other_options_are_another_delta(self, models: tuple[Path, Path], other: dict[str, object]) -> None:
        make: Callable[..., CompressOptions] = replace
        assert compression_key(*models, make(self.OPTIONS, **other)) != compression_key(*models, self.OPTIONS)
