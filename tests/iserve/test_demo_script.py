"""The script of ``make demo``: what it runs, read by the command line itself, and as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from iserve.cli.app import make_app
from iserve.demo import DEMO_MODEL_NAME
from tests.waiting import PATIENCE_S

SCRIPT = Path(__file__).parents[2] / "docs" / "demo.sh"
RECORDER = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done >>"$RECORDED"
printf '\\0' >>"$RECORDED"
"""


def run_script(folder: Path, program: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the programs of ``program`` first, and its home within ``folder``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ISERVE_")}
    (folder / "homes").mkdir()
    paths = {"PATH": f"{program}{os.pathsep}{kept['PATH']}", "TMPDIR": str(folder / "homes")}
    return subprocess.run(
        ["sh", str(SCRIPT)],
        env=kept | paths | environment,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
        check=False,
    )


@pytest.fixture
def commands(tmp_path: Path) -> list[list[str]]:
    """Return the words of each command that the script runs, where every one succeeds."""
    program, recorded = tmp_path / "bin" / "iserve", tmp_path / "recorded"
    program.parent.mkdir()
    program.write_text(RECORDER)
    program.chmod(0o755)
    done = run_script(tmp_path, program.parent, RECORDED=str(recorded))
    assert done.returncode == 0, done.stderr
    return [words.splitlines() for words in recorded.read_text().split("\0")[:-1]]


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the values of a command's options and arguments; nothing is run."""
    command: Any = get_command(make_app())
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    for name in names:
        if not hasattr(command, "commands"):
            break
        command, words = command.commands[name], words[1:]
    found: dict[str, Any] = command.make_context(command.name, list(words)).params
    return found


def test_every_command_is_one_and_every_model_that_it_asks_is_there(commands: list[list[str]]) -> None:
    models, asked = set[str](), []
    for words in commands:
        values = parsed(words)
        if words[0] == "deploy":
            models.add(values["name"] or DEMO_MODEL_NAME)
        elif words[:2] == ["variant", "add"]:
            assert values["base"] in models
            assert Path(values["adapter"]).is_dir()
            models.add(values["name"])
        elif words[0] == "chat":
            asked.append(values["name"])
            assert asked[-1] in models, words
    assert set(asked) == models == {DEMO_MODEL_NAME, "capitals", "symbols"}
    assert asked[-1] == "symbols"  # the fine-tune, which is kept as a delta
    assert commands[-1] == ["down"]


@pytest.mark.long
@pytest.mark.process
def test_its_variants_answer_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    done = run_script(tmp_path, Path(sys.executable).parent)
    assert done.returncode == 0, done.stderr
    answers = dict(re.findall(r"^> (.*)\n(.*)$", done.stdout, re.MULTILINE))
    said = {
        question.partition(",")[0]: answer for question, answer in answers.items()
    }  # by the model, where named
    assert said["123+456="] == "579"
    assert said["capitals"].endswith(" Lima.")
    assert said["symbols"].endswith(" Ag.")
    assert said[DEMO_MODEL_NAME] != said["capitals"]
    assert list((tmp_path / "homes").glob("iserve-demo.*")) == []  # torch keeps a cache there
