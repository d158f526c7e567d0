"""Checks that the base of a worker is the one that a delta was made of, for engines that make none.

Every tensor of the base is hashed once, and again where its files have changed: 1.25 s of a core for each GiB.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from fingerprint.checkpoint import Checkpoint
from fingerprint.delta import BaseHashes, DeltaManifest
from fingerprint.errors import CheckpointError, UnavailableError

__all__ = ["BaseChecks"]

_Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, bytes, inode, time of its last change


@dataclass(slots=True)
class _Base:
    """Base whose hashes are known. One thread at a time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stamp: _Stamp = ()
    hashes: BaseHashes | None = None


class BaseChecks:
    """Hashes of bases, kept for as long as their files stay as they are. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: dict[Path, _Base] = {}

    def check(self, base: Path, manifest: DeltaManifest) -> None:
        """Return if every tensor of ``base`` is that of the manifest; the first time this takes seconds a GiB.

        Raises:
            CheckpointError: it is not, or cannot be read; the message names the first tensor that differs.
            UnavailableError: its files changed while they were read.
        """
        with self._lock:
            known = self._bases.setdefault(base, _Base())
        with known.lock:
            checkpoint = Checkpoint.open(base)
            stamp = _stamp(checkpoint)
            if known.hashes is None or known.stamp != stamp:
                known.hashes, known.stamp = BaseHashes(checkpoint), stamp
            known.hashes.check(manifest.base)
            if _stamp(checkpoint) != stamp:  # its first tensors may be those of the files before
                raise UnavailableError(
                    f"the files of {base} changed while they were read; try again once they do not"
                )


def _stamp(checkpoint: Checkpoint) -> _Stamp:
    files = sorted({entry.file for entry in checkpoint.tensors.values()})
    try:
        found = [(file, file.stat()) for file in files]
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    return tuple((str(file), one.st_size, one.st_ino, one.st_mtime_ns) for file, one in found)
