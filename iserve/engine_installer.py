"""Installing and removing engines in environments of their own under the home.

An installation that is interrupted at any moment, by ``kill -9`` as well, is unfinished and never used. The same
command begins it anew, and takes from the cache of pip or uv what was downloaded before.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import TextIO

from daemon.atomic_file import write_file_atomically
from daemon.engines.environments import EngineEnvironment, environment_of, exact_version
from daemon.engines.external import ExternalEngine
from daemon.engines.registry import get_engine
from daemon.process_tree import set_parent_death_signal
from daemon.procfs import running_from
from fingerprint.codec import to_json
from fingerprint.errors import ConfigError, ConflictError, EngineError, NotFoundError, UnavailableError
from fingerprint.extras import install_extra
from fingerprint.sanitize import printable
from iserve.engine_inventory import deployments_on
from iserve.settings import Settings

__all__ = ["install", "installable", "remove"]

Tell = Callable[[str], None]

_SHOWN = re.compile(r"(Collecting|Downloading|Building|Installing|Successfully|Resolved|Prepared|Installed) \S.*")
_NOT_FOUND = re.compile(r"No matching distribution|No solution found|Could not find a version|Failed to fetch")
_MAX_LINE_CHARACTERS = 100
_MAX_REASON_CHARACTERS = 500
_KEPT_LINES = 50
_HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # of iServe's own environment


def install(settings: Settings, engine: str, version: str | None, tell: Tell) -> EngineEnvironment:
    """Install ``version`` of ``engine``, or the recommended one, in an environment of its own.

    Args:
        tell: is given a line for each step.

    Raises:
        ConfigError: not an engine that is installed so, or not an exact version.
        ConflictError: it is installed there, or being installed.
        EngineError: a command failed; the message quotes it and names its log.
    """
    adapter = installable(engine)
    wanted = exact_version(version or adapter.recommended_version)
    environment = environment_of(settings.home, engine, wanted)
    log_path = settings.log_folder / f"install-{engine}-{wanted}.log"
    for folder in (settings.home, environment.folder.parent, log_path.parent):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(environment) as lock:
        if environment.complete:
            raise ConflictError(
                f"{engine} {wanted} is installed already, in {environment.folder}; `iserve engines rm {engine} "
                f"{wanted}` removes it"
            )
        if environment.folder.exists():
            tell("an earlier installation was interrupted; it is begun anew")
            shutil.rmtree(environment.folder)
        distribution = adapter.interpreter.distribution
        try:
            with log_path.open("w", encoding="utf-8") as log:
                for command in _commands(environment, f"{distribution}=={wanted}"):
                    reason = _run(command, lock, log, tell)
                    if reason is not None:
                        said = f"{engine} {wanted} was not installed: {reason} (log: {log_path})"
                        raise EngineError(said + _advice(command, reason))
            if not _has(environment, distribution):
                raise EngineError(f"{engine} {wanted} is not in {environment.folder} after all (log: {log_path})")
        except BaseException:
            shutil.rmtree(environment.folder, ignore_errors=True)
            raise
        record = {"engine": engine, "version": wanted, "installed_at": time.time()}
        write_file_atomically(environment.marker, to_json(record))
    return environment


def remove(settings: Settings, engine: str, version: str) -> None:
    """Remove an environment under the home, an unfinished one as well.

    Raises:
        NotFoundError: there is none of that version.
        ConflictError: a deployment uses it, or it is being installed.
    """
    adapter = installable(engine)
    environment = environment_of(settings.home, engine, exact_version(version))
    if not environment.folder.is_dir():
        what = f"{engine} {environment.version}"
        raise NotFoundError(
            f"there is no {what} in {environment.folder}; `iserve engines` lists what is installed"
        )
    with _locked(environment):
        if environment.complete:
            _check_unused(environment, adapter, settings)
        environment.marker.unlink(missing_ok=True)  # unfinished from here on, should the next step be interrupted
        try:
            shutil.rmtree(environment.folder)
        except OSError as error:
            raise UnavailableError(f"{environment.folder} cannot be removed: {error.strerror or error}") from error


def installable(engine: str) -> ExternalEngine:
    """Return the adapter of an engine that :func:`install` knows.

    Raises:
        ConfigError: there is no such engine, or it is installed otherwise; the message says how.
    """
    adapter = get_engine(engine)
    if isinstance(adapter, ExternalEngine) and adapter.interpreter.installable:
        return adapter
    if isinstance(adapter, ExternalEngine):
        how = f"install it by hand and set {adapter.interpreter.variable} to the Python of its environment"
    else:
        how = install_extra(engine)
    raise ConfigError(f"engine {engine} is not installed by this command: {how}")


def _check_unused(environment: EngineEnvironment, adapter: ExternalEngine, settings: Settings) -> None:
    what = f"{environment.engine} {environment.version}"
    if names := deployments_on(environment, adapter, settings):
        raise ConflictError(
            f"{what} serves the deployments {', '.join(names)}; remove them first (`iserve rm NAME`), or install "
            "the version that is to serve them"
        )
    if pids := [stat.pid for stat in running_from(environment.folder)]:
        raise ConflictError(
            f"{what} is running (process {', '.join(map(str, pids[:5]))}); restart or remove what it serves first"
        )


@contextmanager
def _locked(environment: EngineEnvironment) -> Iterator[int]:
    """Hold the environment's lock, whose descriptor the commands inherit: they may outlive this process."""
    path = environment.folder.with_name(f".{environment.folder.name}.lock")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConflictError(
                f"{environment.engine} {environment.version} is being installed or removed by another process; "
                "wait for its end"
            ) from error
        yield lock
    finally:
        os.close(lock)


