"""Compression of a full fine-tune to a delta of its base.

Memory: one layer of the fine-tune in float32 (with the embeddings at the first and the output layer at the last),
the hidden states of the calibration tokens, and for one matrix the base's, the change and what is kept of it, with
some matrices [inputs, inputs] in float64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from daemon.torch_engine.model.stage_model import ModelSource
from daemon.variants.compress.calibration import (
    MAX_TOKENS,
    CalibrationTexts,
    CalibrationTokens,
    random_tokens,
    tokenize,
)
from daemon.variants.compress.devices import begin_on, check_free, clear_out_of_memory, needed_device_bytes
from daemon.variants.compress.model_parts import ModelParts, read_common_source, sort_parts
from daemon.variants.compress.pair import CheckpointPair, open_pair, read_pair
from daemon.variants.compress.units import Compression, exact_bytes
from daemon.variants.compress.work_folder import UnitRecord, work_in
from fingerprint.codec import to_json
from fingerprint.companion_files import copy_files, differing_companions
from fingerprint.delta.formats import EMBEDDING_FORMAT, DeltaFormat
from fingerprint.delta.manifest import (
    MANIFEST_VERSION,
    AdapterOrigin,
    Calibration,
    CompanionRecord,
    DeltaManifest,
    checkpoint_hash,
)
from fingerprint.delta.reader import read_delta
from fingerprint.model_spec import ModelSpec

__all__ = [
    "CompressOrder",
    "CompressResult",
    "Prepared",
    "Progress",
    "compress_delta",
    "compress_prepared",
    "order_identity",
    "prepare",
    "result_of",
]

Progress = Callable[[str, int, int], None]  # what is counted, done so far, in all
_READING, _COMPRESSING = "MiB read", "matrices"
_SHOWN_LEFT_S = 60.0  # from which on the time that is left is shown
_LONG_S = 600.0  # from which on a GPU is worth a thought


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressOrder:
    """Delta to make."""

    base: Path
    finetuned: Path
    target: Path  # not there yet, or an empty folder
    format: DeltaFormat
    calibration: CalibrationTexts | None  # None: random tokens
    is_compensated: bool = True  # False: every value is rounded by itself, and no layer runs
    max_error: float | None  # of a matrix, beyond which it gets a finer format; None: any
    base_name: str
    finetuned_name: str
    adapter: AdapterOrigin | None = None  # that was merged into the base to make the fine-tune
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a value; work goes on with any other


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressResult:
    """Delta that was made."""

    manifest: DeltaManifest
    num_bytes: int  # of the files of its folder
    finetuned_bytes: int  # of the tensors of the fine-tune
    units_found_done: int  # of an earlier attempt: embeddings and exact tensors, each layer, the output layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Models of an order, read and compared, and its calibration tokens: the same for every format."""

    source: ModelSource  # the fine-tune in float32
    pair: CheckpointPair
    parts: ModelParts
    tokens: CalibrationTokens | None  # None: nothing is compensated


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Everything that the bytes of a delta depend on, but for the machine and the release of torch."""

    version: int
    base_sha256: str
    finetuned_sha256: str
    base_name: str
    finetuned_name: str
    calibration_sha256: str | None  # of the texts
    tokens_sha256: str | None  # that the fine-tune's tokenizer made of them
    is_compensated: bool
    max_tokens: int
    format: str
    max_error: float | None


def compress_delta(order: CompressOrder, progress: Progress | None = None) -> CompressResult:
    """Write the delta that ``order`` asks for. Killed or failed at any moment, the same call goes on.

    Raises:
        NotFoundError, ConfigError, CheckpointError, UnsupportedModelError, ConflictError, UnavailableError: as
            ``prepare`` and ``compress_prepared``.
    """
    report = progress or (lambda what, done, total: None)
    return compress_prepared(order, prepare(order, report), report)


def prepare(order: CompressOrder, report: Progress) -> Prepared:
    """Read and compare the two models of ``order``; nothing is written.

    Raises:
        NotFoundError, ConfigError, CheckpointError, UnsupportedModelError: as ``open_pair``,
            ``read_common_source``, ``read_pair``, ``sort_parts`` and ``tokenize``.
        UnavailableError: the device has too little memory.
    """
    with clear_out_of_memory(order.device):
        begin_on(order.device)
        return _prepare(order, report)


def _prepare(order: CompressOrder, report: Progress) -> Prepared:
    checkpoints = open_pair(order.base, order.finetuned)
    source = read_common_source(order.base, order.finetuned, order.device)
    pair = read_pair(*checkpoints, lambda done, total: report(_READING, done >> 20, total >> 20))
    parts = sort_parts(source, pair)
    for name in parts.exact:
        exact_bytes(name, pair)
    tokens = _tokens(order, source.spec) if order.is_compensated else None
    return Prepared(source=source, pair=pair, parts=parts, tokens=tokens)


def compress_prepared(order: CompressOrder, prepared: Prepared, report: Progress) -> CompressResult:
    """Write the delta that ``order`` asks for, of models that were read.

    Raises:
        CheckpointError: activations that are not finite; a tensor that changed since it was read; a disk that is
            full.
        ConflictError: the target is there already, or another process makes it.
        UnavailableError: the device has too little memory.
    """
    pair, parts, tokens = prepared.pair, prepared.parts, prepared.tokens
    with work_in(order.target, _job(order, prepared), _needed_bytes(order.format, pair, parts)) as work:
        num_found = len(work.done)
        if work.is_finished:
            found = result_of(order, prepared)
            work.remove()
            return found
        with clear_out_of_memory(order.device):
            check_free(order.device, needed_device_bytes(pair, parts, tokens))
            Compression(
                pair,
                parts,
                work,
                tokens=tokens,
                format_=order.format,
                max_error=order.max_error,
                device=order.device,
                on_matrix=lambda done, total, left_s: report(_compressing(left_s, order.device), done, total),
            ).run()
        companions = [order.finetuned / name for name in differing_companions(order.finetuned, order.base)]
        manifest = _manifest(order, pair, tokens, work.done, companions)
        work.finish(manifest, lambda folder: copy_files(companions, folder))
    return _result(manifest, order, pair, num_found)


def _compressing(left_s: float | None, device: torch.device) -> str:
    """Return what is counted, with the time that is left where that is worth saying."""
    if left_s is None or left_s < _SHOWN_LEFT_S:
        return _COMPRESSING
    left = f"{left_s / 3600:.1f} h" if left_s >= 2 * 3600 else f"{left_s / 60:.0f} min"
    advice = " on the CPU (--device takes a GPU)" if device.type == "cpu" and left_s > _LONG_S else ""
    return f"{_COMPRESSING}, about {left} left{advice}"


def result_of(order: CompressOrder, prepared: Prepared) -> CompressResult:
    """Return the result of an order whose delta is there, whole.

    Raises:
        NotFoundError, CheckpointError: as ``read_delta``.
    """
    num_units = len(prepared.parts.layers) + 2
    return _result(read_delta(order.target).manifest, order, prepared.pair, num_units)


def order_identity(order: CompressOrder, prepared: Prepared) -> str:
    """Return a hash of all that the deltas of an order depend on, its first format included."""
    return hashlib.sha256(_job(order, prepared)).hexdigest()


def _result(manifest: DeltaManifest, order: CompressOrder, pair: CheckpointPair, num_found: int) -> CompressResult:
    return CompressResult(
        manifest=manifest,
        num_bytes=sum(file.stat().st_size for file in order.target.iterdir()),
        finetuned_bytes=sum(entry.num_bytes for entry in pair.finetuned.tensors.values()),
        units_found_done=num_found,
    )


def _tokens(order: CompressOrder, spec: ModelSpec) -> CalibrationTokens:
    if order.calibration is None:
        return random_tokens(spec.vocab_size, spec.max_context_tokens, order.device)
    return tokenize(order.calibration, order.finetuned, spec.max_context_tokens, order.device)


def _job(order: CompressOrder, prepared: Prepared) -> bytes:
    pair, tokens = prepared.pair, prepared.tokens
    job = _Job(
        version=MANIFEST_VERSION,
        base_sha256=checkpoint_hash(pair.base_tensors),
        finetuned_sha256=pair.finetuned_sha256,
        base_name=order.base_name,
        finetuned_name=order.finetuned_name,
        calibration_sha256=None if order.calibration is None else order.calibration.sha256,
        tokens_sha256=None if tokens is None else tokens.sha256,
        is_compensated=order.is_compensated,
        max_tokens=MAX_TOKENS,
        format=order.format.name,
        max_error=order.max_error,
    )
    return to_json(job)


def _needed_bytes(format_: DeltaFormat, pair: CheckpointPair, parts: ModelParts) -> int:
    """Return the bytes of the tensors of a delta all of whose linears are in ``format_``."""

    def shape(name: str) -> tuple[int, int]:
        outputs, inputs = pair.base.tensors[name].shape
        return outputs, inputs

    linears = [name for layer in parts.layers for name in layer.values()]
    linears += [] if parts.head is None else [parts.head]
    return (
        sum(format_.matrix_bytes(shape(name)) for name in linears)
        + sum(EMBEDDING_FORMAT.matrix_bytes(shape(name)) for name in parts.embeddings.values())
        + sum(pair.base.tensors[name].num_bytes for name in parts.exact)
    )


def _manifest(
    order: CompressOrder,
    pair: CheckpointPair,
    tokens: CalibrationTokens | None,
    units: Sequence[UnitRecord],
    companions: Sequence[Path],
) -> DeltaManifest:
    calibration = None
    if tokens is not None:
        texts = None if order.calibration is None else order.calibration.sha256
        calibration = Calibration(sha256=texts, num_texts=tokens.num_texts, num_tokens=tokens.num_tokens)
    matrices = (matrix for unit in units for matrix in unit.matrices)
    exact = (tensor for unit in units for tensor in unit.exact)
    return DeltaManifest(
        version=MANIFEST_VERSION,
        format=order.format.name,
        max_error=order.max_error,
        base_name=order.base_name,
        base=pair.base_tensors,
        finetuned_name=order.finetuned_name,
        finetuned_sha256=pair.finetuned_sha256,
        calibration=calibration,
        matrices=tuple(sorted(matrices, key=lambda matrix: matrix.name)),
        exact=tuple(sorted(exact, key=lambda tensor: tensor.name)),
        companions=tuple(
            CompanionRecord(name=file.name, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
            for file in sorted(companions)
        ),
        adapter=order.adapter,
    )
