"""Exit codes of a worker process and its JSON document on what went wrong, for the reader after its end.

The adapter and the shim read these; neither has to parse a log. Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

__all__ = [
    "BAD_CHECKPOINT",
    "ENGINE_FAILED",
    "OUT_OF_MEMORY",
    "PORT_IN_USE",
    "STARTUP_ERROR_FILE",
    "is_out_of_memory",
    "report_failure",
]

ENGINE_FAILED = 95  # a rank died, a step failed, or the weights did not load for another reason
BAD_CHECKPOINT = 96  # the checkpoint, the configuration or the spec cannot be served, restarting will not help
OUT_OF_MEMORY = 97  # the device or the host had no room
PORT_IN_USE = 98  # another process listens on the spec's port

STARTUP_ERROR_FILE = "startup_error.json"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory: Python's, CUDA's, torch's CPU allocator's without a class."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def report_failure(folder: Path | None, error: BaseException) -> None:
    """Write ``{"error": class name, "message": text}`` as one line to stderr and into ``folder``.

    A folder that cannot be written to is no further failure: stderr has the line already.
    """
    line = json.dumps({"error": type(error).__name__, "message": str(error)[:4000]})
    print(line, file=sys.stderr, flush=True)
    if folder is not None:
        try:
            (folder / STARTUP_ERROR_FILE).write_text(line + "\n", encoding="utf-8")
        except OSError as problem:
            print(f"cannot write {folder / STARTUP_ERROR_FILE}: {problem}", file=sys.stderr, flush=True)
