"""Deltas of one fine-tune in one format after another, until one loses little enough on texts.

    .OUT.trials/trials.json   what is made, and what each tried format lost; work of another is begun anew
    .OUT.trials/int3          delta that is tried, with its own work next to it; becomes OUT when it is accepted
    .OUT.trials/refused       delta that was refused, about to be removed

The folder is locked (flock) while it is worked in. Killed at any moment, the same call goes on with the formats
that were tried and the layers that are done.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from daemon.atomic_file import remove_stale_temporaries, sync_folder, write_file_atomically
from daemon.variants.compress.compressor import (
    CompressOrder,
    CompressResult,
    Prepared,
    Progress,
    compress_prepared,
    order_identity,
    prepare,
    result_of,
)
from daemon.variants.compress.devices import clear_out_of_memory
from daemon.variants.compress.judgement import JudgedTokens, JudgementTexts, TextLoss, judge, tokenize_judged
from daemon.variants.compress.work_folder import is_taken, lock_work, taken, work_folder_of
from fingerprint.codec import from_json, to_json
from fingerprint.delta.formats import FORMATS, DeltaFormat
from fingerprint.delta.reader import open_delta
from fingerprint.errors import BadInputError, CheckpointError
from fingerprint.output_file import why_not_written

__all__ = ["Trial", "TrialsResult", "compress_within"]

_RECORD = "trials.json"
_JUDGED = "layers judged"
Accepts = Callable[["Trial"], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Format that was tried."""

    format: str
    content_hash: str  # of its delta
    num_bytes: int  # of the files of its folder
    losses: tuple[TextLoss, ...]  # of each text that has a token to predict


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialsResult:
    """Formats that were tried, and the delta in the last one where that was accepted."""

    trials: tuple[Trial, ...]
    made: CompressResult | None  # None: none was accepted, and nothing is left


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    job: str
    trials: tuple[Trial, ...]


def compress_within(
    order: CompressOrder, texts: JudgementTexts, accepts: Accepts, progress: Progress | None = None
) -> TrialsResult:
    """Write the delta of ``order`` in the first format that ``accepts`` takes, from its own on to finer ones.

    Killed or failed at any moment, the same call goes on. ``accepts`` may differ from call to call.

    Raises:
        NotFoundError, ConfigError, CheckpointError, UnsupportedModelError, ConflictError, UnavailableError: as
            ``compress_delta``, ``tokenize_judged`` and ``judge``.
    """
    report = progress or (lambda what, done, total: None)
    folder = order.target.parent / f".{order.target.name}.trials"
    if is_taken(order.target) and not (folder / _RECORD).exists():
        raise taken(order.target)
    prepared = prepare(order, report)
    tokens = tokenize_judged(texts.texts, prepared)
    job = order_identity(order, prepared) + texts.sha256 + tokens.sha256
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_work(folder, order.target):
            return _Trials(order, prepared, tokens, folder, report).run(job, accepts)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {order.target}: {why_not_written(error, order.target.parent)}; what is done is kept in "
            f"{folder}, and the same command goes on with it"
        ) from error


class _Trials:
    """Trials of one order, in a folder whose lock is held."""

    def __init__(
        self, order: CompressOrder, prepared: Prepared, tokens: JudgedTokens, folder: Path, report: Progress
    ) -> None:
        self._order, self._prepared, self._tokens = order, prepared, tokens
        self._folder, self._report = folder, report

    def run(self, job: str, accepts: Accepts) -> TrialsResult:
        known = self._known(job)
        if is_taken(self._order.target):
            return self._finished(known, accepts)
        if known is None:
            self._begin(job)
        shutil.rmtree(self._folder / "refused", ignore_errors=True)
        tried = {trial.format: trial for trial in known or ()}
        done: list[Trial] = []
        for format_ in _finer_and_finer(self._order.format):
            order = replace(self._order, format=format_, target=self._folder / format_.name)
            trial, made = tried.get(format_.name), None
            if trial is None or accepts(trial):
                made = self._compress(order)
            if trial is None:
                trial = self._judge(order)
                tried[format_.name] = trial
                self._keep(job, tuple(tried.values()))
            done.append(trial)
            if made is not None and accepts(trial):
                self._accept(order.target)
                return TrialsResult(trials=tuple(done), made=made)
            self._refuse(order.target)
        self._remove()
        return TrialsResult(trials=tuple(done), made=None)

    def _known(self, job: str) -> tuple[Trial, ...] | None:
        """Return the trials of this job, or None where the folder has none or another's."""
        with suppress(OSError, BadInputError):
            record = from_json((self._folder / _RECORD).read_bytes(), _Record, what=_RECORD)
            if record.job == job:
                return record.trials
        return None

    def _begin(self, job: str) -> None:
        for entry in self._folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
        self._keep(job, ())

    def _finished(self, known: tuple[Trial, ...] | None, accepts: Accepts) -> TrialsResult:
        """Return the result of a call that was killed when the target had appeared."""
        with suppress(BadInputError):
            made = result_of(self._order, self._prepared)
            of_it = (trial for trial in known or () if trial.content_hash == made.manifest.content_hash)
            trial = next(of_it, None)
            if known is not None and trial is not None and accepts(trial):
                self._remove()
                return TrialsResult(trials=known[: known.index(trial) + 1], made=made)
        raise taken(self._order.target)

    def _compress(self, order: CompressOrder) -> CompressResult:
        if order.target.exists():  # whole, as it appeared in one step; a killed call may have left its work
            shutil.rmtree(work_folder_of(order.target), ignore_errors=True)
            return result_of(order, self._prepared)
        return compress_prepared(order, self._prepared, self._of_format(order))

    def _judge(self, order: CompressOrder) -> Trial:
        report, delta = self._of_format(order), open_delta(order.target)
        with clear_out_of_memory(order.device):
            losses = judge(
                self._prepared, delta, self._tokens, order.device, lambda done, total: report(_JUDGED, done, total)
            )
        return Trial(
            format=order.format.name,
            content_hash=delta.manifest.content_hash,
            num_bytes=sum(file.stat().st_size for file in order.target.iterdir()),
            losses=losses,
        )

    def _of_format(self, order: CompressOrder) -> Progress:
        return lambda what, done, total: self._report(f"{what}, {order.format.name}", done, total)

    def _keep(self, job: str, trials: tuple[Trial, ...]) -> None:
        write_file_atomically(self._folder / _RECORD, to_json(_Record(job=job, trials=trials)), mode=0o644)

    def _accept(self, delta: Path) -> None:
        target = self._order.target
        os.rename(delta, target)
        sync_folder(target.parent)
        self._remove()

    def _refuse(self, delta: Path) -> None:
        """Remove a delta: renamed first, so that it is never there in part."""
        shutil.rmtree(work_folder_of(delta), ignore_errors=True)
        if delta.exists():
            os.rename(delta, self._folder / "refused")
            shutil.rmtree(self._folder / "refused", ignore_errors=True)

    def _remove(self) -> None:
        """Remove the folder, the record last: until then the same call knows that it has finished."""
        for entry in self._folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
        remove_stale_temporaries(self._folder, _RECORD)
        (self._folder / _RECORD).unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()


def _finer_and_finer(format_: DeltaFormat) -> Iterator[DeltaFormat]:
    yield format_
    while format_.finer is not None:
        format_ = FORMATS[format_.finer]
        yield format_
