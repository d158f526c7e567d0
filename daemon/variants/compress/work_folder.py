"""Work of a compression that is not finished: the units that are done, each a file of tensors and its record.

    .OUT.compressing/job.json            what is being made; work of another job is begun anew
    .OUT.compressing/records/00003.json  tensors of unit 3 and their hashes; written after its file
    .OUT.compressing/delta/              becomes OUT when it is whole

A unit is done when its record is there and its file has the hashes of the record. The folder is locked (flock)
while it is worked in. Killed at any moment, the same command goes on after the last unit that is done.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from daemon.atomic_file import remove_stale_temporaries, sync, sync_folder, write_file_atomically
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import from_json, to_json
from fingerprint.delta.manifest import MANIFEST_FILE, DeltaManifest, ExactTensor, MatrixRecord
from fingerprint.delta.reader import codes_name, scales_name
from fingerprint.errors import BadInputError, CheckpointError, ConflictError
from fingerprint.output_file import why_not_written
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from fingerprint.tensor_hash import tensor_hash

__all__ = ["UnitRecord", "WorkFolder", "is_taken", "lock_work", "taken", "unit_file", "work_folder_of", "work_in"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRecord:
    """Unit that is done: embeddings and all exact tensors, a layer, or the output layer."""

    unit: int
    matrices: tuple[MatrixRecord, ...]
    exact: tuple[ExactTensor, ...]


def unit_file(unit: int) -> str:
    """Return the name of the file of a unit's tensors."""
    return f"delta-{unit:05d}.safetensors"


def work_folder_of(target: Path) -> Path:
    """Return the folder of the work for ``target``."""
    return target.parent / f".{target.name}.compressing"


def is_taken(target: Path) -> bool:
    """Return whether ``target`` is there and is not an empty directory."""
    return os.path.lexists(target) and not (target.is_dir() and not os.listdir(target))


@contextmanager
def work_in(target: Path, job: bytes, needed_bytes: int) -> Iterator[WorkFolder]:
    """Yield the work for ``target``, which is kept when the block ends early.

    Args:
        job: identity of what is made, and of all that its bytes depend on.
        needed_bytes: that are to be written, an estimate.

    Raises:
        ConflictError: ``target`` is there already and is not an empty directory, or another command makes it.
        CheckpointError: the disk is full or cannot be written.
    """
    folder = work_folder_of(target)
    try:
        has_target = is_taken(target)
        if has_target and _read(folder / "job.json") != job:
            with suppress(OSError):
                folder.rmdir()  # the last that a killed command left, where it is empty
            raise taken(target)
        folder.mkdir(parents=True, exist_ok=True)
        with lock_work(folder, target):
            work = WorkFolder(folder, target)
            if has_target and work.delta.exists():  # the target is another's
                raise taken(target)
            if has_target:
                work.is_finished = True
            else:
                work.begin(job, needed_bytes)
            yield work
    except OSError as error:
        raise CheckpointError(
            f"cannot write {target}: {why_not_written(error, target.parent)}; what is done is kept in {folder}, "
            "and the same command goes on with it"
        ) from error


@contextmanager
def lock_work(folder: Path, target: Path) -> Iterator[None]:
    """Hold the lock of a folder of work for ``target``.

    Raises:
        ConflictError: another command has it.
    """
    busy = ConflictError(f"another command is making {target}; wait for it, or choose another name")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise busy from error
        if not folder.exists() or _is_other(folder, handle):
            raise busy  # finished, and removed, between the two calls
        yield
    finally:
        os.close(handle)


def _is_other(folder: Path, handle: int) -> bool:
    return not os.path.samestat(folder.stat(), os.fstat(handle))