def _commands(environment: EngineEnvironment, requirement: str) -> tuple[tuple[str, ...], ...]:
    """Return what makes the environment and fills it: uv where it is there, else venv and pip."""
    folder, python = str(environment.folder), str(environment.python)
    uv = shutil.which("uv")
    if uv is not None:
        return (
            (uv, "venv", "--python", sys.executable, folder),
            (uv, "pip", "install", "--python", python, requirement),
        )
    install = ("--disable-pip-version-check", "--no-input", "install", "--progress-bar", "off", requirement)
    if find_spec("pip") is not None:
        pip = (sys.executable, "-m", "pip", "--python", python)
        return (sys.executable, "-m", "venv", "--without-pip", folder), (*pip, *install)
    return (sys.executable, "-m", "venv", folder), (python, "-m", "pip", *install)


def _run(command: Sequence[str], lock: int, log: TextIO, tell: Tell) -> str | None:
    """Run one command to its end and return why it failed, or None.

    Its output goes to ``log``, its steps to ``tell``. It ends with this process, however this process ends.
    """
    tail: deque[str] = deque(maxlen=_KEPT_LINES)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if name not in _HIDDEN},
        pass_fds=(lock,),
        preexec_fn=partial(set_parent_death_signal, signal.SIGKILL),
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                text = printable(line.strip())
                if text:
                    tail.append(text)
                if _SHOWN.fullmatch(text):
                    tell(text if len(text) <= _MAX_LINE_CHARACTERS else f"{text[: _MAX_LINE_CHARACTERS - 3]}...")
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return None
    return _reason(list(tail)) or f"{command[0]} ended with {process.returncode} and said nothing"


def _reason(lines: Sequence[str]) -> str:
    """Return the last error that pip or uv named, with its causes, which uv names below it; else the last line."""
    errors = [at for at, line in enumerate(lines) if line.lower().startswith("error: ")]
    said = " ".join(lines[errors[-1] :]).partition(": ")[2] if errors else "".join(lines[-1:])
    return said[:_MAX_REASON_CHARACTERS]


def _advice(command: Sequence[str], reason: str) -> str:
    """Return how another index or a folder of wheels is named, where what was asked for was not found."""
    if not _NOT_FOUND.search(reason):
        return ""
    if os.path.basename(command[0]) == "uv":
        index, more, folder = "UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS"
    else:
        index, more, folder = "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"
    return (
        f"; is the network up, and does the index have it for this Python? {index} names another index, {more} "
        f"one to ask as well, {folder} a folder of wheels: set one and run the command again"
    )


def _has(environment: EngineEnvironment, distribution: str) -> bool:
    packages = [str(path) for path in environment.folder.glob("lib/python*/site-packages")]
    return any(True for _ in metadata.distributions(name=distribution, path=packages))
