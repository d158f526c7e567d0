"""Reading a delta's folder. No size, name or hash is believed before it is checked.

The manifest says which tensors there are; the headers of the files must agree, each shape must follow from its
format, and the bytes must have the hashes. Every word of codes is valid, and scales are finite and not negative.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import from_json
from fingerprint.companion_files import COMPANION_FILES
from fingerprint.delta.formats import FORMATS
from fingerprint.delta.manifest import MANIFEST_FILE, MANIFEST_VERSION, DeltaManifest, ExactTensor, MatrixRecord
from fingerprint.delta.packing import dequantize, unpack_codes
from fingerprint.errors import BadInputError, CheckpointError, NotFoundError
from fingerprint.float_bytes import FLOAT_DTYPES, decode_floats
from fingerprint.folder_file import file_within
from fingerprint.tensor_hash import tensor_hash

__all__ = [
    "CODES_DTYPE",
    "SCALES_DTYPE",
    "Delta",
    "codes_name",
    "is_delta",
    "open_delta",
    "read_change",
    "read_delta",
    "scales_name",
]

CODES_DTYPE, SCALES_DTYPE = "I16", "BF16"  # words of either sign: engines have kernels for those
_MAX_MANIFEST_BYTES = 64 * 2**20
_MAX_SIDE = 2**31
_MAX_SHOWN = 200
_FILE = re.compile(r"delta-\d{5}\.safetensors")
_AGAIN = "compress it again"


def codes_name(tensor: str) -> str:
    """Return the name of the codes of a base's tensor."""
    return f"{tensor}.codes"


