"""A worker's log read part by part while it grows and is rotated."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.shim import RotatingLog
from daemon.worker_log import log_after, log_end
from fingerprint.errors import BadInputError


def test_parts_put_together_are_the_log(tmp_path: Path) -> None:
    """Over rotations, and a second writer, which a restart is."""
    path, written, read = tmp_path / "worker.log", "", ""
    position = ""
    for number in range(100):
        if number % 25 == 0:
            log = RotatingLog(path, max_bytes=64, files=3)
        line = f"{number} größer\n"
        log.write(line.encode())
        written += line
        if number % 7 == 0:  # at most three rotations lie between
            part = log_after(path, position)
            read, position = read + part.text, part.position
    assert path.with_name("worker.log.3").exists()
    assert read + log_after(path, position).text == written


def test_following_begins_behind_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    assert (log_end(path, 2).text, log_end(path, 2).position) == ("", "")  # nothing was printed yet
    path.write_text("a\nb\nc\n")
    part = log_end(path, 2)
    assert part.text == "b\nc\n"
    assert log_after(path, part.position).text == ""
    with path.open("a") as file:
        file.write("d\ne")
    part = log_after(path, part.position)
    assert part.text == "d\ne"  # a line need not be whole
    assert log_after(path, part.position).text == ""


@pytest.mark.parametrize("cut", range(1, 22))
def test_the_last_line_is_whole_wherever_a_rotation_cut_it(tmp_path: Path, cut: int) -> None:
    path, text = tmp_path / "worker.log", b"first line\nsecond line\n"
    path.with_name("worker.log.1").write_bytes(text[:-cut])
    path.write_bytes(text[-cut:])
    assert log_end(path, 1).text == "second line\n"


def test_a_character_is_never_cut(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_bytes("a€".encode()[:-1])
    part = log_after(path, "")
    assert part.text == "a"
    with path.open("ab") as file:
        file.write("€".encode()[-1:] + b"\xff\n")
    assert log_after(path, part.position).text == "€�\n"


def test_what_was_rotated_away_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_text("new\n")
    assert log_after(path, "1:5").text == "new\n"  # of a file that is gone
    inode = path.stat().st_ino
    assert log_after(path, f"{inode}:999").text == "new\n"  # ... whose number another has now


@pytest.mark.parametrize("position", ["1", ":", "a:b", "-1:2", "1:2:3", "1: 2", "٥:1", "9" * 50 + ":1"])
def test_a_position_that_no_part_had_is_refused(tmp_path: Path, position: str) -> None:
    with pytest.raises(BadInputError, match="position"):
        log_after(tmp_path / "worker.log", position)
