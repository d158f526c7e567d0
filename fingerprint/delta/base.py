"""Base of a delta: the checks that a checkpoint is the one that a delta was made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fingerprint.checkpoint import Checkpoint
from fingerprint.delta.manifest import DeltaManifest, TensorHash
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import FLOAT_DTYPES
from fingerprint.tensor_hash import tensor_hash

__all__ = ["BaseHashes", "check_base"]


class BaseHashes:
    """Hashes of a checkpoint's tensors, each computed when it is first asked for and kept.

    For one thread at a time.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._known: dict[str, str] = {}

    def check(self, expected: Sequence[TensorHash]) -> None:
        """Raise CheckpointError unless the checkpoint's tensors are those of ``expected``.

        The message names the first tensor that is not, and none after it is read.
        """
        hashes = {tensor.name: tensor.sha256 for tensor in expected}
        tensors, folder = self._checkpoint.tensors, self._checkpoint.directory
        for name in sorted(hashes.keys() | tensors.keys()):
            if name not in tensors:
                raise _not_of_base(name, folder, "it has none of that name")
            if name not in hashes:
                raise _not_of_base(name, folder, "the delta's base has none of that name")
            if self._hash(name) != hashes[name]:
                raise _not_of_base(name, folder, "it has other values there")

    def _hash(self, name: str) -> str:
        if name not in self._known:
            entry = self._checkpoint.tensors[name]
            self._known[name] = tensor_hash(entry.dtype, entry.shape, self._checkpoint.chunks(name))
        return self._known[name]


def check_base(checkpoint: Checkpoint, manifest: DeltaManifest) -> None:
    """Read ``checkpoint`` and raise CheckpointError unless its tensors are those that a delta was made of, and the
    changed ones have its shapes and types.
    """
    BaseHashes(checkpoint).check(manifest.base)
    _check_changed(checkpoint, manifest)


def _check_changed(checkpoint: Checkpoint, manifest: DeltaManifest) -> None:
    """Raise CheckpointError unless the changed tensors are of the shapes and types that headers say."""
    for matrix in manifest.matrices:
        entry = checkpoint.tensors[matrix.name]
        if entry.shape != matrix.shape or entry.dtype not in FLOAT_DTYPES:
            raise _not_of_base(matrix.name, checkpoint.directory, f"it is {entry.dtype} {list(entry.shape)} there")
    for tensor in manifest.exact:
        entry = checkpoint.tensors[tensor.name]
        if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
            raise _not_of_base(tensor.name, checkpoint.directory, f"it is {entry.dtype} {list(entry.shape)} there")


def _not_of_base(tensor: str, folder: Path, why: str) -> CheckpointError:
    """Return the error that names the tensor in which ``folder`` is not the base of a delta."""
    return CheckpointError(
        f"the delta was made of another base than {folder}: tensor {tensor[:200]!r} differs ({why}); give the "
        "base that it was made of"
    )
