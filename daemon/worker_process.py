"""Folder and processes of one worker: start its shim, see what runs, end all of it. No policy, no HTTP.

No process is signalled on the word of a file alone: a lease outlives its processes (kill -9, a reboot, a restart
of a container on a volume), and their ids are given to others. :meth:`WorkerProcess.left` says what may be ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path

from daemon.atomic_file import remove_stale_temporaries, write_file_atomically
from daemon.engines.base import Command
from daemon.home import make_private
from daemon.lease import (
    COMMAND_FILE,
    EXIT_FILE,
    LEASE_FILE,
    LOCK_FILE,
    ExitRecord,
    Lease,
    LeaseFileError,
    ShimOrder,
    read_file,
    shim_is_alive,
    try_lock,
    write_file,
)
from daemon.port_owner import is_listening
from daemon.process import spawn_detached
from daemon.procfs import ProcessStat, is_running, pids_with, processes, sees, started_as
from daemon.settings import DaemonSettings
from daemon.worker_spec import WorkerSpec
from daemon.worker_token import read_token
from fingerprint.codec import from_json, to_json
from fingerprint.errors import BadInputError, UnavailableError

__all__ = ["COLD_FILE", "VERSIONS_FILE", "WORKER_MARK", "Phase", "WorkerProcess", "read_spec"]

log = logging.getLogger(__name__)

SPEC_FILE = "spec.json"
VERSIONS_FILE = "versions.json"  # of the engine, at the start of the process that runs
COLD_FILE = "cold"  # until the warm-up is over, of an engine that has one
_SHIM = "daemon.shim"  # the module
_FORMER_SHIM = "daemon.keeper"  # of a worker that a former release started
_SHIM_LOG = "shim.log"
WORKER_MARK = (
    "ISERVE_WORKER_FOLDER"  # in the environment of all that a worker starts, whatever session it moves to
)
_KEEPS_MARK = {"SPT_NOENV": "1"}  # has setproctitle, by which vLLM names its processes, leave environments alone
_SHIM_START_S = 10.0  # a shim that has not locked its folder by then never will
_POLL_S = 0.05


class Phase(Enum):
    """Observed phase of a worker's processes."""

    STARTING = "starting"  # the shim is there, the engine not yet
    RUNNING = "running"
    ENDING = "ending"  # the engine is gone, the shim not yet
    ENDED = "ended"


def _config_hash(spec_json: bytes) -> str:
    """Return the hash of the file as it was written: another version of this program knows other fields."""
    return hashlib.sha256(spec_json).hexdigest()[:16]


def read_spec(folder: Path, lease: Lease) -> WorkerSpec:
    """Read the spec.

    Raises BadInputError: missing, damaged, another worker's, or not what the lease was started with.
    """
    try:
        text = (folder / SPEC_FILE).read_bytes()
    except OSError as error:
        raise BadInputError(f"{folder / SPEC_FILE} cannot be read: {error}") from error
    if _config_hash(text) != lease.config_hash:
        raise BadInputError(f"{folder / SPEC_FILE} is not the one it was started with")
    spec = from_json(text, WorkerSpec, what=str(folder / SPEC_FILE))
    if spec.worker_id != folder.name:
        raise BadInputError(f"{folder / SPEC_FILE} is of worker {spec.worker_id}")
    return spec


