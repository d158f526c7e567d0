"""An engine that can be planned for and not yet deployed: its table, and a clear no to everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from daemon.devices import Device
from daemon.engines.base import Command, WorkerSpec
from daemon.worker_stats import WorkerStats
from fingerprint.capability import EngineCapabilities
from fingerprint.errors import EngineError

__all__ = ["TableOnlyEngine"]


class TableOnlyEngine:
    """Implements ``Engine`` as far as planning needs it."""

    stats_path = "/metrics"

    def __init__(self, table: EngineCapabilities) -> None:
        self.name = table.engine
        self._table = replace(table, unavailable="its adapter is not there yet")

    def capabilities(self) -> EngineCapabilities:
        return self._table

    def versions(self) -> tuple[tuple[str, str], ...]:
        """None: no such engine is installed as far as this table knows."""
        return ()

    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        """Raises EngineError always."""
        raise EngineError(
            f"the {self.name} adapter is not there yet: it can be planned for, not deployed; use engine torch"
        )

    def read_stats(self, spec: WorkerSpec, body: bytes) -> WorkerStats:
        """Raises EngineError always."""
        raise EngineError(f"nothing of {self.name} is ever started")

    def explain_failure(self, spec: WorkerSpec, exit_code: int, log_tail: str) -> EngineError:
        """For the protocol's sake; nothing of this engine is ever started."""
        return EngineError(f"worker {spec.worker_id} ({self.name}) ended with exit code {exit_code}")
