"""Deltas of full fine-tunes: making one from two models, and writing base + delta out as a model.

Commands' one door to ``daemon.variants.compress`` and ``fingerprint.delta``: it finds models as every MODEL
argument is found.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from daemon.torch_engine.trimmed_imports import trimmed_imports
from fingerprint.checkpoint import Checkpoint
from fingerprint.delta import FORMATS, AdapterOrigin, export_delta, is_delta, open_delta, read_delta
from fingerprint.errors import CheckpointError, NotFoundError
from fingerprint.extras import need_extra
from fingerprint.safetensors_header import INDEX_FILE
from iserve.delta_loss import (
    JudgementDocument,
    TextsOfBoth,
    is_within,
    judgement_document,
    refuse,
    split_texts,
)
from iserve.merged_adapters import FineTune, fine_tune
from iserve.model_source import ModelSource, existing_path, plain_path, resolve
from iserve.quality.texts import TextFile, read_texts
from iserve.variants import is_adapter

if TYPE_CHECKING:
    from daemon.variants.compress import CalibrationTexts, CompressOrder, CompressResult

__all__ = [
    "CompressDocument",
    "CompressOptions",
    "ExportDocument",
    "MatrixDocument",
    "compress_variant",
    "export_variant",
    "formats_of",
    "is_fine_tune",
    "replaced_companions",
]

Source = TypeVar("Source", ModelSource, FineTune)


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixDocument:
    """Matrix whose changes were compressed."""

    name: str
    """Name of the base's tensor."""
    format: str
    """Format that its changes are kept in."""
    error: float
    """Relative squared error of what the change adds to outputs, on the calibration tokens."""
    weight_error: float
    """Relative squared error of the change itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressDocument:
    """Delta that was made."""

    folder: str
    """Folder of the delta."""
    base: str
    """Model that it is of."""
    base_sha256: str
    """Hash of the base's tensors; the delta fits no other."""
    finetuned: str
    """Model, or adapter, whose changes it has."""
    adapter: AdapterOrigin | None
    """Adapter that was merged into the base first; null: `finetuned` is a model."""
    content_hash: str
    """Hash of all that changes answers."""
    format: str
    """Format that was asked for."""
    matrices: tuple[MatrixDocument, ...]
    """Matrices whose changes were compressed."""
    num_exact: int
    """Norms and biases that are kept as they are."""
    num_unchanged: int
    """Tensors that are the base's."""
    num_above: int
    """Matrices whose error is above the one that was asked for even in the finest format; 0 where none was."""
    calibration_tokens: int
    """Tokens that the layers ran on."""
    is_random: bool
    """Whether they were random ones: no calibration file was given."""
    size_bytes: int
    """Bytes of the delta's folder."""
    finetuned_bytes: int
    """Bytes of the fine-tune's tensors."""
    units_found_done: int
    """Units that an interrupted command had done: embeddings, each layer, the output layer."""
    judgement: JudgementDocument | None
    """Choice of the format by what is lost on texts; null: no limit was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportDocument:
    """Checkpoint that an export wrote."""

    folder: str
    """Folder of the checkpoint."""
    base: str
    """Model that the delta was added to."""
    delta: str
    """Folder of the delta."""
    content_hash: str
    """Hash of all that changes answers."""
    num_changed: int
    """Tensors that differ from the base's."""
    num_tensors: int
    """Tensors of the checkpoint."""
    num_files: int
    """Safetensors files of the checkpoint."""
    size_bytes: int
    """Bytes of its tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressOptions:
    """Options of a delta that is made."""

    format_name: str  # one of ``fingerprint.delta.FORMATS``; with a limit of loss the first that is tried
    calibration: Path | None  # file of texts; None: random tokens
    max_error: float | None
    max_quality_loss: float | None = None  # nats per token
    text: Path | None = None  # file of the texts that judge the loss; None: a part of ``calibration``
    device: str = "cpu"  # that computes: or ``cuda``, ``cuda:N``


def compress_variant(
    base: str,
    finetuned: str,
    target: str,
    registered: Mapping[str, Path],
    options: CompressOptions,
    progress: Callable[[str, int, int], None] | None = None,
) -> CompressDocument:
    """Write to the folder ``target`` the delta of two MODEL arguments.

    Args:
        finetuned: a MODEL argument, or the folder of an adapter, whose merge with ``base`` is compressed.
        progress: called with what is counted, how much is done, and how much there is.

    Raises:
        MissingExtraError: torch is not installed.
        InfeasibleError: every format loses more than is allowed; nothing is left then.
        NotFoundError, BadInputError, ConflictError, UnavailableError: as ``compress_delta``, ``compress_within``,
            ``compute_device``, ``read_texts``, ``split_texts``, ``model_source.resolve`` and ``fine_tune``.
    """
    need_extra("torch", "compressing a fine-tune")
    calibration, judging = (
        None if file is None else read_texts(file.expanduser()) for file in (options.calibration, options.text)
    )
    limit = options.max_quality_loss
    both = None if limit is None else split_texts(calibration, judging)
    source, folder = _with_weights(resolve(base, registered)), _folder(target)

    with trimmed_imports():  # torch: seconds
        from daemon.variants.compress import CompressOrder, check_layers, compress_delta, compute_device

    device = compute_device(options.device)
    check = partial(check_layers, device=device)
    with fine_tune(finetuned, source, folder, registered, progress, check) as tuned:
        order = CompressOrder(
            base=source.directory,
            finetuned=_with_weights(tuned).directory,
            target=folder,
            format=FORMATS[options.format_name],
            calibration=_calibration(calibration, both),
            max_error=options.max_error,
            base_name=source.name,
            finetuned_name=tuned.name,
            adapter=tuned.adapter,
            device=device,
        )
        if both is None or limit is None:
            return _document(compress_delta(order, progress), order.target, None)
        return _compress_within(order, both, limit, progress)


def _calibration(file: TextFile | None, both: TextsOfBoth | None) -> CalibrationTexts | None:
    from daemon.variants.compress import CalibrationTexts

    if both is not None and both.calibration:
        texts = tuple(text.whole for text in both.calibration)
        return CalibrationTexts(sha256=both.calibration_sha256, texts=texts)
    if both is not None or file is None:
        return None
    return CalibrationTexts(sha256=file.sha256, texts=tuple(text.whole for text in file.texts))


def _compress_within(
    order: CompressOrder, both: TextsOfBoth, limit: float, progress: Callable[[str, int, int], None] | None
) -> CompressDocument:
    from daemon.variants.compress import JudgedText, JudgementTexts, compress_within

    judged = tuple(
        JudgedText("", text.text) if text.answer is None else JudgedText(text.text, text.answer)
        for text in both.judgement
    )
    texts = JudgementTexts(sha256=both.judgement_sha256, texts=judged)
    found = compress_within(order, texts, lambda trial: is_within(trial, limit), progress)
    judgement = judgement_document(both, found.trials, limit)
    if found.made is None:
        raise refuse(judgement)
    return _document(found.made, order.target, judgement)


def is_fine_tune(folder: str) -> bool:
    """Return whether a folder has a whole model, neither an adapter nor a delta."""
    path = existing_path(folder)
    if path is None or not path.is_dir() or is_delta(path) or is_adapter(folder):
        return False
    return (path / "config.json").is_file()


def _document(made: CompressResult, folder: Path, judgement: JudgementDocument | None) -> CompressDocument:
    manifest = made.manifest
    most, calibration = manifest.max_error, manifest.calibration
    return CompressDocument(
        folder=str(folder),
        base=manifest.base_name,
        base_sha256=manifest.base_sha256,
        finetuned=manifest.finetuned_name,
        adapter=manifest.adapter,
        content_hash=manifest.content_hash,
        format=manifest.format,
        matrices=tuple(
            MatrixDocument(name=each.name, format=each.format, error=each.error, weight_error=each.weight_error)
            for each in manifest.matrices
        ),
        num_exact=len(manifest.exact),
        num_unchanged=len(manifest.base) - len(manifest.changed),
        num_above=0 if most is None else sum(each.error > most for each in manifest.matrices),
        calibration_tokens=0 if calibration is None else calibration.num_tokens,
        is_random=calibration is not None and calibration.sha256 is None,
        size_bytes=made.num_bytes,
        finetuned_bytes=made.finetuned_bytes,
        units_found_done=made.units_found_done,
        judgement=judgement,
    )


def replaced_companions(folder: str) -> tuple[str, ...]:
    """Return the names of the files of a delta's fine-tune that a deployment of the base does not use."""
    if not is_delta(Path(folder)):
        return ()
    return tuple(each.name for each in open_delta(Path(folder)).manifest.companions)


