"""The engine protocol: what an adapter of an engine answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from daemon.devices import Device
from daemon.engine_options import EngineOptions
from daemon.profile_messages import ProfileLoad
from daemon.worker_spec import WorkerSpec
from daemon.worker_stats import WorkerStats
from fingerprint.capability import EngineCapabilities
from fingerprint.errors import IserveError

__all__ = ["Burst", "Command", "Container", "Engine", "Inside"]


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: arguments, what is added to its environment, and the files it reads.

    The daemon writes ``files`` (name, text) into the worker's folder, which is the process's working directory,
    before each start; and it sets ``CUDA_VISIBLE_DEVICES`` to the worker's GPUs in stage order where ``env`` does
    not.
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """Contents of a container for an engine: the checkpoint's folder, that of its files, and the release.

    Both may be read-only.
    """

    model: str
    files: str
    release: str | None = None  # that was planned for; None: the newest that the adapter knows
    is_whole: bool = True  # False: the folder here lacks files, such as the tokenizer's, that ``model`` will have


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """A worker as a container runs it: the engine's own server, without shim, wrapper and proxy.

    What those do (restart it, end all its processes, find it a port) is the container runtime's there.
    """

    image: str
    argv: tuple[str, ...]  # the entry point with its arguments
    env: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()  # name and text, in the folder of its files
    notes: tuple[str, ...] = ()  # what is not so there as it is under a daemon


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are sent at once."""

    requests: int
    input_tokens: int
    output_tokens: int


class Engine(Protocol):
    """Inference engine. Adapters never import the engine: they start it, with the Python it is installed for.

    The process that :meth:`command` describes keeps these rules, whichever engine it is: it listens on the spec's
    host and port and nowhere else; ``GET /health`` answers 200 once it serves and not before; it speaks the OpenAI
    API under the name ``spec.served_model`` and refuses a prompt longer than ``max_context_tokens`` with 400 in
    OpenAI's form; SIGTERM ends it within 35 s, all its processes with it. An engine that is not ours is started
    through ``daemon.engines.external``, whose wrapper sees to the port and to what is left behind.
    """

    name: str
    table: EngineCapabilities  # what it runs where it is installed, whatever is installed here
    stats_path: str  # whose answer :meth:`read_stats` reads

    def pinned(self, version: str | None) -> Engine:
        """Return this engine as it is installed in ``version``, whatever else is installed; None: as it is.

        Raises:
            InfeasibleError: that version is not installed here.
            SilentEngineError: a Python that may have it does not answer now.
        """
        ...

    def capabilities(self) -> EngineCapabilities:
        """Return what it runs; with ``unavailable`` set where no worker of it can be started here."""
        ...

    def versions(self) -> tuple[tuple[str, str], ...]:
        """Name and version pairs that a profile is recorded with; empty when it is not installed.

        Read from the metadata of the engine's own interpreter; the engine is not imported.
        """
        ...

    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        """Return how to start a worker for ``spec`` with all its limits enforced. Starts and writes nothing.

        Args:
            folder: the worker's own; ``spec.json`` will lie there.
            devices: those of the spec, by id.

        Raises:
            EngineError: it is not installed, or is of a version that this adapter does not know.
            ConfigError: the engine has no way to keep what the spec asks.
        """
        ...

    def container(self, spec: WorkerSpec, inside: Inside, devices: Mapping[str, Device]) -> Container:
        """Return what starts the same worker in a container, all limits enforced.

        The engine need not be installed here.

        The checkpoint's own folder is read for what the launch has to know; its weights need not lie there.

        Args:
            spec: its host and port are those that the server has within the container.
            devices: those of the spec, by id, with the indexes that they have within the container.

        Raises:
            BadInputError: as :meth:`command`, but for what is not installed and for missing weights.
        """
        ...

    def profile_order(self, spec: WorkerSpec, order: ProfileLoad) -> ProfileLoad:
        """Return ``order`` as the profiling worker of ``spec`` takes it.

        Raises:
            ConfigError, UnsupportedModelError: its checkpoint cannot be read.
        """
        ...

    def check_options(self, options: EngineOptions) -> None:
        """Return if a worker can be started with ``options``.

        Raises:
            ConfigError: one is iServe's to set, or the engine has none such.
        """
        ...

    def shares_places(self, spec: WorkerSpec) -> bool:
        """Return whether adapters of small ranks share places at a worker (``DeploymentConfig.place_share``)."""
        ...

    def warm_up_bursts(self, spec: WorkerSpec) -> tuple[Burst, ...]:
        """Return what a worker that has just become healthy is sent before it counts as ready.

        Empty where the engine compiles all its kernels before it is healthy.
        """
        ...

    def read_stats(self, spec: WorkerSpec, body: bytes) -> WorkerStats:
        """Return the worker's own account from what ``stats_path`` answered.

        Raises:
            EngineError: it is not what this engine is documented to answer.
        """
        ...

    def explain_failure(self, spec: WorkerSpec, exit_code: int, log_tail: str) -> IserveError:
        """Return why a worker ended by itself, with the fix where one is known.

        The class decides what follows where the worker never served: a BadInputError or InfeasibleError would
        occur again at every start, so it is given up; a ConflictError is about its port, which is exchanged if
        the daemon chose it; after an UnavailableError or EngineError it is started again. One that served is
        started again whatever its log says: what clients wrote may be in it.
        """
        ...
