"""Engines in an environment of their own: the Python they are installed for, and the wrapper around them.

The engine is never imported: its version is read from the metadata of the distributions installed with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from daemon.engine_options import EngineOptions, refuse_options
from daemon.engines import lookup
from daemon.engines.base import Burst
from daemon.engines.environments import environments, is_version
from daemon.engines.lookup import look
from daemon.home import home_folder
from daemon.profile_messages import ProfileLoad
from daemon.worker_spec import WorkerSpec
from fingerprint.capability import EngineCapabilities
from fingerprint.errors import EngineError, InfeasibleError, SilentEngineError

__all__ = [
    "PROFILING_PATH",
    "ExternalEngine",
    "Installation",
    "Interpreter",
    "Source",
    "profiling_worker",
    "wrapped",
]

# The engine's PYTHONPATH of a profiling worker; vLLM finds the step timer there as a plugin.
PROFILING_PATH = str(Path(__file__).parents[1] / "profiling_worker")

_ANSWER_S = 20.0  # a cold file system takes a few; a program that is no Python may never end
_MAX_ANSWER_BYTES = 1 << 16

_QUESTION = Path(lookup.__file__).read_text(encoding="utf-8")

Source = Literal["setting", "environment", "here"]


@dataclass(frozen=True, slots=True)
class Installation:
    """An interpreter in which the engine is installed."""

    python: str
    versions: tuple[tuple[str, str], ...]  # of the distributions asked for that are there
    packages: Mapping[str, Path] = field(default_factory=dict)  # the folder of each that is imported from one
    is_editable: bool = (
        False  # installed by ``pip install -e``: whatever its version says, its sources may be different
    )
    source: Source = "here"  # named by the setting, an environment under the home, or the running interpreter

    def version(self, distribution: str) -> str:
        """Return the version of a distribution; empty for one that is not there."""
        return dict(self.versions).get(distribution, "")

    def package(self, distribution: str) -> Path:
        """Return the folder that its package is imported from.

        Raises:
            EngineError: there is none.
        """
        try:
            return self.packages[distribution]
        except KeyError:
            there = f"the metadata of {distribution}" if self.version(distribution) else f"no {distribution}"
            raise EngineError(f"{self.python} has {there} and no package of it; install it there anew") from None


@dataclass(frozen=True, slots=True)
class _Answer:
    """Answer of an interpreter to ``lookup``."""

    versions: dict[str, str | None]
    packages: dict[str, Path]
    is_editable: bool
    path: tuple[str, ...]  # where the interpreter looks for modules


@dataclass(frozen=True, slots=True)
class _Place:
    """A Python that may have the engine, and how messages call it."""

    python: str
    source: Source
    name: str
    remedy: str  # what to do where it has not


class Interpreter:
    """Python interpreter that an engine is installed for.

    The first of: the program that ``variable`` names; the newest environment that ``iserve engines install`` made
    under the home; the running interpreter. All are looked at anew each time, so that an installation is found by
    processes that run already.

    Args:
        variable: of the environment, such as ``ISERVE_VLLM_PYTHON``.
        distribution: the engine's; without it the interpreter is not the engine's.
        beside: distributions whose versions are recorded too.
        installable: whether ``iserve engines install`` knows the engine, under the distribution's name.
    """

    def __init__(
        self, variable: str, distribution: str, beside: tuple[str, ...] = (), *, installable: bool = False
    ) -> None:
        self.variable, self.distribution, self._names = variable, distribution, (distribution, *beside)
        self.installable = installable
        self._lock = threading.Lock()
        self._known: dict[str, tuple[object, _Answer]] = {}  # by interpreter, with its stamp

    def find(self, version: str | None = None) -> Installation:
        """Return the installation to start workers with.

        An interpreter is asked anew only when a distribution was installed or removed there since.

        Args:
            version: the one that is needed, wherever it is; None: the first installation.

        Raises:
            EngineError: the engine is not installed, or the setting does not name a Python; says what to set.
            SilentEngineError: a Python that may have it does not answer now.
        """
        if version is not None:
            return self._find_version(version)
        return self._look(next(self._places()))

    def installations(self) -> tuple[Installation, ...]:
        """Return all that are there, the first to be used first."""
        return self.survey()[0]

    def survey(self) -> tuple[tuple[Installation, ...], tuple[SilentEngineError, ...]]:
        """Return all that are there, the first to be used first, and what other places do not answer."""
        found, silent = [], []
        for place in self._places():
            try:
                found.append(self._look(place))
            except SilentEngineError as error:
                silent.append(error)
            except EngineError:
                continue
        return tuple(found), tuple(silent)

    def _find_version(self, version: str) -> Installation:
        there, silent = self.survey()
        for found in there:
            if is_version(found.version(self.distribution), version):
                return found
        others = ", ".join(found.version(self.distribution) for found in there)
        if silent:
            raise SilentEngineError(f"whether {self.distribution} {version} is installed is unknown: {silent[0]}")
        raise EngineError(
            f"{self.distribution} {version} is not installed here (there is {others or 'none'}): "
            f"{self._how_to_install(f' --version {version}')}"
        )

    def _places(self) -> Iterator[_Place]:
        """Yield where the engine is looked for, in order."""
        named = os.environ.get(self.variable)
        if named:
            python = str(Path(named).expanduser())
            name = f"{self.variable}={python}"
            yield _Place(python, "setting", name, f"install it there, or {self._how_to_set}")
        if self.installable:
            for one in environments(home_folder(), self.distribution):
                if one.complete:
                    again = f"run `iserve engines install {one.engine} --version {one.version}` again"
                    yield _Place(str(one.python), "environment", f"the environment {one.folder}", again)
        yield _Place(sys.executable, "here", "", self._how_to_install())

    @property
    def _how_to_set(self) -> str:
        return f"set {self.variable} to the Python of an environment that has it"

    def _how_to_install(self, options: str = "") -> str:
        command = f"run `iserve engines install {self.distribution}{options}`, or "
        return (command if self.installable else "") + self._how_to_set

    def _look(self, place: _Place) -> Installation:
        """Look at ``place``.

        Raises:
            EngineError: the engine is not there, or ``place`` is no Python.
            SilentEngineError: it does not answer now.
        """
        python, name = place.python, place.name
        if place.source == "here":
            answer = _read_answer({**look(list(self._names)), "path": []}, self._names)
        elif os.sep in python and not os.path.isabs(python):  # each process has a working directory of its own
            raise EngineError(f"{name} is a relative path; give the whole path of a Python")
        else:
            answer = self._answer(place)
        if answer.versions[self.distribution] is None:
            if place.source == "here":
                raise EngineError(f"{self.distribution} is not installed: {place.remedy}")
            raise EngineError(f"{self.distribution} is not installed for {name}: {place.remedy}")
        versions = tuple((name, version) for name, version in answer.versions.items() if version)
        return Installation(python, versions, answer.packages, answer.is_editable, place.source)

    def _answer(self, place: _Place) -> _Answer:
        python = place.python
        with self._lock:
            known = self._known.get(python)
            if known is None or known[0] != _stamp(python, known[1]):
                answer = self._ask(place)
                self._known[python] = known = (_stamp(python, answer), answer)
            return known[1]

    def _ask(self, place: _Place) -> _Answer:
        what = place.name
        remedy = f"set {self.variable} to a Python" if place.source == "setting" else place.remedy
        try:
            done = subprocess.run(
                [place.python, "-E", "-c", _QUESTION, *self._names],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd="/",
                timeout=_ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SilentEngineError(f"{what} did not answer within {_ANSWER_S:.0f} s; {remedy}") from error
        except OSError as error:  # where its file is may be mounted later
            raise SilentEngineError(f"{what} cannot be run: {error}; {remedy}") from error
        except ValueError as error:
            raise EngineError(f"{what} cannot be run: {error}; {remedy}") from error
        try:
            return _read_answer(json.loads(done.stdout[:_MAX_ANSWER_BYTES]), self._names)
        except (ValueError, KeyError, TypeError) as error:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise EngineError(
                f"{what} is not a Python that can be asked for its packages"
                + (f" ({said[-1][:200]})" if said else "")
            ) from error


def _read_answer(answer: dict[str, Any], names: tuple[str, ...]) -> _Answer:
    """Return ``answer`` with its types checked.

    Raises:
        ValueError, KeyError, TypeError: ``answer`` is none.
    """
    packages = answer["packages"]
    return _Answer(
        versions={name: answer["versions"][name] for name in names},
        packages={name: Path(packages[name]) for name in names if packages[name] is not None},
        is_editable=bool(answer["is_editable"]),
        path=tuple(str(entry) for entry in answer["path"]),
    )


def _stamp(python: str, answer: _Answer) -> object:
    """Return what changes with what is installed: metadata folders appear and go with each version."""
    return tuple(_modified_ns(entry) for entry in (python, *answer.path))


def _modified_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


class ExternalEngine(ABC):
    """Base of adapters of such engines: whether the engine is there, what it then runs, and of which versions.

    Args:
        table: what it runs where it is installed.
        interpreter: the one it is installed for.
    """

    recommended_version = ""  # what `iserve engines install` takes where no version is asked for

    def __init__(self, table: EngineCapabilities, interpreter: Interpreter) -> None:
        self.name = table.engine
        self.interpreter = interpreter
        self.table = table
        self._version: str | None = None  # that the engine is pinned to; None: the first installation's

    @abstractmethod
    def check(self, found: Installation) -> None:
        """Raise EngineError if this adapter does not know what is installed there; it says what to install."""

    def standing(self, found: Installation) -> str:
        """Return how far ``found`` is verified: ``run`` on a GPU, ``read`` in its sources, or ``unknown``."""
        return "unknown"

    def pinned(self, version: str | None) -> Self:
        if version is None:
            return self
        try:
            self.installed(version)
        except SilentEngineError:
            raise
        except EngineError as error:
            raise InfeasibleError(str(error)) from error
        engine = copy(self)
        engine._version = version
        return engine

    def installed(self, version: str | None = None) -> Installation:
        """Return the installation of ``version``; None: of the version it is pinned to, else the first.

        Raises:
            EngineError: it is not there, or not as :meth:`check` wants it.
        """
        found = self.interpreter.find(version or self._version)
        self.check(found)
        return found

    def capabilities(self) -> EngineCapabilities:
        try:
            self.installed()
        except EngineError as error:
            return replace(self.table, unavailable=str(error))
        return self.table

    def versions(self, version: str | None = None) -> tuple[tuple[str, str], ...]:
        try:
            found = self.installed(version)
        except EngineError:
            return ()
        own = self.interpreter.distribution
        beside = ((name, version) for name, version in found.versions if name != own)
        return (("engine", f"{self.name} {found.version(own)}"), *beside)

    def profile_order(self, spec: WorkerSpec, order: ProfileLoad) -> ProfileLoad:
        return order

    def shares_places(self, spec: WorkerSpec) -> bool:
        return False

    def warm_up_bursts(self, spec: WorkerSpec) -> tuple[Burst, ...]:
        return ()

    def check_options(self, options: EngineOptions) -> None:
        """Raise ConfigError if any option is given, unless the adapter takes it."""
        refuse_options(self.name, options)


def wrapped(
    spec: WorkerSpec, argv: tuple[str, ...], *, python_path: str = "", token_variable: str = ""
) -> tuple[str, ...]:
    """Return ``argv`` under our wrapper (``daemon.engines.wrapper``).

    The wrapper refuses a port that is in use (exit code 98), ends every process of the engine with the engine,
    with itself and with the shim, and hides our own ``PYTHONPATH`` from the engine's interpreter.

    Args:
        python_path: the engine's ``PYTHONPATH`` instead.
        token_variable: the variable of the engine's environment that gets the worker's token.
    """
    path = ("--python-path", python_path) if python_path else ()
    token = ("--token-variable", token_variable) if token_variable else ()
    where = ("--host", spec.host, "--port", str(spec.port))
    return (sys.executable, "-m", "daemon.engines.wrapper", *where, *path, *token, "--", *argv)


def profiling_worker(
    spec: WorkerSpec, found: Installation, module: str, folder: Path, *options: str, plug_ins: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the command of the profiling worker ``module`` in the engine's interpreter, under our wrapper.

    Args:
        plug_ins: folders of further plug-ins for the engine.
    """
    program = (found.python, "-m", f"iserve_profiling.{module}", "--spec", str(folder / "spec.json"))
    return wrapped(spec, (*program, *options), python_path=os.pathsep.join((PROFILING_PATH, *plug_ins)))
