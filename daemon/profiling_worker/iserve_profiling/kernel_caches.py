"""Folders in which engines keep compiled kernels, and when one was last added.

Folders that grow distinguish a call in which kernels are compiled for minutes from one that hangs. The standard
library alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_DEEPEST = 4  # folders of FlashInfer's below its own: release, architecture, operations, operation


def newest_kernel_s() -> float:
    """Return when a folder of the caches was last added to, in seconds of ``time.time``; 0.0: there is none."""
    newest = 0.0
    for folder in _folders():
        with suppress(OSError):
            newest = max(newest, folder.stat().st_mtime)
    return newest


def _folders() -> Iterator[Path]:
    """Triton's folder has one for each kernel; FlashInfer's files are written where its sources are compiled."""
    yield Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if inductor := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        yield Path(inductor)
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"
    for path, folders, _ in os.walk(base):
        yield Path(path)
        if len(Path(path).relative_to(base).parts) >= _DEEPEST:
            folders.clear()
