"""JSON of dataclasses: decoders that several threads ask for at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fingerprint.codec import to_json
from fingerprint.errors import BadInputError
from tests.waiting import PATIENCE_S

ROUNDS = 20
DEPTH = 20
THREADS = 4

# Each round has types of its own, whose decoder all threads request at once. A thread that found a type which
# another thread was still reading followed a null pointer: without the lock, three runs of three ended in a
# segmentation fault (msgspec 0.22, CPython 3.11).
RACE = f"""
import sys
import threading

import nested_types
from fingerprint.codec import from_json

sys.setswitchinterval(1e-6)
document = b'{{"inner":' * {DEPTH - 1} + b'{{"size":1}}' + b',"size":2}}' * {DEPTH - 1}
together = threading.Barrier({THREADS})
depths = []


def depth(value):
    return 1 + depth(value.inner) if value.inner is not None else 1


def decode_all():
    for number in range({ROUNDS}):
        kind = getattr(nested_types, f"Round{{number}}Depth{DEPTH - 1}")
        together.wait()
        try:
            depths.append(depth(from_json(document, kind)))
        except Exception as error:
            depths.append(repr(error))


threads = [threading.Thread(target=decode_all) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(depths), set(depths))
"""


def types_of_all_rounds() -> str:
    """Return a module of dataclasses that nest ``DEPTH`` deep, with annotations as text like those of iServe."""
    lines = ["from __future__ import annotations", "from dataclasses import dataclass"]
    for number in range(ROUNDS):
        for depth in range(DEPTH):
            inner = f"Round{number}Depth{depth - 1} | None" if depth else "None"
            lines += ["@dataclass(frozen=True)", f"class Round{number}Depth{depth}:"]
            lines += ["    size: int", f"    inner: {inner} = None"]
    return "\n".join(lines)


def test_threads_may_decode_a_type_for_the_first_time_at_once(tmp_path: Path) -> None:
    (tmp_path / "nested_types.py").write_text(types_of_all_rounds())
    (tmp_path / "race.py").write_text(RACE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "race.py")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{THREADS * ROUNDS} {{{DEPTH}}}"


def test_half_a_surrogate_pair_is_bad_input() -> None:
    with pytest.raises(BadInputError, match=r"UTF-8") as refused:
        to_json({"file": os.fsdecode(b"\xff.txt")})
    assert str(refused.value).isascii()
