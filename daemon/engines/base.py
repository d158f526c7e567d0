"""The engine protocol, and the one value that says all a worker must know before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.errors import ConfigError, EngineError

__all__ = ["Command", "Engine", "StageAssignment", "WorkerLimits", "WorkerSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAssignment:
    """One pipeline stage on this node: the devices of its TP group and how many layers it holds."""

    device_ids: tuple[str, ...]
    num_layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLimits:
    """What the estimate assumed, enforced at launch."""

    max_batch: int
    max_batched_tokens: int
    max_context_tokens: int  # of one sequence, prompt and output together
    kv_tokens: int  # room of the KV cache, over all sequences
    memory_bytes_per_device: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Everything a worker needs; nothing is filled in later."""

    worker_id: str  # letters, digits, '-': names its folder
    served_model: str  # the name OpenAI clients use
    checkpoint: str  # a local directory
    config: DeploymentConfig
    stages: tuple[StageAssignment, ...]
    limits: WorkerLimits
    port: int = 0  # 0: the daemon chooses a free one before launch
    host: str = "127.0.0.1"
    lease_ttl_s: float = 600.0
    profiling: bool = False  # serve the profiling routes, load nothing at start

    def __post_init__(self) -> None:
        if not self.worker_id or not all(c.isalnum() or c == "-" for c in self.worker_id):
            raise ConfigError(f"worker_id must be letters, digits and '-', got {self.worker_id!r}")
        if len(self.stages) != self.config.pp:
            raise ConfigError(f"{len(self.stages)} stages for pp={self.config.pp}")
        for stage in self.stages:
            if len(stage.device_ids) != self.config.tp:
                raise ConfigError(f"{len(stage.device_ids)} devices in a stage for tp={self.config.tp}")


@dataclass(frozen=True, slots=True)
class Command:
    """A process to start: arguments, and what is added to its environment."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


class Engine(Protocol):
    """One inference engine. Adapters never import the engine: they start it."""

    name: str

    def capabilities(self) -> EngineCapabilities: ...

    def versions(self) -> tuple[tuple[str, str], ...]:
        """Name and version pairs that a profile is recorded with."""
        ...

    def command(self, spec: WorkerSpec, folder: Path) -> Command:
        """How to start a worker for ``spec``; ``folder`` is the worker's own, already there.

        The worker then answers ``GET /health`` with 200 once it serves, and speaks the OpenAI API.
        """
        ...

    def explain_failure(self, spec: WorkerSpec, exit_code: int, log_tail: str) -> EngineError:
        """The project's own error for a worker that ended by itself, with the fix in it where known."""
        ...
