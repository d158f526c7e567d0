"""Reading a delta's folder in an engine's worker: the tensors of each file as views of one buffer.

``iserve variant add`` has checked every hash before; here sizes, types and shapes are, so that a file that was cut
short or replaced is refused with its name.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from iserve_variants.formats import FORMATS, CodeFormat

__all__ = ["MANIFEST_FILE", "PackedMatrix", "ServedDelta", "read_folder"]

MANIFEST_FILE = "delta.json"
_VERSION = 1
_MAX_HEADER_BYTES = 64 * 2**20
_PIECE_BYTES = 2**28
_TYPES = {"I16": torch.int16, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMatrix:
    """Change of one matrix, as it is on disk."""

    format: CodeFormat
    format_name: str
    shape: tuple[int, int]
    """Outputs and inputs, without padding."""
    codes: torch.Tensor
    """int16 [tiles, groups, 64, words]."""
    scales: torch.Tensor
    """bfloat16 [groups, padded outputs]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedDelta:
    """All tensors of a delta, by the names of the base's tensors."""

    matrices: dict[str, PackedMatrix]
    exact: dict[str, torch.Tensor]
    """Norms and biases, which replace the base's."""
    hashes: dict[str, str] | None = None
    """Of each tensor in its file, by the manifest; None: it has none of some."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield each tensor's name in its file, the tensor and its hash; ``hashes`` are there."""
        assert self.hashes is not None
        for name, matrix in self.matrices.items():
            yield f"{name}.codes", matrix.codes, self.hashes[f"{name}.codes"]
            yield f"{name}.scales", matrix.scales, self.hashes[f"{name}.scales"]
        for name, tensor in self.exact.items():
            yield name, tensor, self.hashes[name]


def read_folder(
    folder: Path,
    *,
    pin: bool = False,
    pause: Callable[[], None] = lambda: None,
    take: Callable[[int], torch.Tensor] | None = None,
    manifest: bytes | None = None,
) -> ServedDelta:
    """Return the delta in ``folder``.

    Args:
        pin: whether its buffers are page-locked, from which copies to a GPU need no further buffer.
        pause: called between tensors.
        take: returns uint8 memory of so many bytes for a file, in place of buffers of its own.
        manifest: bytes of the manifest, where they were read already.

    Raises:
        ValueError: a manifest of another version, a format that is not known, or a file that is not what the
            manifest says; the message names it.
        OSError: a file that cannot be read.
    """
    if take is None:
        take = partial(torch.empty, dtype=torch.uint8, pin_memory=pin)
    raw = (folder / MANIFEST_FILE).read_bytes() if manifest is None else manifest
    said = _json_object(raw, folder / MANIFEST_FILE)
    if said.get("version") != _VERSION:
        raise ValueError(f"{folder / MANIFEST_FILE} has version {said.get('version')!r}, not {_VERSION}")
    files: dict[str, dict[str, torch.Tensor]] = {}

    def tensor(file: str, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if Path(file).name != file:
            raise ValueError(f"{folder / MANIFEST_FILE} names {file!r}, which is no file in its folder")
        if file not in files:
            files[file] = _read_tensors(folder / file, take=take, pause=pause)
        pause()
        found = files[file].get(name)
        if found is None or found.dtype != dtype or found.shape != shape:
            was = "is not there" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise ValueError(f"{folder / file}: tensor {name} {was}, not {dtype} {list(shape)}")
        return found

    matrices = {}
    for entry in said["matrices"]:
        name, (outputs, inputs) = entry["name"], entry["shape"]
        format_ = FORMATS.get(entry["format"])
        if format_ is None:
            raise ValueError(
                f"{folder}: {name} has the format {entry['format']!r}, known are {', '.join(FORMATS)}"
            )
        codes_shape, scales_shape = format_.codes_shape(outputs, inputs), format_.scales_shape(outputs, inputs)
        matrices[name] = PackedMatrix(
            format=format_,
            format_name=entry["format"],
            shape=(outputs, inputs),
            codes=tensor(entry["file"], f"{name}.codes", torch.int16, codes_shape),
            scales=tensor(entry["file"], f"{name}.scales", torch.bfloat16, scales_shape),
        )
    exact = {
        entry["name"]: tensor(entry["file"], entry["name"], _type(entry["dtype"]), tuple(entry["shape"]))
        for entry in said["exact"]
    }
    return ServedDelta(matrices=matrices, exact=exact, hashes=_hashes(said))


def _hashes(manifest: dict[str, Any]) -> dict[str, str] | None:
    """Return the hash of each tensor by its name in its file; None: some have none."""
    found = {entry["name"]: entry.get("sha256") for entry in manifest["exact"]}
    for entry in manifest["matrices"]:
        found |= {f"{entry['name']}.{part}": entry.get(part) for part in ("codes", "scales")}
    return found if all(isinstance(one, str) for one in found.values()) else None


def _read_tensors(
    file: Path, *, take: Callable[[int], torch.Tensor], pause: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file as views of one buffer."""
    with file.open("rb", buffering=0) as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        size = os.fstat(stream.fileno()).st_size - 8 - length
        if not 0 < length <= _MAX_HEADER_BYTES or size < 0:
            raise ValueError(f"{file} is no safetensors file")
        header = _json_object(stream.read(length), file)
        buffer = take(size)
        view, at = memoryview(buffer.numpy()), 0
        while at < size:
            got = stream.readinto(view[at : at + _PIECE_BYTES])
            if not got:
                raise ValueError(f"{file} ends after {at} of {size} bytes")
            at += got
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        found[name] = _view(buffer, entry, file, name)
        pause()
    return found


def _view(buffer: torch.Tensor, entry: dict[str, Any], file: Path, name: str) -> torch.Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = _type(entry["dtype"]), entry["shape"]
    count = 1
    for side in shape:
        count *= side
    if not 0 <= begin <= end <= len(buffer) or end - begin != count * dtype.itemsize or begin % dtype.itemsize:
        raise ValueError(f"{file}: tensor {name} does not lie within the file")
    return buffer[begin:end].view(dtype).view(shape)


def _type(name: str) -> torch.dtype:
    if name not in _TYPES:
        raise ValueError(f"type {name!r} of a tensor is none of {', '.join(_TYPES)}")
    return _TYPES[name]


def _json_object(raw: bytes, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{file} is not what it was: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not what it was: no object")
    return found
