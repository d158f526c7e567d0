"""Results of benchmarks that are committed: text, gzipped where the name ends in .gz, alike from day to day."""

from __future__ import annotations

import gzip
from pathlib import Path

__all__ = ["read_kept", "write_kept"]


def read_kept(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def write_kept(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
