"""The log of a long-lived process: bounded while it runs, whoever writes to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from daemon.own_log import move_if_large

# Prints from Python and, as a library would, to the descriptor itself; goes on when the log was moved.
PROGRAM = """
import os, sys, time
from pathlib import Path
from daemon.own_log import bound_own_log

log = Path(sys.argv[1])
bound_own_log(log, max_bytes=1000, look_s=0.01)
for number in range(4):
    inode = os.stat("/dev/fd/2").st_ino
    print("x" * 600, number, flush=True)
    os.write(2, f"{'y' * 600} {number}\\n".encode())
    while len(sys.argv) == 2 and os.stat("/dev/fd/2").st_ino == inode:
        time.sleep(0.01)
print("the end", flush=True)
"""


def run(log: Path, *options: str, output: Path) -> None:
    with output.open("ab") as file:
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(log), *options], stdout=file, stderr=file, check=True, timeout=60
        )


def test_a_log_is_moved_when_it_has_grown_and_nothing_of_the_newest_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    run(log, output=log)
    assert log.read_text() == "the end\n"
    older = tmp_path / "daemon.log.1"
    assert older.read_text() == f"{'x' * 600} 3\n{'y' * 600} 3\n"
    assert set(tmp_path.iterdir()) == {log, older}


def test_output_that_goes_elsewhere_is_left_alone(tmp_path: Path) -> None:
    log, elsewhere = tmp_path / "daemon.log", tmp_path / "mine"
    log.write_text("z" * 5000)
    run(log, "--no-wait", output=elsewhere)
    assert log.read_text() == "z" * 5000
    assert len(elsewhere.read_text()) > 4000


@pytest.mark.parametrize(("size", "moved"), [(10, False), (11, True)])
def test_a_log_within_its_bound_stays(size: int, moved: bool, tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    assert not move_if_large(log, max_bytes=10)
    log.write_bytes(b"x" * size)
    assert move_if_large(log, max_bytes=10) is moved
    assert log.exists() is not moved