def scales_name(tensor: str) -> str:
    """Return the name of the scales of a base's tensor."""
    return f"{tensor}.scales"


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Delta on disk, but for the bytes of its tensors all of it checked."""

    folder: Path
    manifest: DeltaManifest
    files: dict[str, Checkpoint]

    def change(self, matrix: MatrixRecord) -> npt.NDArray[np.float32]:
        """Return what the delta adds to a matrix, [outputs, inputs]."""
        return read_change(self.files[matrix.file], matrix)

    def pieces(self, tensor: ExactTensor) -> Iterator[bytes]:
        """Yield the bytes of a tensor that is kept as it is."""
        return self.files[tensor.file].chunks(tensor.name)

    def read(self, file: str, tensor: str, expected: str) -> bytes:
        """Return the bytes of a tensor of one of the files.

        Raises:
            CheckpointError: they do not have the hash ``expected``, or cannot be read.
        """
        entry = self.files[file].tensors[tensor]
        raw = self.files[file].read(tensor)
        if tensor_hash(entry.dtype, entry.shape, (raw,)) != expected:
            raise _changed(entry.file, tensor)
        return raw


def read_change(file: Checkpoint, matrix: MatrixRecord) -> npt.NDArray[np.float32]:
    """Return the change [outputs, inputs] of a matrix whose codes and scales, checked before, are in ``file``."""
    format_ = FORMATS[matrix.format]
    words = np.frombuffer(file.read(codes_name(matrix.name)), "<u2").reshape(format_.codes_shape(matrix.shape))
    scales = decode_floats(file.read(scales_name(matrix.name)), SCALES_DTYPE)
    codes = unpack_codes(words, format_.bits, matrix.shape)
    return dequantize(codes, scales.reshape(format_.scales_shape(matrix.shape)), format_)


def is_delta(folder: Path) -> bool:
    """Return whether a folder has the manifest of a delta."""
    return os.path.lexists(folder / MANIFEST_FILE)


def read_delta(folder: Path) -> Delta:
    """Return the delta in ``folder``. All its bytes are read.

    Raises:
        NotFoundError, CheckpointError: as :func:`open_delta`, or a tensor was changed.
    """
    delta = open_delta(folder)
    _check_bytes(delta)
    return delta


def open_delta(folder: Path) -> Delta:
    """Return the delta in ``folder``, by its manifest and headers: its tensors are not read.

    Raises:
        NotFoundError: no such folder, or no delta in it.
        CheckpointError: a file that cannot be read or is not of this delta; the message names the first tensor.
    """
    manifest = _read_manifest(folder)
    files = {}
    for name in manifest.files:
        if not os.path.lexists(folder / name):
            raise CheckpointError(f"{folder} has no {name}, which its {MANIFEST_FILE} names; {_AGAIN}")
        files[name] = Checkpoint.of_file(file_within(folder, name, "delta"))
    _check_headers(folder, manifest, files)
    return Delta(folder=folder, manifest=manifest, files=files)


def _read_manifest(folder: Path) -> DeltaManifest:
    if not folder.is_dir():
        raise NotFoundError(f"there is no directory {folder}; give the folder of a delta")
    if not os.path.lexists(folder / MANIFEST_FILE):
        raise NotFoundError(f"{folder} has no {MANIFEST_FILE}; give a folder that `iserve variant compress` wrote")
    file = file_within(folder, MANIFEST_FILE, "delta")
    try:
        if not file.is_file():
            raise CheckpointError(f"{file} is not a file; {_AGAIN}")
        with file.open("rb") as stream:
            raw = stream.read(_MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    if len(raw) > _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{file} is larger than {_MAX_MANIFEST_BYTES} bytes; that is no delta's")
    try:
        manifest = from_json(raw, DeltaManifest, what=str(file))
    except BadInputError as error:
        raise CheckpointError(f"{error}; {_AGAIN}") from error
    _check_manifest(manifest, file)
    return manifest


def _check_manifest(manifest: DeltaManifest, file: Path) -> None:
    if manifest.version != MANIFEST_VERSION:
        raise CheckpointError(
            f"{file} is of version {manifest.version}, this release reads {MANIFEST_VERSION}; {_AGAIN}"
        )
    for matrix in manifest.matrices:
        if matrix.format not in FORMATS:
            raise _bad(file, matrix.name, f"has format {matrix.format[:40]!r}; known are {', '.join(FORMATS)}")
        if not all(0 < side < _MAX_SIDE for side in matrix.shape):
            raise _bad(file, matrix.name, f"has the impossible shape {list(matrix.shape)}")
    names = [each.name for each in manifest.changed]
    for name, follower in zip(sorted(names), sorted(names)[1:], strict=False):
        if name == follower:
            raise _bad(file, name, "is there twice")
    base = {tensor.name for tensor in manifest.base}
    for each in manifest.changed:
        if each.name not in base:
            raise _bad(file, each.name, "is changed, and the base has none of that name")
        if not _FILE.fullmatch(each.file):
            raise _bad(file, each.name, f"is said to be in {each.file[:_MAX_SHOWN]!r}, no file of a delta")
    if odd := next((each.name for each in manifest.companions if each.name not in COMPANION_FILES), None):
        raise CheckpointError(f"{file} names the file {odd[:_MAX_SHOWN]!r}, which belongs to no delta; {_AGAIN}")


def _check_headers(folder: Path, manifest: DeltaManifest, files: dict[str, Checkpoint]) -> None:
    """Raise unless every file has the tensors that the manifest names, of their types and shapes, and no more."""
    expected: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in files}
    for matrix in manifest.matrices:
        format_ = FORMATS[matrix.format]
        of_file = expected[matrix.file]
        of_file[codes_name(matrix.name)] = CODES_DTYPE, format_.codes_shape(matrix.shape)
        of_file[scales_name(matrix.name)] = SCALES_DTYPE, format_.scales_shape(matrix.shape)
    for tensor in manifest.exact:
        expected[tensor.file][tensor.name] = tensor.dtype, tensor.shape
    for file, tensors in expected.items():
        found = {name: (entry.dtype, entry.shape) for name, entry in files[file].tensors.items()}
        for name in sorted(tensors.keys() | found.keys()):
            if tensors.get(name) != found.get(name):
                raise _bad(
                    folder / file, name, f"is {_shown(found, name)}, {MANIFEST_FILE} says {_shown(tensors, name)}"
                )


def _check_bytes(delta: Delta) -> None:
    for matrix in delta.manifest.matrices:
        for name, expected in ((codes_name(matrix.name), matrix.codes), (scales_name(matrix.name), matrix.scales)):
            _check_hash(delta.files[matrix.file], name, expected)
        scales = decode_floats(delta.files[matrix.file].read(scales_name(matrix.name)), SCALES_DTYPE)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise _bad(delta.folder / matrix.file, scales_name(matrix.name), "has values that are no scales")
    for tensor in delta.manifest.exact:
        _check_hash(delta.files[tensor.file], tensor.name, tensor.sha256)
        for piece in delta.pieces(tensor) if tensor.dtype in FLOAT_DTYPES else ():
            if not np.isfinite(decode_floats(piece, tensor.dtype)).all():
                raise _bad(delta.folder / tensor.file, tensor.name, "has NaN or infinite values")
    for companion in delta.manifest.companions:
        file = file_within(delta.folder, companion.name, "delta")
        try:
            with file.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}; {_AGAIN}") from error
        if found != companion.sha256:
            raise CheckpointError(f"{file} was changed since the delta was made; {_AGAIN}")


def _check_hash(file: Checkpoint, name: str, expected: str) -> None:
    entry = file.tensors[name]
    if tensor_hash(entry.dtype, entry.shape, file.chunks(name)) != expected:
        raise _changed(entry.file, name)


def _changed(file: Path, tensor: str) -> CheckpointError:
    return _bad(file, tensor, "was changed since the delta was made (its hash differs)")


def _shown(tensors: dict[str, tuple[str, tuple[int, ...]]], name: str) -> str:
    if name not in tensors:
        return "not there"
    dtype, shape = tensors[name]
    return f"{dtype} {str(list(shape))[:80]}"


def _bad(file: Path, tensor: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file}: tensor {tensor[:_MAX_SHOWN]!r} {what}; {_AGAIN}")
