"""The log of a long-lived process: bounded while it runs, for every writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from daemon.log_rotation import move_if_large
from tests.waiting import PATIENCE_S

# Prints from Python and, as a library would, to the descriptor itself; goes on when the log was moved.
PROGRAM = """
import os, sys, time
from pathlib import Path
from daemon.log_rotation import bound_log

log = Path(sys.argv[1])
bound_log(log, max_bytes=1000, look_s=0.01)
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
            [sys.executable, "-c", PROGRAM, str(log), *options],
            stdout=file,
            stderr=file,
            check=True,
            timeout=PATIENCE_S,
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


# Fills its log, and cannot open a file while it is past its bound; then it can, and it prints the end.
WITHOUT_FILES = """
import os, resource, sys, time
from pathlib import Path
from daemon import log_rotation

log, looks = Path(sys.argv[1]), []
real = log_rotation._turn_over

def look(*arguments):
    try:
        real(*arguments)
    finally:
        looks.append(1)

log_rotation._turn_over = look
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
log_rotation.bound_log(log, max_bytes=1000, look_s=0.01)
os.write(2, b"y" * 2000 + b"\\n")
seen = len(looks)
while len(looks) < seen + 3:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
while os.path.samestat(os.fstat(2), os.stat(f"{log}.1" if os.path.exists(f"{log}.1") else log)):
    time.sleep(0.01)
print("the end", flush=True)
"""


def test_a_log_is_bounded_again_once_files_can_be_opened(tmp_path: Path) -> None:
    """A log that was moved before its next could be opened would grow, under another name, for good."""
    log = tmp_path / "daemon.log"
    with log.open("ab") as file:
        command = [sys.executable, "-c", WITHOUT_FILES, str(log)]
        subprocess.run(command, stdout=file, stderr=file, check=True, timeout=PATIENCE_S)
    assert log.read_text() == "the end\n"
    assert (tmp_path / "daemon.log.1").stat().st_size == 2001
    assert set(tmp_path.iterdir()) == {log, tmp_path / "daemon.log.1"}


def test_output_into_a_log_that_was_moved_goes_on_into_the_new_one(tmp_path: Path) -> None:
    """The start of another process of the role moves it, or a turn that was cut short."""
    log = tmp_path / "daemon.log"
    program = """
import os, sys, time
from pathlib import Path
from daemon.log_rotation import bound_log

log = Path(sys.argv[1])
log.rename(f"{log}.1")
log.write_text("another\\n")
bound_log(log, look_s=0.01)
while not os.path.samestat(os.fstat(1), log.stat()):
    time.sleep(0.01)
print("mine", flush=True)
"""
    with log.open("ab") as file:
        command = [sys.executable, "-c", program, str(log)]
        subprocess.run(command, stdout=file, stderr=file, check=True, timeout=PATIENCE_S)
    assert log.read_text() == "another\nmine\n"
