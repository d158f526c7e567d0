"""Merged checkpoints of variants: made once, held by one command, gone when no deployment serves them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fingerprint.codec import to_json
from fingerprint.errors import UnavailableError
from iserve.api_types import DeployBody
from iserve.merged_variants import drop_merged, held_merge
from iserve.settings import Settings
from tests.iserve.test_fine_tune_folders import PATIENCE_S, never, settings

__all__ = ["settings"]  # a fixture

HASH, OTHER = "a" * 64, "b" * 64


def make(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def no_need(folder: Path) -> None:
    pytest.fail(f"{folder} is there already")


def names(settings: Settings) -> list[str]:
    return sorted(entry.name for entry in settings.merged_folder.iterdir())


def request(settings: Settings, name: str) -> str:
    return to_json(DeployBody(model=str(settings.merged_folder / name), name="tuned")).decode()


def test_it_is_made_once_and_kept(settings: Settings) -> None:
    with held_merge(settings, HASH, make, never) as folder:
        assert folder == settings.merged_folder / HASH
    with held_merge(settings, HASH, no_need, never):
        pass
    assert names(settings) == [HASH]
    assert not list(settings.run_folder.iterdir())


def test_a_merge_that_fails_leaves_nothing(settings: Settings) -> None:
    def fail(folder: Path) -> None:
        raise UnavailableError("the disk is full")

    with pytest.raises(UnavailableError, match="full"), held_merge(settings, HASH, fail, never):
        pass
    assert names(settings) == []
    assert not list(settings.run_folder.iterdir())


@pytest.mark.parametrize("left", [HASH, f".removing-{HASH}", f".{HASH}.0123abcd.part"])
def test_what_killed_commands_left_is_none(settings: Settings, left: str) -> None:
    for _ in range(2):
        (settings.merged_folder / left).mkdir(parents=True)
        (settings.merged_folder / left / "model.safetensors").write_bytes(b"a part")
        with held_merge(settings, HASH, make, never) as folder:
            assert [file.name for file in folder.iterdir()] == ["config.json"]
        drop_merged(settings, tuple)
        assert names(settings) == []


def test_those_that_deployments_serve_stay(settings: Settings) -> None:
    drop_merged(settings, tuple)  # there is no folder yet
    for name in (HASH, OTHER):
        with held_merge(settings, name, make, never):
            pass
    drop_merged(settings, lambda: [request(settings, OTHER), to_json(DeployBody()).decode()])
    assert names(settings) == [OTHER]


def test_one_that_was_deployed_since_the_first_look_stays(settings: Settings) -> None:
    """Deployed by a command that held it between the look and the removal."""
    with held_merge(settings, HASH, make, never):
        pass
    answers = iter([[], [request(settings, HASH)]])
    drop_merged(settings, lambda: next(answers))
    assert names(settings) == [HASH]


def test_one_that_raises_after_it_was_written_leaves_nothing(settings: Settings) -> None:
    def fail(folder: Path) -> None:
        make(folder)
        raise UnavailableError("its base was changed")

    with pytest.raises(UnavailableError, match="base"), held_merge(settings, HASH, fail, never):
        pass
    assert names(settings) == []


def test_one_that_a_command_is_about_to_deploy_stays(settings: Settings) -> None:
    waits = threading.Event()

    def second() -> Path:
        with held_merge(settings, HASH, no_need, waits.set) as folder:
            return folder

    with ThreadPoolExecutor(1) as pool:
        with held_merge(settings, HASH, make, never):
            drop_merged(settings, tuple)
            later = pool.submit(second)
            assert waits.wait(PATIENCE_S)
            drop_merged(settings, tuple)
            assert names(settings) == [HASH]
        assert later.result(PATIENCE_S) == settings.merged_folder / HASH


def test_a_home_that_cannot_be_written_is_named(settings: Settings) -> None:
    settings.home.mkdir()
    settings.merged_folder.write_text("a file")
    with pytest.raises(UnavailableError, match="ISERVE_HOME"), held_merge(settings, HASH, make, never):
        pass
