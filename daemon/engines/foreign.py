"""Engines that live in an environment of their own: the Python they are installed for, and the guard around them.

The engine is never imported: its version is read from the metadata of the distributions installed beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from daemon.engines.base import WorkerSpec
from fingerprint.capability import EngineCapabilities
from fingerprint.errors import EngineError

__all__ = ["ForeignEngine", "Installation", "Interpreter", "guarded"]

_ANSWER_S = 20.0  # a cold file system takes a few; a program that is no Python may never end
_MAX_ANSWER_BYTES = 1 << 16

_QUESTION = """\
import json, sys
from importlib import metadata
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
print(json.dumps({"versions": versions, "path": [entry for entry in sys.path if entry]}))
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """An interpreter in which the engine is installed."""

    python: str
    versions: tuple[tuple[str, str], ...]  # of the distributions asked for that are there

    def version(self, distribution: str) -> str:
        """Empty for one that is not there."""
        return dict(self.versions).get(distribution, "")


class Interpreter:
    """Where an engine is installed: the program that ``variable`` names, else the running interpreter.

    Args:
        variable: of the environment, such as ``ISERVE_VLLM_PYTHON``.
        distribution: the engine's; without it the interpreter is not the engine's.
        beside: distributions whose versions are recorded too.
    """

    def __init__(self, variable: str, distribution: str, beside: tuple[str, ...] = ()) -> None:
        self.variable, self.distribution, self._names = variable, distribution, (distribution, *beside)
        self._lock = threading.Lock()
        self._known: dict[str, tuple[object, dict[str, str | None]]] = {}  # by interpreter, with its stamp
        self._path: dict[str, tuple[str, ...]] = {}

    def find(self) -> Installation:
        """Asked anew only when a distribution was installed or removed there since.

        Raises:
            EngineError: the engine is not installed, or the setting does not name a Python; says what to set.
        """
        python = os.environ.get(self.variable)
        if not python:
            versions = {name: _version_here(name) for name in self._names}
            if versions[self.distribution] is None:
                raise EngineError(
                    f"{self.distribution} is not installed: set {self.variable} to the Python of an environment "
                    "that has it"
                )
            return _installation(sys.executable, versions)
        python = str(Path(python).expanduser())
        if os.sep in python and not os.path.isabs(python):  # each process has a working directory of its own
            raise EngineError(f"{self.variable}={python} is a relative path; give the whole path of a Python")
        versions = self._versions(python)
        if versions[self.distribution] is None:
            raise EngineError(
                f"{self.distribution} is not installed for {self.variable}={python}: install it there, or set "
                f"{self.variable} to the Python of an environment that has it"
            )
        return _installation(python, versions)

    def _versions(self, python: str) -> dict[str, str | None]:
        with self._lock:
            known = self._known.get(python)
            if known is None or known[0] != self._stamp(python):
                versions, path = self._ask(python)
                self._path[python] = path
                self._known[python] = known = (self._stamp(python), versions)
            return known[1]

    def _stamp(self, python: str) -> object:
        """Changes with what is installed: metadata folders come and go with each version."""
        return tuple(_modified_ns(entry) for entry in (python, *self._path.get(python, ())))

    def _ask(self, python: str) -> tuple[dict[str, str | None], tuple[str, ...]]:
        what = f"{self.variable}={python}"
        try:
            done = subprocess.run(
                [python, "-E", "-c", _QUESTION, *self._names],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd="/",
                timeout=_ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"{what} did not answer within {_ANSWER_S:.0f} s; set {self.variable} to a Python"
            ) from error
        except (OSError, ValueError) as error:
            raise EngineError(f"{what} cannot be run: {error}; set {self.variable} to a Python") from error
        try:
            answer = json.loads(done.stdout[:_MAX_ANSWER_BYTES])
            versions = {name: answer["versions"][name] for name in self._names}
            path = tuple(str(entry) for entry in answer["path"])
        except (ValueError, KeyError, TypeError) as error:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise EngineError(
                f"{what} is not a Python that can be asked for its packages"
                + (f" ({said[-1][:200]})" if said else "")
            ) from error
        return versions, path


def _installation(python: str, versions: dict[str, str | None]) -> Installation:
    return Installation(python, tuple((name, version) for name, version in versions.items() if version))


def _version_here(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _modified_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


class ForeignEngine(ABC):
    """What adapters of such engines share: whether the engine is there, what it then runs, and of which versions.

    Args:
        table: what it runs where it is installed.
        interpreter: the one it is installed for.
    """

    def __init__(self, table: EngineCapabilities, interpreter: Interpreter) -> None:
        self.name = table.engine
        self.interpreter = interpreter
        self._table = table

    @abstractmethod
    def check(self, found: Installation) -> None:
        """Raises EngineError: what is installed there is not what this adapter knows; says what to install."""

    def installed(self) -> Installation:
        """Raises EngineError: it is not there, or not as :meth:`check` wants it."""
        found = self.interpreter.find()
        self.check(found)
        return found

    def capabilities(self) -> EngineCapabilities:
        try:
            self.installed()
        except EngineError as error:
            return replace(self._table, unavailable=str(error))
        return self._table

    def versions(self) -> tuple[tuple[str, str], ...]:
        try:
            found = self.installed()
        except EngineError:
            return ()
        own = self.interpreter.distribution
        beside = ((name, version) for name, version in found.versions if name != own)
        return (("engine", f"{self.name} {found.version(own)}"), *beside)


def guarded(spec: WorkerSpec, argv: tuple[str, ...], *, python_path: str = "") -> tuple[str, ...]:
    """``argv`` under our guard (``daemon.engines.guard``).

    The guard refuses a port that is in use (exit code 98), ends every process of the engine with the engine, with
    itself and with the keeper, and hides our own ``PYTHONPATH`` from the engine's interpreter.

    Args:
        python_path: the engine's ``PYTHONPATH`` instead.
    """
    path = ("--python-path", python_path) if python_path else ()
    where = ("--host", spec.host, "--port", str(spec.port))
    return (sys.executable, "-m", "daemon.engines.guard", *where, *path, "--", *argv)
