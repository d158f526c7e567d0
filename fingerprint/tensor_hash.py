"""Hash of a tensor: SHA-256 of its type, shape and bytes. Equal for equal tensors, whatever file they are in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["new_tensor_hash", "tensor_hash"]


def new_tensor_hash(dtype: str, shape: tuple[int, ...]) -> hashlib._Hash:
    """Return a hash that is to be updated with the tensor's bytes."""
    return hashlib.sha256(f"{dtype} {list(shape)}\n".encode())


def tensor_hash(dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes]) -> str:
    """Return the hash of a tensor whose bytes are ``pieces`` in order."""
    digest = new_tensor_hash(dtype, shape)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
