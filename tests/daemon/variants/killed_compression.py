"""Compressions that kill themselves: ``python -m tests.daemon.variants.killed_compression FOLDER``.

One process that has loaded torch forks a child for each attempt, so that no attempt pays for the start. In the
first chain attempt n kills itself (SIGKILL) at its n-th operation on files, in the second once a unit and the
first matrix of the next are done. Each goes on where the one before it was killed. Prints the attempts of each
chain.

With ``trials`` behind the folder: of trials of which the first format is refused, at operations on files.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from daemon.variants.compress import (
    CalibrationTexts,
    CompressOrder,
    JudgedText,
    JudgementTexts,
    compress_delta,
    compress_within,
)
from fingerprint.delta import FORMATS
from fingerprint.errors import ConflictError
from tests.fingerprint.small_fine_tunes import TEXTS

_FILE_EVENTS = frozenset({"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"})
_MAX_ATTEMPTS = 200


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def order_of(folder: Path, name: str, format_name: str = "int2") -> CompressOrder:
    return CompressOrder(
        base=folder / "base",
        finetuned=folder / "tuned",
        target=folder / name,
        format=FORMATS[format_name],
        calibration=CalibrationTexts(sha256="0" * 64, texts=TEXTS[:8]),
        max_error=None,
        base_name="base",
        finetuned_name="tuned",
    )


def compress(folder: Path, name: str, on_progress: Callable[[str, int, int], None] | None = None) -> None:
    compress_delta(order_of(folder, name), on_progress)


def compress_by_trials(folder: Path, name: str) -> None:
    judged = JudgementTexts(sha256="1" * 64, texts=tuple(JudgedText("", text) for text in TEXTS[8:20]))
    found = compress_within(order_of(folder, name), judged, lambda trial: trial.format == "int3")
    assert [trial.format for trial in found.trials] == ["int2", "int3"]


def at_operation(folder: Path, attempt: int, make: Callable[[Path, str], None] = compress) -> None:
    """Compress, and die at the ``attempt``-th operation on files of the work or the target."""
    left = attempt

    def see(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in _FILE_EVENTS or "operations" not in str(arguments[0]):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        left -= 1
        if left == 0:
            die()

    sys.addaudithook(see)
    make(folder, "operations")


def after_a_unit(folder: Path, attempt: int) -> None:
    """Compress, and die within the unit after the first that this attempt has done."""
    records = folder / ".units.compressing" / "records"
    before = len(list(records.iterdir())) if records.exists() else 0

    def see(what: str, done: int, total: int) -> None:
        if what.startswith("matrices") and len(list(records.iterdir())) > before:
            die()

    compress(folder, "units", see)


def chain(folder: Path, attempt_of: Callable[[Path, int], None]) -> int:
    """Return how many attempts it took until one lived."""
    for attempt in range(1, _MAX_ATTEMPTS):
        child = os.fork()
        if child == 0:
            try:
                with suppress(ConflictError):  # killed at its very last operation, the one before had finished
                    attempt_of(folder, attempt)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return attempt
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise SystemExit(f"attempt {attempt} ended with status {status}")
    raise SystemExit(f"{_MAX_ATTEMPTS} attempts, and none lived")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)  # a fork has no threads of its parent
    if sys.argv[2:] == ["trials"]:
        print(chain(folder, partial(at_operation, make=compress_by_trials)))
        compress_delta(order_of(folder, "whole", "int3"))
        return
    print(chain(folder, at_operation), chain(folder, after_a_unit))
    compress(folder, "whole")


if __name__ == "__main__":
    main()
