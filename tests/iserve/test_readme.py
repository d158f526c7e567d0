"""README.md and its commands, and those of docs: each is taken as written; what is shown is what is printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from iserve.cli.app import make_app
from iserve.demo import demo_model_path
from tests.iserve.command_line import Done, iserve, model

__all__ = ["iserve", "model"]

ROOT = Path(__file__).parents[2]
PUBLIC_MODELS = (ROOT / "tests/fingerprint/recorded/public_models.json").read_text()
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs/tour.md").read_text()
_COMMAND = re.compile(r"^(?:    |\$ )((?:[A-Z_]+=\S+ )*\S*\biserve [a-z].*)$", re.MULTILINE)
_FOLDERS = {"Llama-2-70b-hf": "Llama-2-70b", "Llama-2-7b-hf": "Llama-2-7b"}


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the words behind ``iserve`` of each command that a page tells its reader to type."""
    for line in _COMMAND.findall(re.sub(r"\\\n\s*", " ", text)):
        words = shlex.split(line, comments=True)
        parts: list[list[str]] = [[]]
        for word in words:
            if word in ("&&", "|", ";"):
                parts.append([])
            else:
                parts[-1].append(word)
        for part in parts:
            at = next((at for at, word in enumerate(part) if word.rpartition("/")[2] == "iserve"), None)
            if at is not None:
                yield tuple(part[at + 1 :])


def test_make_setup_installs_the_pytorch_that_it_is_given() -> None:
    asked = "torch==2.13.0 --index-url URL"
    assert f"make setup TORCH='{asked}'" in README
    shown = ["make", "--dry-run", "--always-make", "setup", f"TORCH={asked}"]
    done = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"pip install -qq {asked};" in done.stdout


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TYPED = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)}")
    for page in PAGES
    for words in dict.fromkeys(commands(page.read_text()))
]
SHOWN = re.findall(r"```\n\$ iserve ((?:plan|estimate) [^\n]*)\n(.*?)```", README + TOUR, re.DOTALL)


@pytest.fixture
def tour(model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models of the examples."""
    for name, shape in _FOLDERS.items():
        shutil.copytree(model(shape), tmp_path / name)
    for name in ("my-model", "other"):
        shutil.copytree(demo_model_path(), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", TYPED)
def test_a_command_is_taken_as_it_is_written(words: tuple[str, ...]) -> None:
    """The command's options exist, have values of their kinds, and nothing that is required is left out."""
    command: Any = get_command(make_app())
    rest = list(words)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    command.make_context(words[0], rest)


def test_commands_are_found() -> None:
    assert len(list(commands(README))) >= 14
    assert len(list(commands(TOUR))) > 25
    line = "    ISERVE_X=1 iserve up && ~/env/bin/iserve plan m --gpus h200:1 | sh  # ends\n"
    assert list(commands(line)) == [("up",), ("plan", "m", "--gpus", "h200:1")]


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
@pytest.mark.usefixtures("tour")
def test_what_is_shown_is_what_is_printed(
    iserve: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    """Standard output equals the page, except for what this machine lacks."""
    monkeypatch.setenv("COLUMNS", "120")
    assert _elsewhere(iserve(*shlex.split(command)).out) == _elsewhere(shown)


@pytest.mark.usefixtures("tour")
def test_the_advice_to_merge_is_the_one_that_is_quoted(iserve: Callable[..., Done], tmp_path: Path) -> None:
    """docs/variants.md shows it below its command."""
    page = (ROOT / "docs/variants.md").read_text()
    (words,) = (one for one in commands(page) if one[0] == "plan" and "zipf:2" in one)
    folder = tmp_path / words[1]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(json.loads(PUBLIC_MODELS)["models"][words[1]]["config"]))
    quoted = re.search(r"^> merging the most.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    assert quoted
    advice = re.sub(r"^> ", "", quoted[0], flags=re.MULTILINE)
    assert " ".join(advice.split()) in " ".join(iserve(*words).out.split())


def _elsewhere(text: str) -> list[str]:
    lines = re.sub(r"  Deploy here .*?(?=\n\n)", "", text, flags=re.DOTALL).splitlines()
    return [line.rstrip() for line in lines]


def test_the_readme_stays_short_and_says_what_was_never_run() -> None:
    assert len(README.splitlines()) <= 200
    assert "TensorRT-LLM was never run" in README


def test_there_are_examples_of_every_kind() -> None:
    assert sorted(command.split()[0] for command, _ in SHOWN) == ["estimate", "plan", "plan", "plan"]


@pytest.mark.usefixtures("tour")
def test_the_trace_of_the_examples_is_written_and_simulated(iserve: Callable[..., Done]) -> None:
    (write,) = (words for words in commands(TOUR) if words[:2] == ("trace", "write"))
    (simulate,) = (words for words in commands(TOUR) if words[0] == "simulate")
    assert iserve(*write).code == 0
    assert iserve(*simulate).out.startswith("all ")
