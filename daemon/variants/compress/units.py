"""Units of a delta, in turn: embeddings and exact tensors, each layer, the output layer.

DeltaZip's algorithm 1 (arXiv 2312.05215): a layer is compressed for the inputs that the layers before it make once
they are reconstructed, base + kept change. What is kept is read back as it is written, so that a command that goes
on computes with the same values as one that was never interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from daemon.variants.compress.calibration import CalibrationTokens
from daemon.variants.compress.layer_walk import LayerWalk
from daemon.variants.compress.model_parts import ModelParts
from daemon.variants.compress.pair import CheckpointPair, HashedCheckpoint
from daemon.variants.compress.solver import Compressed, Curvature, compress_matrix, relative_error, second_moment
from daemon.variants.compress.work_folder import UnitRecord, WorkFolder, unit_file
from fingerprint.checkpoint import Checkpoint
from fingerprint.delta.formats import EMBEDDING_FORMAT, FORMATS, DeltaFormat
from fingerprint.delta.manifest import ExactTensor, MatrixRecord
from fingerprint.delta.packing import pack_codes, pad_scales
from fingerprint.delta.reader import CODES_DTYPE, SCALES_DTYPE, codes_name, read_change, scales_name
from fingerprint.errors import CheckpointError
from fingerprint.float_bytes import decode_floats, encode_floats
from fingerprint.safetensors_writer import OutputTensor
from fingerprint.tensor_hash import tensor_hash

__all__ = ["Compression", "exact_bytes", "read_matrix"]

_MAX_CHANGE = 1e15  # of a weight; the sums of weighted squares that scales are chosen by stay finite in float32
OnMatrix = Callable[[int, int, float | None], None]  # matrices that are done, in all; seconds left where known


@dataclass(frozen=True, slots=True)
class _Kept:
    """Compressed matrix: its record and its tensors."""

    record: MatrixRecord
    outputs: tuple[OutputTensor, OutputTensor]


class Compression:
    """Work on one delta.

    Args:
        tokens: that the layers run on; None: every value is rounded by itself.
        max_error: of a matrix, beyond which it gets a finer format.
    """

    def __init__(
        self,
        pair: CheckpointPair,
        parts: ModelParts,
        work: WorkFolder,
        *,
        tokens: CalibrationTokens | None,
        format_: DeltaFormat,
        max_error: float | None,
        device: torch.device,
        on_matrix: OnMatrix,
    ) -> None:
        self._pair, self._parts, self._work, self._tokens = pair, parts, work, tokens
        self._format, self._max_error, self._device, self._on_matrix = format_, max_error, device, on_matrix
        self._num_done = 0
        self._time_left = _TimeLeft(parts, pair, work)
        self._head_inputs: torch.Tensor | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """Do every unit that is not done.

        Raises:
            CheckpointError: activations that are not finite, changes that no format keeps, or a tensor that
                changed since the pair was read.
            OSError: the disk is full.
        """
        for record in self._work.done:
            for _ in record.matrices:
                self._count(None)
        if not self._is_done(0):
            embeddings = [self._compress(name, None)[0] for name in sorted(self._parts.embeddings.values())]
            self._finish(0, embeddings, self._parts.exact)
        hidden: torch.Tensor | None = None
        for layer in range(len(self._parts.layers)):
            hidden = self._do_layer(layer, hidden)
        if not self._is_done(len(self._parts.layers) + 1):
            head = self._parts.head
            self._finish(len(self._parts.layers) + 1, [] if head is None else [self._compress_head(head)])

    def _do_layer(self, layer: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Do the unit of a layer, and return what the next one gets; None where nothing is asked of it."""
        linears, is_done = self._parts.layers[layer], self._is_done(layer + 1)
        if not is_done:
            self._time_left.begin_layer(linears.values())
        if self._tokens is None or not self._is_needed(layer):
            if not is_done:
                self._finish(layer + 1, [self._compress(name, None)[0] for name in linears.values()])
            return None
        walk = self._walk(layer)
        if is_done:
            records = {record.name: record for record in self._work.done[layer + 1].matrices}
            for module, name in linears.items():
                walk.replace(module, self._base(name) + self._read_back(records[name]))
            outputs = walk.run(hidden, lambda module, inputs: True)
        else:
            outputs = self._compress_layer(layer, walk, hidden)
        if walk.is_last:
            self._head_inputs, outputs = outputs, None
        return outputs

    def _compress_layer(self, layer: int, walk: LayerWalk, hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Compress the linears of a layer, each before it computes, and return the layer's outputs."""
        left, kept = dict(self._parts.layers[layer]), []
        is_followed = self._is_needed(layer + 1)
        seen, curvature = None, None

        def visit(module: str, inputs: torch.Tensor) -> bool:
            nonlocal seen, curvature
            name = left.pop(module, None)
            if name is not None:
                if inputs is not seen:
                    seen, curvature = inputs, None  # the former one's memory is free
                    curvature = self._curvature(inputs, name)
                made, weight = self._compress(name, curvature)
                walk.replace(module, weight)
                kept.append(made)
            return is_followed or bool(left)

        outputs = walk.run(hidden, visit)
        self._finish(layer + 1, kept + [self._compress(name, None)[0] for name in left.values()])
        return outputs

    def _is_done(self, unit: int) -> bool:
        return unit < len(self._work.done)

    def _is_needed(self, layer: int) -> bool:
        """Return whether a matrix of this layer or behind it is still to be compressed."""
        layers, head = self._parts.layers, self._parts.head
        of_layers = any(linears and not self._is_done(at + 1) for at, linears in enumerate(layers) if at >= layer)
        return of_layers or (head is not None and not self._is_done(len(layers) + 1))

    def _walk(self, layer: int) -> LayerWalk:
        assert self._tokens is not None
        walk = LayerWalk(self._parts.source, layer, self._tokens, self._device)
        self._pair.finetuned.check_files()
        if layer == 0:
            records = {record.name: record for record in self._work.done[0].matrices}
            for module, name in self._parts.embeddings.items():
                walk.embed(module, self._base(name) + self._read_back(records[name]))
        return walk

    def _compress_head(self, name: str) -> _Kept:
        inputs, self._head_inputs = self._head_inputs, None
        return self._compress(name, None if inputs is None else self._curvature(inputs, name))[0]

    def _curvature(self, inputs: torch.Tensor, name: str) -> Curvature:
        hessian = second_moment(inputs.flatten(0, -2))
        if not torch.isfinite(hessian).all():
            raise CheckpointError(
                f"the inputs of {name} are not finite on the calibration texts; the fine-tune does not compute "
                "with them, or a layer was damaged: take an earlier one"
            )
        return Curvature.of(hessian)

    def _compress(self, name: str, curvature: Curvature | None) -> tuple[_Kept, torch.Tensor]:
        """Return a matrix in its format, and the weight that it reconstructs. The format is that of embeddings, or
        the coarsest from the one asked for on whose error is small enough.
        """
        is_embedding = name in self._parts.embeddings.values()
        format_ = EMBEDDING_FORMAT if is_embedding else self._format
        base = self._base(name)
        change = self._change(name, base)
        while True:
            kept, values = _kept(name, change, curvature, format_, self._file_of_next())
            finer = format_.finer
            if self._max_error is None or kept.record.error <= self._max_error or finer is None:
                break
            format_ = FORMATS[finer]
        self._count(self._time_left.after(name))
        return kept, values.add_(base)

    def _change(self, name: str, base: torch.Tensor) -> torch.Tensor:
        change = self._finetuned(name).sub_(base)
        if not change.abs().max() <= _MAX_CHANGE:  # infinite, too
            raise CheckpointError(
                f"tensor {name[:200]!r} differs from the base's by more than {_MAX_CHANGE:g}, which no format "
                "keeps; the training diverged, or a file is damaged: take an earlier fine-tune"
            )
        return change

    def _file_of_next(self) -> str:
        return unit_file(len(self._work.done))

    def _finish(self, unit: int, matrices: Sequence[_Kept], exact: Sequence[str] = ()) -> None:
        kept = sorted(matrices, key=lambda each: each.record.name)
        outputs = [output for each in kept for output in each.outputs]
        records = []
        for name in exact:
            record, output = _exact(name, self._pair, unit_file(unit))
            records.append(record)
            outputs.append(output)
        matrix_records = tuple(each.record for each in kept)
        self._work.finish_unit(UnitRecord(unit=unit, matrices=matrix_records, exact=tuple(records)), outputs)

    def _count(self, left_s: float | None) -> None:
        self._num_done += 1
        self._on_matrix(self._num_done, self._parts.num_matrices, left_s)

    def _read_back(self, record: MatrixRecord) -> torch.Tensor:
        file = Checkpoint.of_file(self._work.delta / record.file)
        return torch.from_numpy(read_change(file, record)).to(self._device)

    def _base(self, name: str) -> torch.Tensor:
        return read_matrix(self._pair.base, name).to(self._device)

    def _finetuned(self, name: str) -> torch.Tensor:
        return read_matrix(self._pair.finetuned, name).to(self._device)


class _TimeLeft:
    """Seconds that the linears that are not done will take, by those of the layers that were compressed here."""

    def __init__(self, parts: ModelParts, pair: CheckpointPair, work: WorkFolder) -> None:
        found = {matrix.name for unit in work.done for matrix in unit.matrices}
        linears = [name for layer in parts.layers for name in layer.values() if name not in found]
        linears += [name for name in (parts.head,) if name is not None and name not in found]
        self._weights = {name: float(np.prod(pair.base.tensors[name].shape)) for name in linears}
        self._left = sum(self._weights.values())
        self._started, self._own = 0.0, set[str]()  # of the layer that is compressed: linears that are not done
        self._timed_weights, self._timed_s, self._s_per_weight = 0.0, 0.0, 0.0  # of layers that were compressed

    def begin_layer(self, names: Iterable[str]) -> None:
        """Begin to count the time of a layer. That of one which was found done and runs again is not counted."""
        self._started, self._own = time.perf_counter(), set(names)
        self._timed_weights += sum(self._weights[name] for name in self._own)

    def after(self, name: str) -> float | None:
        """Return the seconds that are left once ``name`` is done; None before a whole layer is."""
        weights = self._weights.get(name)
        if weights is None:  # embeddings, which are rounded: no time to go by
            return None
        self._left -= weights
        if name in self._own:
            self._own.remove(name)
            if not self._own:
                self._timed_s += time.perf_counter() - self._started
                self._s_per_weight = self._timed_s / self._timed_weights
        return self._left * self._s_per_weight if self._s_per_weight else None


def exact_bytes(name: str, pair: CheckpointPair) -> bytes:
    """Return a tensor of the fine-tune in the base's type.

    Raises:
        CheckpointError: that type does not hold its values, or the tensor changed since the pair was read.
    """
    before, after = pair.base.tensors[name], pair.finetuned.tensors[name]
    raw = pair.finetuned.read(name)
    if before.dtype == after.dtype:
        return raw
    values = decode_floats(raw, after.dtype)
    converted = encode_floats(values, before.dtype)
    if not np.array_equal(decode_floats(converted, before.dtype), values):
        raise CheckpointError(
            f"tensor {name[:200]!r} of {pair.finetuned.directory} is {after.dtype} and has values that the base's "
            f"{before.dtype} does not hold; it is kept as it is: save the fine-tune in {before.dtype}"
        )
    return converted


def _exact(name: str, pair: CheckpointPair, file: str) -> tuple[ExactTensor, OutputTensor]:
    entry, raw = pair.base.tensors[name], exact_bytes(name, pair)
    sha256 = tensor_hash(entry.dtype, entry.shape, [raw])
    record = ExactTensor(name=name, dtype=entry.dtype, shape=entry.shape, file=file, sha256=sha256)
    return record, _output(name, entry.dtype, entry.shape, raw)


def _kept(
    name: str, change: torch.Tensor, curvature: Curvature | None, format_: DeltaFormat, file: str
) -> tuple[_Kept, torch.Tensor]:
    """Return a matrix in a format, and the change that it keeps."""
    found = compress_matrix(change, curvature, format_)
    codes, scales = _tensors(name, found, format_)
    values = found.values(format_)
    outputs, inputs = change.shape
    record = MatrixRecord(
        name=name,
        shape=(outputs, inputs),
        format=format_.name,
        error=relative_error(change, values, curvature),
        weight_error=relative_error(change, values, None),
        file=file,
        codes=tensor_hash(codes.dtype, codes.shape, codes.pieces()),
        scales=tensor_hash(scales.dtype, scales.shape, scales.pieces()),
    )
    return _Kept(record, (codes, scales)), values


def _tensors(name: str, found: Compressed, format_: DeltaFormat) -> tuple[OutputTensor, OutputTensor]:
    words = pack_codes(found.codes.cpu().numpy(), format_.bits)
    scales = pad_scales(found.scales.cpu().numpy())
    return (
        _output(codes_name(name), CODES_DTYPE, words.shape, words.astype("<u2").tobytes()),
        _output(scales_name(name), SCALES_DTYPE, scales.shape, encode_floats(scales, SCALES_DTYPE)),
    )


def _output(name: str, dtype: str, shape: tuple[int, ...], raw: bytes) -> OutputTensor:
    return OutputTensor(name, dtype, shape, len(raw), lambda: (raw,))


def read_matrix(checkpoint: HashedCheckpoint, name: str) -> torch.Tensor:
    """Return a tensor of floats in float32, on the CPU; errors of ``HashedCheckpoint.read``."""
    entry = checkpoint.tensors[name]
    values = decode_floats(checkpoint.read(name), entry.dtype).reshape(entry.shape)
    return torch.from_numpy(values if values.flags.writeable else values.copy())
