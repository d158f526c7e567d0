"""Benchmarks in an engine's own Python: scripts that print a JSON object last, ended with all their processes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

__all__ = ["LIMIT_S", "run_benchmark"]

log = logging.getLogger(__name__)

LIMIT_S = 120.0  # with the interpreter's start, torch's import and the GPUs' start
_MAX_OUTPUT_BYTES = 64 * 2**10


def run_benchmark(
    command: Sequence[str], device_ids: Sequence[str], *, go_on: Callable[[], None], limit_s: float
) -> dict[str, object] | None:
    """Return the object on the last line of ``command``; None, and a warning in the log, where there is none.

    Args:
        command: interpreter, script and arguments.
        device_ids: UUIDs of the GPUs that it sees.
        go_on: called while it runs; what it raises ends it.
    """
    interpreter, script, *arguments = command
    name = Path(script).stem
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [interpreter, "-I", script, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(device_ids)},
                start_new_session=True,
            )
        except OSError as error:
            log.warning("%s does not start with %s: %s", name, interpreter, error)
            return None
        try:
            deadline = time.monotonic() + limit_s
            while process.poll() is None and time.monotonic() < deadline:
                go_on()
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        try:
            found = json.loads(_text(output).splitlines()[-1])
        except (ValueError, IndexError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        log.warning("%s gives no figures (exit code %s: %s)", name, process.returncode, _text(errors)[-300:])
        return None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_OUTPUT_BYTES).decode(errors="replace").strip()
