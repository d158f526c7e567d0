"""Files that are replaced in one step: durable with their name, and nothing of a killed writer left."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.atomic_file import remove_stale_temporaries, write_file_atomically
from daemon.lease import EXIT_FILE, ExitRecord, write_file

KILLED_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
from daemon.atomic_file import write_file_atomically

os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
write_file_atomically(Path(sys.argv[1]), b"new")
"""


@pytest.mark.parametrize("kind", ["bytes", "record"])
def test_the_folder_is_made_durable_after_the_name_is_in_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that a power cut takes the new name back, whatever was promised since."""
    synced: list[tuple[str, bool]] = []
    path, real = tmp_path / EXIT_FILE, os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    if kind == "bytes":
        write_file_atomically(path, b"new")
    else:
        end = {"worker_id": "w1", "pid": 1, "exit_code": 0, "signal": None, "ended_at": 1.0, "reason": "exited"}
        write_file(path, ExitRecord(**end, log_tail=""))
    assert [is_there for _, is_there in synced] == [False, True]
    assert Path(synced[0][0]).parent == tmp_path
    assert Path(synced[1][0]) == tmp_path


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "routes.json"
    path.write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".routes.json.*")
    (tmp_path / ".routes.json.x7_abcde").touch()  # of a release that locked none
    kept = [tmp_path / name for name in (".other.json.abcdefgh", ".routes.json.longer-than-ours", "routes.json.1")]
    for other in kept:
        other.touch()
    with (tmp_path / ".routes.json.12345678").open("w") as under_way:
        fcntl.flock(under_way, fcntl.LOCK_EX)
        remove_stale_temporaries(tmp_path, "routes.json", "gateway.json")
    assert not left.exists()
    assert set(tmp_path.iterdir()) == {path, *kept, tmp_path / ".routes.json.12345678"}
    assert path.read_bytes() == b"old"


def test_a_folder_that_is_not_there_has_nothing_to_remove(tmp_path: Path) -> None:
    remove_stale_temporaries(tmp_path / "nowhere", "routes.json")
