"""Base and fine-tune of a delta: the checks that the two agree, what differs, and their hashes.

Both are read once, a few MiB at a time; what is read again later is compared with its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from fingerprint.checkpoint import Checkpoint, TensorEntry
from fingerprint.config_json import read_config, show
from fingerprint.delta.manifest import TensorHash, checkpoint_hash
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import FLOAT_DTYPES, decode_floats
from fingerprint.tensor_hash import new_tensor_hash, tensor_hash

__all__ = ["CheckpointPair", "HashedCheckpoint", "open_pair", "read_pair"]

_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_MAX_SHOWN = 200
OnBytes = Callable[[int, int], None]  # bytes read so far, bytes in all


class HashedCheckpoint(Checkpoint):
    """Checkpoint whose tensors were hashed: what is read of them later is the same, or an error."""

    def __init__(self, opened: Checkpoint, hashes: Sequence[TensorHash]) -> None:
        super().__init__(opened.directory, opened.tensors, opened.stamps, opened.bytes_read)
        self._hashes = {tensor.name: tensor.sha256 for tensor in hashes}

    def read(self, name: str) -> bytes:
        """Return all bytes of one tensor; 1.25 s of a core for each GiB.

        Raises:
            CheckpointError: it is not what was hashed, or cannot be read.
        """
        raw = super().read(name)
        self._check(name, self.tensors[name], [raw])
        return raw

    def check_files(self) -> None:
        """Raise CheckpointError where a reader that opens the files by itself may have read other tensors.

        To be called after it has read. Only headers are read of files that have their size, inode and time of
        change; else every tensor is, once.
        """
        now = Checkpoint.open(self.directory)
        if now.stamps == self.stamps and now.tensors == self.tensors:
            return
        for name in self._hashes:
            self._check(name, now.tensors.get(name), now.chunks(name))
        self.tensors, self.stamps = now.tensors, now.stamps

    def _check(self, name: str, entry: TensorEntry | None, pieces: Iterable[bytes]) -> None:
        if entry is None or tensor_hash(entry.dtype, entry.shape, pieces) != self._hashes[name]:
            raise CheckpointError(
                f"tensor {name[:_MAX_SHOWN]!r} of {self.directory} changed while a delta was made of it; give the "
                "same command again once nothing writes there: it begins anew"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPair:
    """Base and fine-tune whose tensors have the same names and shapes, with finite values."""

    base: HashedCheckpoint
    finetuned: HashedCheckpoint
    base_tensors: tuple[TensorHash, ...]  # by name
    finetuned_sha256: str
    changed: frozenset[str]  # names of tensors that differ


def open_pair(base: Path, finetuned: Path) -> tuple[Checkpoint, Checkpoint]:
    """Return the checkpoints in two folders, whose tensors have the same names, shapes and comparable types.

    Raises:
        NotFoundError, ConfigError, CheckpointError: as ``Checkpoint.open`` and ``read_config``; either is
            quantized; names, shapes or types that do not agree. The message names the first tensor.
    """
    for folder in (base, finetuned):
        _check_not_quantized(folder)
    pair = Checkpoint.open(base), Checkpoint.open(finetuned)
    for name in _common_names(*pair):
        _check_entries(name, *pair)
    return pair


def read_pair(base: Checkpoint, finetuned: Checkpoint, on_bytes: OnBytes | None = None) -> CheckpointPair:
    """Return what differs between two checkpoints of :func:`open_pair`.

    Raises:
        CheckpointError: a file that cannot be read; values that are NaN or infinite, or of a type that no change
            is kept of. The message names the first tensor.
    """
    pair, names = (base, finetuned), _common_names(base, finetuned)
    total = sum(each.tensors[name].num_bytes for each in pair for name in names)
    hashes: tuple[list[TensorHash], list[TensorHash]] = ([], [])
    changed, done = set(), 0
    for name in names:
        entries = pair[0].tensors[name], pair[1].tensors[name]
        digests = tuple(new_tensor_hash(entry.dtype, entry.shape) for entry in entries)
        for raw in _in_step(name, *pair):
            for piece, digest, entry, checkpoint in zip(raw, digests, entries, pair, strict=True):
                digest.update(piece)
                _check_finite(piece, entry, name, checkpoint.directory)
                done += len(piece)
            if _differ(*raw, entries):
                changed.add(name)
            if on_bytes is not None:
                on_bytes(done, total)
        for found, digest in zip(hashes, digests, strict=True):
            found.append(TensorHash(name=name, sha256=digest.hexdigest()))
    _check_kept(changed, *pair)
    return CheckpointPair(
        base=HashedCheckpoint(base, hashes[0]),
        finetuned=HashedCheckpoint(finetuned, hashes[1]),
        base_tensors=tuple(hashes[0]),
        finetuned_sha256=checkpoint_hash(hashes[1]),
        changed=frozenset(changed),
    )


def _check_not_quantized(folder: Path) -> None:
    config = read_config(folder)
    texts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    quantized = next((part["quantization_config"] for part in texts if part.get("quantization_config")), None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise CheckpointError(
            f"the weights in {folder} are quantized{f' ({show(method)})' if method else ''}; a delta is the "
            "difference of two models in 16 or 32 bits: give the one that it was made of"
        )


def _common_names(base: Checkpoint, finetuned: Checkpoint) -> list[str]:
    """Return the names of all tensors in order. A stored copy of tied embeddings that one side has is left out."""
    odd = base.tensors.keys() ^ finetuned.tensors.keys()
    if len(odd) == 1 and _is_tied_copy(next(iter(odd)), base, finetuned):
        odd = set()
    for name in sorted(odd):
        has, lacks = (base, finetuned) if name in base.tensors else (finetuned, base)
        raise CheckpointError(
            f"{finetuned.directory} is no fine-tune of {base.directory}: tensor {name[:_MAX_SHOWN]!r} is in "
            f"{has.directory} and not in {lacks.directory}; give the base that it was trained from"
        )
    return sorted(base.tensors.keys() & finetuned.tensors.keys())


def _is_tied_copy(name: str, base: Checkpoint, finetuned: Checkpoint) -> bool:
    """Return whether ``name``, which the fine-tune alone has, is the output layer of a model that ties it."""
    configs = (read_config(checkpoint.directory) for checkpoint in (base, finetuned))
    return (
        name in _HEADS and name in finetuned.tensors and all(each.get("tie_word_embeddings") for each in configs)
    )


def _check_entries(name: str, base: Checkpoint, finetuned: Checkpoint) -> None:
    before, after = base.tensors[name], finetuned.tensors[name]
    what = f"tensor {name[:_MAX_SHOWN]!r}"
    if before.shape != after.shape:
        raise CheckpointError(
            f"{finetuned.directory} is no fine-tune of {base.directory}: {what} is {list(after.shape)} there and "
            f"{list(before.shape)} in the base; give the base that it was trained from"
        )
    if before.dtype != after.dtype and not {before.dtype, after.dtype} <= set(FLOAT_DTYPES):
        raise CheckpointError(
            f"{what} is {after.dtype} in {finetuned.directory} and {before.dtype} in the base; changes between "
            f"{', '.join(FLOAT_DTYPES)} alone can be kept: convert the fine-tune"
        )


def _in_step(name: str, base: Checkpoint, finetuned: Checkpoint) -> Iterator[tuple[bytes, bytes]]:
    """Yield the bytes of both, piece by piece: of the same elements where both are of one type."""
    if base.tensors[name].dtype != finetuned.tensors[name].dtype:
        yield base.read(name), finetuned.read(name)
        return
    yield from zip_longest(base.chunks(name), finetuned.chunks(name), fillvalue=b"")


def _check_finite(piece: bytes, entry: TensorEntry, name: str, folder: Path) -> None:
    if entry.dtype in FLOAT_DTYPES and not np.isfinite(decode_floats(piece, entry.dtype)).all():
        raise CheckpointError(
            f"tensor {name[:_MAX_SHOWN]!r} of {folder} has NaN or infinite values; the training diverged, or the "
            "file is damaged: take an earlier one"
        )


def _differ(before: bytes, after: bytes, entries: tuple[TensorEntry, TensorEntry]) -> bool:
    if entries[0].dtype == entries[1].dtype:
        return before != after
    return not np.array_equal(decode_floats(before, entries[0].dtype), decode_floats(after, entries[1].dtype))


def _check_kept(changed: set[str], base: Checkpoint, finetuned: Checkpoint) -> None:
    for name in sorted(changed):
        if base.tensors[name].dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"tensor {name[:_MAX_SHOWN]!r} of {finetuned.directory} is {base.tensors[name].dtype} and differs "
                f"from the base's; changes of {', '.join(FLOAT_DTYPES)} alone can be kept"
            )
