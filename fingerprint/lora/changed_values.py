"""Values of a tensor as an adapter changes it: computed in float32, a few rows at a time, and rounded once.

Sources: DoRA, arXiv 2402.09353, eq. 5, and peft 0.21.2, ``tuners/lora/dora.py`` (the norm of a linear is over its
inputs, of embeddings over the tokens); IA3, arXiv 2205.05638, and ``tuners/ia3/layer.py``; trained tokens
``tuners/trainable_tokens/layer.py``; biases ``tuners/lora/layer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import numpy as np
import numpy.typing as npt

from fingerprint.checkpoint import DTYPE_BITS, Checkpoint
from fingerprint.derived_checkpoint import encode_finite
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import FLOAT_DTYPES, decode_floats
from fingerprint.lora.changes import BiasUpdate, Change, LowRank, Scaling, TokenRows, Update

__all__ = ["changed_pieces"]

_Floats = npt.NDArray[np.float32]
_Blocks = Callable[[], Iterator[tuple[int, _Floats]]]  # number of the first row, and rows [rows, columns]
_Operation = Callable[[int, _Floats], _Floats]


def changed_pieces(change: Change, base: Checkpoint, adapter: Checkpoint) -> Iterator[bytes]:
    """Yield the bytes of the tensor ``change.target`` of ``base`` as ``adapter`` changes it, in the base's type.

    Raises:
        CheckpointError: the type does not hold a value, or a file changed since it was checked.
    """
    entry = base.tensors[change.target]
    if change.saved is not None:
        _read_entry(adapter, change.saved, entry.shape)
    checkpoint, name = (base, change.target) if change.saved is None else (adapter, change.saved)
    blocks = _RowBlocks(checkpoint, name)
    change_rows = _operation(change.update, blocks, adapter, entry.shape)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # looked for when they are encoded
        for first, rows in blocks():
            yield encode_finite(change_rows(first, rows).reshape(-1), entry.dtype, change.target)


class _RowBlocks:
    """Rows of a tensor, in blocks of a few MiB; of a bias each value is a row."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __call__(self) -> Iterator[tuple[int, _Floats]]:
        entry = self._checkpoint.tensors[self._name]
        width = prod(entry.shape[1:])
        row_bytes, first, left = width * DTYPE_BITS[entry.dtype] // 8, 0, b""
        for piece in self._checkpoint.chunks(self._name):
            left += piece
            whole = len(left) // row_bytes
            if whole:
                yield first, decode_floats(left[: whole * row_bytes], entry.dtype).reshape(whole, width)
                first, left = first + whole, left[whole * row_bytes :]


def _operation(update: Update | None, blocks: _Blocks, adapter: Checkpoint, shape: tuple[int, ...]) -> _Operation:
    """Return what makes the changed rows of those that are there."""
    match update:
        case None:
            return lambda first, rows: rows
        case LowRank():
            return _low_rank(update, blocks, adapter, shape)
        case Scaling():
            return _scaling(update, adapter, shape)
        case TokenRows():
            return _token_rows(update, adapter, shape)
        case BiasUpdate():
            added = _values(adapter, update.bias, shape) * np.float32(update.scale)
            return lambda first, rows: rows + added[first : first + len(rows), None]


def _low_rank(update: LowRank, blocks: _Blocks, adapter: Checkpoint, shape: tuple[int, ...]) -> _Operation:
    """Return W + scale * B @ A, times m / its norm where there is a magnitude m."""
    height, width = shape
    if update.is_embedding:
        up = _values(adapter, update.down, (update.rank, height)).T
        down = _values(adapter, update.up, (width, update.rank)).T
    else:
        up = _values(adapter, update.up, (height, update.rank))
        down = _values(adapter, update.down, (update.rank, width))
    scale = np.float32(update.scale)

    def summed(first: int, rows: _Floats) -> _Floats:
        delta: _Floats = up[first : first + len(rows)] @ down
        delta *= scale
        return rows + delta

    if update.magnitude is None:
        return summed
    if not update.is_embedding:
        magnitude = _values(adapter, update.magnitude, (height,))

        def rescaled(first: int, rows: _Floats) -> _Floats:
            total = summed(first, rows)
            norms = np.sqrt(np.square(total, dtype=np.float64).sum(axis=1))
            factors: _Floats = (magnitude[first : first + len(rows)] / norms).astype(np.float32)
            return total * factors[:, None]

        return rescaled
    squares = np.zeros(width)
    for first, rows in blocks():
        squares += np.square(summed(first, rows), dtype=np.float64).sum(axis=0)
    factors = (_values(adapter, update.magnitude, (width,)) / np.sqrt(squares)).astype(np.float32)
    return lambda first, rows: summed(first, rows) * factors


def _scaling(update: Scaling, adapter: Checkpoint, shape: tuple[int, ...]) -> _Operation:
    if update.of_inputs:
        columns = _values(adapter, update.vector, (1, shape[1]))
        return lambda first, rows: rows * columns
    outputs = _values(adapter, update.vector, (shape[0], 1))
    return lambda first, rows: rows * outputs[first : first + len(rows)]


def _token_rows(update: TokenRows, adapter: Checkpoint, shape: tuple[int, ...]) -> _Operation:
    trained = _values(adapter, update.rows, (len(update.indices), shape[1]))
    order = np.argsort(update.indices)
    indices = np.asarray(update.indices)[order]

    def replaced(first: int, rows: _Floats) -> _Floats:
        begin, end = np.searchsorted(indices, (first, first + len(rows)))
        changed = rows.copy()
        changed[indices[begin:end] - first] = trained[order[begin:end]]
        return changed

    return replaced


def _values(adapter: Checkpoint, name: str, shape: tuple[int, ...]) -> _Floats:
    """Return a tensor of the adapter, of the shape that was checked, in float32."""
    dtype = _read_entry(adapter, name, shape)
    return decode_floats(adapter.read(name), dtype).reshape(shape)


def _read_entry(adapter: Checkpoint, name: str, shape: tuple[int, ...]) -> str:
    """Return the type of a tensor of the adapter; CheckpointError where it is not what was checked."""
    entry = adapter.tensors.get(name)
    if entry is None or entry.shape != shape or entry.dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"the adapter in {adapter.directory} was changed while read; merge it again")
    return entry.dtype
