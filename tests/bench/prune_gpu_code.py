"""Zeroes the GPU code of other architectures in CUDA libraries, so that they compress to a fraction.

    python -m tests.bench.prune_gpu_code 90 libtorch_cuda.so libnccl.so.2 [...]

For carrying an engine to a GPU machine that has no package index: of torch 2.14's ``libtorch_cuda.so`` 276 of
332 MB of GPU code are for other GPUs than an H200, of NCCL 2.30's 169 of 199 MB. The libraries ran so on an H200
(2026-11-22).

A fat binary is a header (magic, version 1, header size 16, 8 bytes of size) and entries, each with a header of its
own: kind (1 PTX, 2 machine code), its size, the payload's size, and the architecture at byte 28. Offsets stay as
they are; payloads that the wanted architecture never loads become zeros.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_PTX, _MACHINE_CODE = 1, 2
_MOST_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """Payload of a fat binary."""

    kind: int
    architecture: int  # 90: sm_90
    start: int
    size: int


def fat_binaries(data: mmap.mmap) -> Iterator[list[Entry]]:
    """Yield the entries of each fat binary; what only looks like one is left out."""
    at = data.find(_MAGIC)
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        end = at + header + size
        entries = _entries(data, at + header, end) if (version, header) == (1, 16) and end <= len(data) else None
        if entries is not None:
            yield entries
        at = data.find(_MAGIC, at + 4 if entries is None else end)


def _entries(data: mmap.mmap, at: int, end: int) -> list[Entry] | None:
    entries = []
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        if kind not in (_PTX, _MACHINE_CODE) or not 32 <= header <= _MOST_HEADER_BYTES or at + header + size > end:
            return None
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        entries.append(Entry(kind, architecture, at + header, size))
        at += header + size
    return entries


def loaded(entries: list[Entry], architecture: int) -> list[Entry]:
    """Return what a GPU of ``architecture`` loads: the newest machine code of its generation, else PTX."""
    fitting = [e for e in entries if e.architecture <= architecture]
    own = [e for e in fitting if e.kind == _MACHINE_CODE and e.architecture // 10 == architecture // 10]
    if own:
        newest = max(e.architecture for e in own)
        return [e for e in own if e.architecture == newest]
    return [e for e in fitting if e.kind == _PTX]


def prune(path: Path, architecture: int) -> tuple[int, int]:
    """Zero in place what is not loaded; returns bytes of GPU code that are kept and that are zeroed."""
    kept = zeroed = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entries in fat_binaries(data):
            wanted = loaded(entries, architecture)
            for entry in entries:
                if entry in wanted:
                    kept += entry.size
                else:
                    data[entry.start : entry.start + entry.size] = bytes(entry.size)
                    zeroed += entry.size
    return kept, zeroed


def main(argv: list[str]) -> None:
    for name in argv[1:]:
        kept, zeroed = prune(Path(name), int(argv[0]))
        print(f"{Path(name).name}: {kept / 1e6:.0f} MB of GPU code kept, {zeroed / 1e6:.0f} MB zeroed")


if __name__ == "__main__":
    main(sys.argv[1:])