@dataclass(slots=True)
class WorkerProcess:
    """The processes of one worker, through its restarts. One caller acts at a time; :meth:`look` is for all."""

    folder: Path
    lease: Lease | None = None
    _spawned_at_s: float = 0.0
    _past: Lease | None = None  # of the start before this one
    _seen: Phase | None = None  # at the last look

    def start(self, spec: WorkerSpec, command: Command, cores: tuple[int, ...], settings: DaemonSettings) -> None:
        """Write the orders and start a shim, which starts the engine.

        Raises:
            UnavailableError: the folder cannot be written or no process can be made; nothing runs then.
        """
        spec_json = to_json(spec, indent=2)
        order = ShimOrder(
            worker_id=spec.worker_id,
            argv=list(command.argv),
            env=dict(command.env) | {WORKER_MARK: str(self.folder)} | _KEEPS_MARK,
            cores=list(cores),
            port=spec.port,
            config_hash=_config_hash(spec_json),
            lease_ttl_s=float(spec.lease_ttl_s),
            grace_s=float(settings.stop_grace_s),
            log_max_bytes=settings.log_max_bytes,
            log_files=settings.log_files,
            log_tail_bytes=settings.log_tail_bytes,
        )
        self._past = self.lease or self._read_lease()  # a look while files are exchanged must not take it up
        self.lease = None
        try:
            make_private(self.folder.parent)
            make_private(self.folder)
            for name in (LEASE_FILE, EXIT_FILE, "startup_error.json"):
                (self.folder / name).unlink(missing_ok=True)
            write_file_atomically(self.folder / SPEC_FILE, spec_json)
            for name, text in command.files:
                write_file_atomically(self.folder / name, text.encode())
            write_file(self.folder / COMMAND_FILE, order)
        except OSError as error:
            self.mark_ended()
            raise UnavailableError(
                f"cannot write {self.folder}: {error.strerror or error}; free space or mend the folder"
            ) from error
        try:
            spawn_detached([sys.executable, "-m", _SHIM, str(self.folder)], self.folder / _SHIM_LOG)
        except UnavailableError:
            self.mark_ended()
            raise
        self._spawned_at_s, self._seen = time.monotonic(), Phase.STARTING

    def look(self) -> Phase:
        """Return the phase of the processes now; take up a lease that has appeared.

        A look that fails (no file descriptor is left, say) shows nothing: the last phase seen is kept.

        Raises:
            UnavailableError: the first look of all fails.
        """
        try:
            self._seen = self._look()
        except OSError as error:
            why = f"worker {self.folder.name}: its processes cannot be looked at: {error.strerror or error}"
            if self._seen is None:
                raise UnavailableError(f"{why}; try again") from error
            log.warning("%s; taken to be %s as before", why, self._seen.value)
        return self._seen

    def _look(self) -> Phase:
        if self.lease is None:
            self.lease = self._read_lease()
        if self._engine_runs():
            return Phase.RUNNING
        if shim_is_alive(self.folder):
            return Phase.ENDING if self.lease is not None else Phase.STARTING
        if self.lease is None and not (self.folder / EXIT_FILE).exists() and self._may_still_appear():
            return Phase.STARTING
        return Phase.ENDED

    def _engine_runs(self) -> bool:
        lease = self.lease
        return lease is not None and is_running(lease.pid, lease.start_time_ticks, lease.boot_id)

    def _shim_runs(self) -> bool:
        """Return whether the leased shim runs, by its id; :func:`shim_is_alive` needs no lease."""
        lease = self.lease
        return lease is not None and is_running(lease.shim_pid, lease.shim_start_time_ticks, lease.boot_id)

    def _may_still_appear(self) -> bool:
        return time.monotonic() - self._spawned_at_s < _SHIM_START_S and (self.folder / COMMAND_FILE).exists()

    def _read_lease(self) -> Lease | None:
        with contextlib.suppress(LeaseFileError):
            lease = read_file(self.folder / LEASE_FILE, Lease)
            if lease.worker_id == self.folder.name and lease != self._past:
                return lease
        return None

    def renew(self) -> None:
        """Put off the lease's end. A lease file that cannot be touched is left to run out."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / LEASE_FILE)

    def versions(self) -> tuple[tuple[str, str], ...]:
        """Return the engine's versions at the start of its process; empty where an older daemon started it."""
        try:
            text = (self.folder / VERSIONS_FILE).read_bytes()
            return from_json(text, tuple[tuple[str, str], ...], what=VERSIONS_FILE)
        except (OSError, BadInputError):
            return ()

    def token(self) -> str | None:
        """Read the token that its clients send; None where an older daemon started it."""
        try:
            return read_token(self.folder)
        except OSError:
            return None

    def is_cold(self) -> bool:
        """Return whether a warm-up is due or under way; False where an older daemon started the worker."""
        return (self.folder / COLD_FILE).exists()

    def note_warm(self) -> None:
        """Record that the warm-up is over. Where that cannot be written, the next daemon repeats it."""
        with contextlib.suppress(OSError):
            (self.folder / COLD_FILE).unlink(missing_ok=True)

    def exit_record(self) -> ExitRecord | None:
        """Return the shim's last word; None when it was killed before it could say it."""
        with contextlib.suppress(LeaseFileError):
            return read_file(self.folder / EXIT_FILE, ExitRecord)
        return None

    def shim_log_tail(self) -> str:
        """Return the shim's own error output."""
        with contextlib.suppress(OSError):
            return (self.folder / _SHIM_LOG).read_bytes()[-2000:].decode(errors="replace").strip()
        return ""

    def owns(self, stat: ProcessStat) -> bool:
        """Return whether a process is of the worker's session, by its shim's id.

        That identifies a running worker's: while a process of a session lives, the kernel gives its id to no
        other.
        """
        lease = self.lease
        return (
            lease is not None
            and stat.session_id == lease.shim_pid
            and stat.start_time_ticks >= lease.shim_start_time_ticks
        )

    def pids(self) -> frozenset[int]:
        """Return running processes of the worker, the shim's own not counted, while its shim or engine runs.

        Raises:
            OSError: /proc cannot be read whole.
        """
        if not (self._engine_runs() or self._shim_runs()):
            return frozenset()
        return self._session()

    def _session(self) -> frozenset[int]:
        shim_pid = None if self.lease is None else self.lease.shim_pid
        return frozenset(stat.pid for stat in processes() if self.owns(stat) and stat.pid != shim_pid)

    def left(self) -> frozenset[int]:
        """Return every process that is proved to be the worker's: the one function that says what may be killed.

        Those that carry the worker's mark in their environment, whatever session they moved to; and the whole
        session of the leased shim, while that shim or the engine runs (id, start time and boot are as leased)
        or a marked process is in it. Reads every process's environment.

        Raises:
            OSError: /proc cannot be read whole.
        """
        marked = {pid for pid in pids_with(WORKER_MARK, str(self.folder)) if sees(pid, self.folder)}
        session = self._session()
        is_ours = bool(session & marked) or self._engine_runs() or self._shim_runs()
        return frozenset(marked) | (session if is_ours else frozenset())

    def listens_on(self, port: int) -> bool | None:
        """Return whether one of the worker's processes listens on a port; None where that cannot be seen.

        A process that left the worker's session is looked for only where none in it listens.
        """
        try:
            return is_listening(self.pids(), port) or is_listening(self.left(), port)
        except OSError:
            return None

    def kill_engine(self) -> None:
        """Kill every process of the worker but the shim, which then writes how it ended.

        Raises:
            OSError: /proc cannot be read whole; nothing was killed.
        """
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def end(self, *, grace_s: float) -> bool:
        """End everything: the shim is asked to (SIGTERM, grace, SIGKILL); what it leaves is killed. Blocks.

        Returns:
            Whether nothing is left; False only for a process that the kernel will not let die, or while /proc
            cannot be read.

        Raises:
            UnavailableError: the first look of all fails.
        """
        self._ask_to_end(time.monotonic() + grace_s + 5.0)
        deadline = time.monotonic() + 5.0
        while True:
            with contextlib.suppress(OSError):  # nothing is known now: looked at again
                if self.kill_what_is_left():
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def _ask_to_end(self, deadline_s: float) -> None:
        """Have the shim end the worker, and wait for that."""
        asked = False
        while (phase := self.look()) is not Phase.ENDED and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                if self.lease is None:
                    (self.folder / COMMAND_FILE).unlink(missing_ok=True)  # a shim that has not read it stops there
                elif not asked or (phase is Phase.RUNNING and not shim_is_alive(self.folder)):
                    self._ask_shim()
                    asked = True
            time.sleep(_POLL_S)

    def kill_what_is_left(self) -> bool:
        """Return True once nothing is there; else kill what is.

        Raises:
            OSError: /proc cannot be read whole.
        """
        is_kept = shim_is_alive(self.folder)
        if not is_kept and not self.left() and self._look() is Phase.ENDED:
            self._seen = Phase.ENDED
            return True
        if is_kept:  # maybe only now: one that was slow to begin finds its orders withdrawn and ends
            self._kill_shim()
        self.kill_engine()
        return False

    def _kill_shim(self) -> None:
        """Kill a shim that is deaf, or that has no lease yet and is stuck; the kernel then kills the engine."""
        shims = (started_as(("-m", module, str(self.folder))) for module in (_SHIM, _FORMER_SHIM))
        for stat in chain.from_iterable(shims):
            if sees(stat.pid, self.folder):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(stat.pid, signal.SIGKILL)

    def _ask_shim(self) -> None:
        assert self.lease is not None
        if self._shim_runs():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.lease.shim_pid, signal.SIGTERM)
        else:
            self.kill_engine()

    def withdraw(self) -> None:
        """Make sure that no shim starts from the orders that lie in the folder, now or later."""
        with contextlib.suppress(OSError), try_lock(self.folder / LOCK_FILE) as ours:
            if ours:
                (self.folder / COMMAND_FILE).unlink(missing_ok=True)

    def mark_ended(self) -> None:
        """Leave only the spec, the logs and the last message; such a folder belongs to no worker any more."""
        for name in (COMMAND_FILE, LEASE_FILE):
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    def remove_stale_temporaries(self) -> None:
        """Remove what a daemon or a shim left that was killed while it wrote."""
        remove_stale_temporaries(self.folder, SPEC_FILE, VERSIONS_FILE, COMMAND_FILE, LEASE_FILE, EXIT_FILE)

    def remove(self) -> None:
        """Delete the folder with its logs."""
        shutil.rmtree(self.folder, ignore_errors=True)
