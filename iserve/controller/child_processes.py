"""Child processes of the controller, the daemon and the gateway: found where they run, else started.

Both are sessions of their own, so that they outlive the controller; they are known by the records they leave, and
until they have left one, by their command lines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from daemon.home import make_private
from daemon.log_rotation import move_if_large, why_silent
from daemon.process import ProcessRecord, is_alive, kill_group, read_record, spawn_detached
from daemon.procfs import ProcessStat, pids_with, sees, start_time_ticks, started_as
from fingerprint.errors import UnavailableError
from iserve.settings import Settings

__all__ = ["ChildProcess", "daemon_process", "end_controllers", "gateway_process", "last_line"]

log = logging.getLogger(__name__)

_RESPAWN_S = 1.0  # never more than one start in so long; after one that failed, twice as long
_MAX_RESPAWN_S = 30.0


class ChildProcess:
    """Process of one role of this home: a record file, and how to start a process for it.

    Args:
        program: how its command line begins, by which a process of this role, and of this home, is known.
        options: what follows; not every caller gives the same.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        program: Sequence[str],
        options: Sequence[str] = (),
        *,
        start_timeout_s: float = 30.0,
    ) -> None:
        self.name = name
        self._settings = settings
        self._program, self._options = tuple(program), tuple(options)
        self._start_timeout_s = start_timeout_s
        self._next_start_s = float("-inf")
        self._failures = 0  # starts in a row that failed
        self._why = f"the {name} is starting"
        self.record_path = settings.run_folder / f"{name}.json"
        self.log_path = settings.log_folder / f"{name}.log"

    def record(self) -> ProcessRecord | None:
        """Return the record of the living process; None when none lives."""
        record = read_record(self.record_path)
        return record if is_alive(record) else None

    def _found(self) -> tuple[ProcessStat, ...]:
        """Return those that run, with a record or not yet; this looks at every process's command line."""
        return _of_home(started_as(self._program[1:]), self._settings)

    def ensure(self) -> ProcessRecord:
        """Return the living process's record, after starting one if needed.

        One that is just starting, begun by a controller that was killed, is waited for: a second would be refused,
        or be the only one that has a record.

        Raises:
            UnavailableError: it does not start; the last line of its log is quoted.
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
        except (UnavailableError, OSError) as error:  # the second: /proc cannot be read
            said = isinstance(error, UnavailableError)
            self._failures += 1
            self._why = str(error) if said else f"the {self.name} cannot be looked for: {error}"
            raise UnavailableError(self._why) from error

    def _start(self) -> ProcessRecord:
        try:
            make_private(self._settings.log_folder)
            move_if_large(self.log_path)
        except OSError as error:
            raise UnavailableError(f"cannot write {self.log_path}: {error.strerror}; mend the folder") from error
        pid = next((stat.pid for stat in self._found() if stat.group_id == stat.pid), None)
        if pid is None:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
            argv = (*self._program, *self._options)
            settings = replace(self._settings, database_url=None)  # may hold a password: the controller's alone
            pid = spawn_detached(argv, self.log_path, environment | settings.environment())
            log.info("started the %s, pid %d", self.name, pid)
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            record = self.record()
            if record is not None:
                return record
            if start_time_ticks(pid) is None:  # ended, reaped or not: in a container no process may do that
                break
            time.sleep(0.05)
        else:
            kill_group(pid, grace_s=2.0)
        said = why_silent(self.log_path) or last_line(self.log_path)
        raise UnavailableError(f"the {self.name} did not start: {said} (log: {self.log_path})")

    def stop(self, *, grace_s: float = 10.0) -> bool:
        """End it, one that has no record yet as well; whether there was any.

        Raises:
            UnavailableError: it does not end.
        """
        return _end(self.name, self.record_path, self._found, grace_s)


def daemon_process(settings: Settings) -> ChildProcess:
    options = ["--start-timeout", str(settings.start_timeout_s)]
    if settings.cpu_devices is not None:
        options += ["--cpu-devices", str(settings.cpu_devices)]
    return ChildProcess("daemon", settings, _program("daemon", settings), options)


def gateway_process(settings: Settings) -> ChildProcess:
    options = ["--host", settings.host, "--port", str(settings.port), "--variant-policy", settings.variant_policy]
    return ChildProcess("gateway", settings, _program("iserve.gateway", settings), options)


def _program(module: str, settings: Settings) -> tuple[str, ...]:
    return (sys.executable, "-m", module, "--home", str(settings.home))


def end_controllers(settings: Settings, *, grace_s: float = 30.0) -> bool:
    """End this home's controller, one that has no record yet as well; whether there was any.

    Raises:
        UnavailableError: it does not end.
    """

    def found() -> tuple[ProcessStat, ...]:
        ours = frozenset(pids_with("ISERVE_HOME", str(settings.home)))
        controllers = started_as(("-m", "iserve.controller"))
        return _of_home((stat for stat in controllers if stat.pid in ours), settings)

    return _end("controller", settings.run_folder / "controller.json", found, grace_s)


def _of_home(found: Iterable[ProcessStat], settings: Settings) -> tuple[ProcessStat, ...]:
    """Return the processes of this home, without those of a container with a home of the same name."""
    return tuple(stat for stat in found if sees(stat.pid, settings.home))


def _end(name: str, record_path: Path, found: Callable[[], tuple[ProcessStat, ...]], grace_s: float) -> bool:
    """End the recorded process of a role, and all that ``found`` gives; whether there was any."""
    record = read_record(record_path)
    had_any, deadline = False, time.monotonic() + 2 * grace_s + 5
    while pids := {stat.pid for stat in found()} | ({record.pid} if record and is_alive(record) else set()):
        had_any = True
        if time.monotonic() > deadline:
            raise UnavailableError(f"the {name} (pid {min(pids)}) does not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    kill_group(pid, grace_s=grace_s)
                else:  # of another process's group, or still on its way to one of its own
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
    record_path.unlink(missing_ok=True)
    return had_any


def last_line(path: Path) -> str:
    """Return the last line of a log that says something."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"
    return next((line for line in reversed(lines) if line), "it said nothing")
