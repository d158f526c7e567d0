"""Output paths that a person names and that are no file are refused, and still there afterwards."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fingerprint.errors import ConfigError
from fingerprint.output_file import output_file, write_output
from tests.golden_words import Golden
from traces.request import Request
from traces.writing import write_trace


@pytest.fixture(params=["pipe", "socket"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a path that is no file, as /dev/null is none, which only root may make."""
    path = tmp_path / "out.csv"
    if request.param == "pipe":
        os.mkfifo(path)
        yield path
        return
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        yield path


def _page(path: Path) -> None:
    write_output(output_file(path), "<p>")


def _trace(path: Path) -> None:
    write_trace(path, [Request(0.0, 1, 1)])


@pytest.mark.parametrize("write", [_page, _trace])
def test_what_is_no_file_is_not_replaced(write: Callable[[Path], None], no_file: Path, golden: Golden) -> None:
    kind, there = stat.S_IFMT(no_file.stat().st_mode), sorted(no_file.parent.iterdir())
    link = no_file.with_name("link")
    link.symlink_to(no_file)
    for path in (no_file, link):
        with golden.raises("cli-errors", ConfigError):
            write(path)
    assert stat.S_IFMT(no_file.stat().st_mode) == kind
    assert sorted(set(no_file.parent.iterdir()) - {link}) == there


@pytest.mark.parametrize("write", [_page, _trace])
def test_a_link_is_followed_and_stays_one(write: Callable[[Path], None], tmp_path: Path) -> None:
    target, link = tmp_path / "a" / "there.csv", tmp_path / "link.csv"
    target.parent.mkdir()
    link.symlink_to(target)
    for _ in range(2):  # to a file that is not there yet, and to one that is
        write(link)
        assert link.is_symlink()
        assert target.read_text()


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder,
        lambda folder: folder / "none" / "file",
        lambda _: Path("-"),
        lambda _: Path("/dev/null"),
    ],
)
def test_where_no_file_can_be_put(make: Callable[[Path], Path], tmp_path: Path, golden: Golden) -> None:
    with golden.raises("cli-errors", ConfigError):
        output_file(make(tmp_path))


def test_a_ring_of_links_leads_nowhere(tmp_path: Path, golden: Golden) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with golden.raises("cli-errors", ConfigError):
        output_file(one)