def export_variant(
    base: str,
    delta: str,
    target: str,
    registered: Mapping[str, Path],
    progress: Callable[[int, int], None] | None = None,
) -> ExportDocument:
    """Write to the folder ``target`` the model of ``base``, a MODEL argument, with the delta in a folder added.

    Raises:
        NotFoundError: a folder that is not there.
        BadInputError, ConflictError, UnavailableError: as ``read_delta``, ``export_delta`` and
            ``model_source.resolve``.
    """
    path = existing_path(delta)
    if path is None:
        raise NotFoundError(f"there is no directory {delta[:200]!r}; give the folder of a delta")
    found = read_delta(Path(plain_path(str(path if path.is_dir() else path.parent))))
    source = _with_weights(resolve(base, registered))
    done = export_delta(source.directory, found, _folder(target), progress=progress)
    return ExportDocument(
        folder=str(done.directory),
        base=source.name,
        delta=str(found.folder),
        content_hash=found.manifest.content_hash,
        num_changed=done.num_changed,
        num_tensors=done.written.num_tensors,
        num_files=done.written.num_files,
        size_bytes=done.written.bytes_written,
    )


def formats_of(document: CompressDocument) -> str:
    """Return how many matrices have which format, such as ``int2 56, int4 1``."""
    counts = Counter(each.format for each in document.matrices)
    return ", ".join(f"{name} {counts[name]}" for name in FORMATS if name in counts)


def _folder(target: str) -> Path:
    return Path(plain_path(os.path.realpath(os.path.expanduser(target))))


def _with_weights(source: Source) -> Source:
    if not source.has_weights:
        if (source.directory / INDEX_FILE).is_file():
            Checkpoint.open(source.directory)  # names the file that is not there
        raise CheckpointError(
            f"{source.directory} has a config and no safetensors; give the whole checkpoint, not as pickle"
        )
    return source
