"""Results of benchmarks that are committed: text, compressed where a name ends in .gz or .xz, alike every day."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

__all__ = ["read_kept", "write_kept"]


def read_kept(path: Path) -> bytes:
    match path.suffix:
        case ".gz":
            return gzip.decompress(path.read_bytes())
        case ".xz":
            return lzma.decompress(path.read_bytes())
    return path.read_bytes()


def write_kept(path: Path, text: str) -> None:
    """Write all of ``text`` or, where the process is stopped, leave what was there."""
    content = text.encode()
    match path.suffix:
        case ".gz":
            content = gzip.compress(content, mtime=0)
        case ".xz":
            content = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
    partial = path.with_name(f"{path.name}.part")
    partial.write_bytes(content)
    partial.replace(path)
