"""Folders of a home: private, those of older releases too, and no other folder changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from daemon.home import make_home


def mode(folder: Path) -> int:
    return folder.stat().st_mode & 0o7777


@pytest.fixture
def umask() -> object:
    """The usual one, by which a folder is readable by everybody."""
    old = os.umask(0o022)
    yield
    os.umask(old)


@pytest.mark.usefixtures("umask")
def test_a_home_is_made_private(tmp_path: Path) -> None:
    home = tmp_path / "somewhere" / "home"
    assert make_home(home, "run") == home / "run"
    assert (mode(home), mode(home / "run")) == (0o700, 0o700)
    assert mode(home.parent) == 0o755


@pytest.mark.usefixtures("umask")
def test_one_of_an_older_release_is_closed_to_others(tmp_path: Path) -> None:
    home, workers = tmp_path / "home", tmp_path / "home" / "workers"
    workers.mkdir(parents=True)
    make_home(home, "logs")
    assert (mode(home), mode(workers), mode(home / "logs")) == (0o700, 0o700, 0o700)
    assert not (home / "run").exists()


@pytest.mark.parametrize("why", ["the user's own", "shared", "another user's"])
@pytest.mark.usefixtures("umask")
def test_a_folder_that_serves_others_too_is_left_as_it_is(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    if why == "the user's own":
        monkeypatch.setenv("HOME", str(home))
    elif why == "shared":
        home.chmod(0o1777)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    before = mode(home)
    make_home(home, "run")
    assert mode(home) == before
    assert mode(home / "run") == 0o700
