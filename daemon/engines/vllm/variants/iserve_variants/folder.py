"""Reading a delta's folder in an engine's worker: the tensors of each file as views of one buffer.

``iserve variant add`` has checked every hash before; here sizes, types and shapes are, so that a file that was cut
short or replaced is refused with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from iserve_variants.formats import FORMATS, CodeFormat
from iserve_variants.tensor_file import json_object, read_by_threads, read_header, tensor_view, torch_type

__all__ = ["MANIFEST_FILE", "PackedMatrix", "ServedDelta", "read_folder"]

MANIFEST_FILE = "delta.json"
_VERSION = 1


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
    said = json_object(raw, folder / MANIFEST_FILE)
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
        entry["name"]: tensor(entry["file"], entry["name"], torch_type(entry["dtype"]), tuple(entry["shape"]))
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
        header, begin, size = read_header(stream, file)
        buffer = take(size)
        read_by_threads(stream.fileno(), memoryview(buffer.numpy()), begin, file)
    found = {}
    for name, entry in header.items():
        found[name] = tensor_view(buffer, entry, file, name)
        pause()
    return found
