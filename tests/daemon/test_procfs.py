"""Facts of other processes: how they were started, and whose files they see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.procfs import sees, started_as


def test_a_process_is_known_by_words_of_its_command_line(tmp_path: Path) -> None:
    home = str(tmp_path / "a home")
    with subprocess.Popen([sys.executable, "-c", "input()", "--home", home], stdin=subprocess.PIPE) as process:
        found = [
            [stat.pid for stat in started_as(words)]
            for words in (
                ["--home", home],
                ["-c", "input()", "--home", home],
                ["--home", str(tmp_path)],
                [home, "x"],
            )
        ]
        process.communicate(b"\n")
    assert found == [[process.pid], [process.pid], [], []]


@pytest.mark.parametrize("has_one", [False, True])
def test_a_folder_of_the_same_name_in_a_container_is_another(has_one: bool, tmp_path: Path) -> None:
    """Root's home in a container is called as root's here; its processes are not ours to end."""
    home, proc = tmp_path / "home", tmp_path / "proc"
    home.mkdir()
    root = proc / "7" / "root"
    root.mkdir(parents=True)
    if has_one:
        (root / home.relative_to("/")).mkdir(parents=True)
    assert sees(os.getpid(), home)
    assert not sees(7, home, proc=proc)


def test_a_process_that_is_gone_sees_nothing(tmp_path: Path) -> None:
    assert not sees(2**22 + 1, tmp_path)
