"""The engine protocol, and the one value that says all a worker must know before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from daemon.devices import Device
from daemon.engines.options import NO_OPTIONS, EngineOptions
from daemon.worker_stats import WorkerStats
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.errors import ConfigError, IserveError

__all__ = ["Command", "Container", "Engine", "Inside", "StageAssignment", "WorkerLimits", "WorkerSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAssignment:
    """Pipeline stage on this node: the devices of its TP group and how many layers it holds."""

    device_ids: tuple[str, ...]
    """Devices of the stage's tensor-parallel group, one per rank."""
    num_layers: int
    """Number of hidden layers that the stage holds."""
    memory_bytes_per_device: int | None = None
    """Memory promised on each device of this stage; None: that of the worker's limits."""

    def room_bytes(self, limits: WorkerLimits) -> int:
        """Return the bytes that each of its ranks may take."""
        given = self.memory_bytes_per_device
        return limits.memory_bytes_per_device if given is None else given


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLimits:
    """Limits that the estimate assumed, enforced at launch."""

    max_batch: int
    """Most requests that run at once."""
    max_batched_tokens: int
    """Most tokens that one engine step computes."""
    max_context_tokens: int
    """Longest request, prompt and output tokens together."""
    kv_tokens: int
    """Tokens that the KV cache holds, over all requests."""
    memory_bytes_per_device: int
    """Memory promised on each device of the stage that takes most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Everything a worker needs; nothing is filled in later."""

    worker_id: str
    """Worker's identifier in letters, digits and `-`; names its folder."""
    served_model: str
    """Model name that OpenAI clients use."""
    checkpoint: str
    """Local folder of the model's checkpoint."""
    config: DeploymentConfig
    """Configuration that the worker runs."""
    stages: tuple[StageAssignment, ...]
    """Pipeline stages in order, each with its devices."""
    limits: WorkerLimits
    """Sizes that the estimate assumed, enforced at launch."""
    port: int = 0
    """Port that the worker listens on; 0: the daemon chooses a free one before launch."""
    host: str = "127.0.0.1"
    """Address that the worker listens on."""
    lease_ttl_s: float = 600.0
    """Seconds after which the worker ends without a sign of life from the daemon."""
    profiling: bool = False
    """Whether the worker serves the profiling routes and loads nothing at start."""
    options: EngineOptions = NO_OPTIONS
    """Options that the deployment gives to the engine itself."""
    dummy_weights: bool = False
    """Whether weights are random, in the checkpoint's shapes; a config.json is then enough."""
    engine_version: str | None = None
    """Engine release that was planned with; None: the first installation that is found."""
    ends_at: float | None = None
    """Time, in seconds since the epoch, at which the daemon ends the worker if nothing did before; None: never."""

    def __post_init__(self) -> None:
        if not self.worker_id or not all(c.isalnum() or c == "-" for c in self.worker_id):
            raise ConfigError(f"worker_id must be letters, digits and '-', got {self.worker_id!r}")
        if len(self.stages) != self.config.pp:
            raise ConfigError(f"{len(self.stages)} stages for pp={self.config.pp}")
        for stage in self.stages:
            if len(stage.device_ids) != self.config.tp:
                raise ConfigError(f"{len(stage.device_ids)} devices in a stage for tp={self.config.tp}")

    def promised_bytes(self) -> dict[str, int]:
        """Return, by device, what the ranks on it may take together. With an uneven split the stages differ."""
        promised: dict[str, int] = {}
        for stage in self.stages:
            for device_id in stage.device_ids:
                promised[device_id] = promised.get(device_id, 0) + stage.room_bytes(self.limits)
        return promised


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


class Engine(Protocol):
    """Inference engine. Adapters never import the engine: they start it, with the Python it is installed for.

    The process that :meth:`command` describes keeps these rules, whichever engine it is: it listens on the spec's
    host and port and nowhere else; ``GET /health`` answers 200 once it serves and not before; it speaks the OpenAI
    API under the name ``spec.served_model`` and refuses a prompt longer than ``max_context_tokens`` with 400 in
    OpenAI's form; SIGTERM ends it within 35 s, all its processes with it. An engine that is not ours is started
    through ``daemon.engines.external``, whose wrapper sees to the port and to what is left behind.
    """

    name: str
    stats_path: str  # whose answer :meth:`read_stats` reads

    def pinned(self, version: str | None) -> Engine:
        """Return this engine as it is installed in ``version``, whatever else is installed; None: as it is.

        Raises:
            InfeasibleError: that version is not installed here.
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

    def check_options(self, options: EngineOptions) -> None:
        """Return if a worker can be started with ``options``.

        Raises:
            ConfigError: one is iServe's to set, or the engine has none such.
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

        The class decides what follows: a BadInputError or InfeasibleError would occur again at every start, so the
        worker is given up; after an UnavailableError or EngineError it is started again.
        """
        ...
