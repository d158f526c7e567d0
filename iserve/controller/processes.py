"""The controller's two companions, daemon and gateway: started when they are not there, found when they are.

Both are sessions of their own, so that they outlive the controller; they are known by the records they leave.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from daemon.process import ProcessRecord, is_alive, kill_group, read_record, spawn_detached
from daemon.procfs import start_time_ticks
from fingerprint.errors import UnavailableError
from iserve.settings import Settings

__all__ = ["Companion", "daemon_companion", "gateway_companion", "last_line"]

log = logging.getLogger(__name__)

_LOG_BYTES = 8 * 2**20
_RESPAWN_S = 1.0  # never more than one start in so long; after one that failed, twice as long
_MAX_RESPAWN_S = 30.0


class Companion:
    """One role of this home: a record file, and how to start a process for it."""

    def __init__(
        self, name: str, settings: Settings, argv: Sequence[str], *, start_timeout_s: float = 30.0
    ) -> None:
        self.name = name
        self._settings = settings
        self._argv = tuple(argv)
        self._start_timeout_s = start_timeout_s
        self._next_start_s = float("-inf")
        self._failures = 0  # starts in a row that came to nothing
        self._why = f"the {name} is starting"
        self.record_path = settings.run_folder / f"{name}.json"
        self.log_path = settings.log_folder / f"{name}.log"

    def record(self) -> ProcessRecord | None:
        """The record of the living process; None when none lives."""
        record = read_record(self.record_path)
        return record if is_alive(record) else None

    def ensure(self) -> ProcessRecord:
        """The living process's record, after starting one if needed.

        Raises:
            UnavailableError: it does not come up; the last line of its log is quoted.
        """
        record = self.record()
        if record is not None:
            self._failures = 0
            return record
        now_s = time.monotonic()
        if now_s < self._next_start_s:
            raise UnavailableError(self._why)
        self._next_start_s = now_s + min(_MAX_RESPAWN_S, _RESPAWN_S * 2.0**self._failures)
        try:
            return self._start()
        except UnavailableError as error:
            self._failures, self._why = self._failures + 1, str(error)
            raise

    def _start(self) -> ProcessRecord:
        try:
            self._settings.log_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _bound_log(self.log_path)
        except OSError as error:
            raise UnavailableError(f"cannot write {self.log_path}: {error.strerror}; mend the folder") from error
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
        pid = spawn_detached(self._argv, self.log_path, environment | self._settings.environment())
        log.info("started the %s, pid %d", self.name, pid)
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            record = self.record()
            if record is not None and record.pid == pid:
                return record
            if start_time_ticks(pid) is None:  # ended, reaped or not: in a container nobody may do that
                break
            time.sleep(0.05)
        else:
            kill_group(pid, grace_s=2.0)
        raise UnavailableError(
            f"the {self.name} did not come up: {last_line(self.log_path)} (log: {self.log_path})"
        )

    def stop(self, *, grace_s: float = 10.0) -> bool:
        """End it; True when nothing of it is left."""
        record = self.record()
        if record is None:
            return True
        gone = kill_group(record.pid, grace_s=grace_s)
        if gone:
            self.record_path.unlink(missing_ok=True)
        return gone


def daemon_companion(settings: Settings) -> Companion:
    argv = [sys.executable, "-m", "daemon", "--home", str(settings.home)]
    argv += ["--start-timeout", str(settings.start_timeout_s)]
    if settings.cpu_devices is not None:
        argv += ["--cpu-devices", str(settings.cpu_devices)]
    return Companion("daemon", settings, argv)


def gateway_companion(settings: Settings) -> Companion:
    argv = [sys.executable, "-m", "iserve.gateway", "--home", str(settings.home)]
    return Companion("gateway", settings, [*argv, "--host", settings.host, "--port", str(settings.port)])


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    return next((line for line in reversed(lines) if line), "it said nothing")


def _bound_log(path: Path) -> None:
    """Keep one older log when it has grown past 8 MiB."""
    if path.exists() and path.stat().st_size > _LOG_BYTES:
        path.replace(path.with_suffix(".log.1"))
