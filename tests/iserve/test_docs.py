"""The reference pages are what the code says, every command has a help text with an example."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from iserve.cli.app import make_app

ROOT = Path(__file__).parents[2]


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children:
        yield " ".join(path), command
    for name, child in children.items():
        yield from commands(child, (*path, name))


@pytest.mark.parametrize(("name", "command"), list(commands(get_command(make_app()))))
def test_every_command_has_help_and_an_example(name: str, command: Any) -> None:
    assert command.help
    assert command.epilog.startswith("Example: ")
    assert f"iserve {name}" in command.epilog


@pytest.mark.parametrize(("name", "command"), list(commands(get_command(make_app()))))
def test_every_example_can_be_run(name: str, command: Any) -> None:
    """Options are known and take the values; which files there are is the user's."""
    examples = re.split(r"; or | && ", command.epilog.removeprefix("Example: "))
    own = [words for one in examples if f"iserve {name}" in one and (words := shlex.split(one))]
    assert own
    for words in own:
        command.make_context(name, words[words.index("iserve") + 1 + len(name.split()) :])


@pytest.mark.slow
def test_pages_made_from_the_code_are_current_and_prose_is_wrapped() -> None:
    """Pages of recorded results are in ``tests/bench/test_cited_accuracy.py``."""
    check = subprocess.run(
        [sys.executable, "docs/generate.py", "--check", "code", "prose"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def test_links_between_the_pages_lead_somewhere() -> None:
    lost = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            if "://" in target:
                continue
            there = (page.parent / target) if target else page
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
                lost.append(f"{page.relative_to(ROOT)} links to {target}#{anchor}")
    assert lost == []


def test_prose_is_wrapped_at_100_columns() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        prose = re.sub(r"^ {0,3}```.*?^ {0,3}```", "", page.read_text(), flags=re.M | re.S)
        for line in prose.splitlines():
            if not line.startswith(("|", "    ", "#")) and " " in line[:100].lstrip("*- "):
                assert len(line) <= 100, f"{page.name}: {line}"


def test_wrapping_changes_no_word_and_nothing_twice() -> None:
    page = f"# A heading {'long ' * 40}\n\n* An item {'word ' * 40}\n  of two `lines of code` - and 1. more\n"
    page += f"    * An item {'within ' * 40}\n\n"
    page += f"| a {'cell ' * 40}|\n\n```\n{'code ' * 40}\n```\n\n    {'code ' * 40}\n"
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from wrap import wrapped
    finally:
        sys.path.pop(0)
    found = wrapped(page)
    assert found.split() == page.split()
    assert found.count("\n    * An item within") == 1
    assert wrapped(found) == found
    kept = [line for line in page.splitlines() if line.startswith(("#", "|", "code", "    code"))]
    assert [line for line in found.splitlines() if line in kept] == kept
    assert max(len(line) for line in found.splitlines() if line not in kept) <= 100


def test_modules_that_the_pages_name_are_there() -> None:
    """Decisions tell what was once; every other page names what is."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = {Path(name).name for name in listed.splitlines()}
    lost = []
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`(?:[\w./-]*/)?(\w+\.py)`", page.read_text()):
            if name not in known:
                lost.append(f"{page.name} names {name}")
    assert lost == []