class WorkFolder:
    """Units of one target, done and to do. Made by :func:`work_in`, which holds its lock."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._folder, self._target = folder, target
        self._delta, self._records = folder / "delta", folder / "records"
        self.done: tuple[UnitRecord, ...] = ()
        self.is_finished = False  # the target is there, whole; a command was killed before it had cleaned up

    @property
    def delta(self) -> Path:
        """Folder of the finished units' files."""
        return self._delta

    def begin(self, job: bytes, needed_bytes: int) -> None:
        """Find the units that are done, and remove everything else; errors of :func:`work_in`."""
        if _read(self._folder / "job.json") != job:
            for folder in (self._delta, self._records):
                shutil.rmtree(folder, ignore_errors=True)
            write_file_atomically(self._folder / "job.json", job, mode=0o644)
        self._delta.mkdir(exist_ok=True)
        self._records.mkdir(exist_ok=True)
        self.done = tuple(self._whole_units())
        self._remove_rest()
        written = sum(file.stat().st_size for file in self._delta.iterdir())
        free = shutil.disk_usage(self._folder).free
        if free < needed_bytes - written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _whole_units(self) -> Iterator[UnitRecord]:
        """Yield the records of the units that are done, up to the first that is not."""
        unit = 0
        while (raw := _read(self._record(unit))) is not None:
            try:
                record = from_json(raw, UnitRecord, what="a record")
                is_whole = record.unit == unit and _is_whole(self._delta / unit_file(unit), record)
            except (BadInputError, KeyError):  # of another release, or damaged
                return
            if not is_whole:
                return
            yield record
            unit += 1

    def _remove_rest(self) -> None:
        """Remove what a killed command left half-made, and units after a damaged one."""
        records = {self._record(record.unit) for record in self.done}
        files = {self._delta / unit_file(record.unit) for record in self.done}
        for folder, kept in ((self._records, records), (self._delta, files)):
            for entry in folder.iterdir():
                if entry not in kept:
                    entry.unlink()

    def finish_unit(self, record: UnitRecord, tensors: Sequence[OutputTensor]) -> None:
        """Write the tensors of a unit, then its record. Neither is there in part."""
        if tensors:
            file = self._delta / unit_file(record.unit)
            part = file.with_suffix(".part")
            try:
                write_safetensors(part, tensors)
                sync(part)
                os.replace(part, file)
            except OSError:
                part.unlink(missing_ok=True)
                raise
            sync_folder(self._delta)
        write_file_atomically(self._record(record.unit), to_json(record), mode=0o644)
        self.done = (*self.done, record)

    def finish(self, manifest: DeltaManifest, companions: Callable[[Path], None]) -> None:
        """Write the manifest and have the folder appear as the target."""
        companions(self._delta)
        write_file_atomically(self._delta / MANIFEST_FILE, to_json(manifest, indent=1) + b"\n", mode=0o644)
        for file in self._delta.iterdir():
            sync(file)
        try:
            os.rename(self._delta, self._target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise taken(self._target) from error
            raise
        sync_folder(self._target.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the work, the job last: until then the same command knows that it has finished."""
        shutil.rmtree(self._records, ignore_errors=True)
        remove_stale_temporaries(self._folder, "job.json")
        with suppress(OSError):
            (self._folder / "job.json").unlink()
            self._folder.rmdir()

    def _record(self, unit: int) -> Path:
        return self._records / f"{unit:05d}.json"


def _is_whole(file: Path, record: UnitRecord) -> bool:
    """Return whether ``file`` has the tensors of ``record``; KeyError where one is missing."""
    if not record.matrices and not record.exact:
        return True
    try:
        found = Checkpoint.of_file(file)
        expected = {tensor.name: tensor.sha256 for tensor in record.exact}
        for matrix in record.matrices:
            expected |= {codes_name(matrix.name): matrix.codes, scales_name(matrix.name): matrix.scales}
        for name, sha256 in expected.items():
            entry = found.tensors[name]
            if tensor_hash(entry.dtype, entry.shape, found.chunks(name)) != sha256:
                return False
    except CheckpointError:
        return False
    return True


def _read(file: Path) -> bytes | None:
    with suppress(FileNotFoundError):
        return file.read_bytes()
    return None


def taken(target: Path) -> ConflictError:
    """Return the error on a target that is there already."""
    return ConflictError(f"{target} is there already; remove it or choose another name")
