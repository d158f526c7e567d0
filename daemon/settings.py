"""All the times and sizes of a daemon, in one place; defaults live here only."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from daemon.backoff import RestartPolicy
from fingerprint.errors import ConfigError

__all__ = ["DaemonSettings"]


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """Settings that a daemon needs before it starts; nothing is filled in later."""

    home: Path
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one; run/daemon.json has it
    node_id: str = field(default_factory=socket.gethostname)
    cpu_devices: int | None = (
        None  # None: the GPUs, or 2 CPU shares where there is none; a number: that many shares
    )
    tick_s: float = 1.0  # NVML is not to be read faster than that
    load_window_s: float = 120.0
    probe_timeout_s: float = 2.0  # of one /health or /stats
    probe_misses: int = 3  # a ready worker that fails to answer so often in a row is not ready
    start_timeout_s: float = 900.0  # from launch to the first healthy answer; the warm-up follows
    warm_up_s: float = 120.0  # from there to being ready, at most: a warm-up that takes longer is cut short
    unresponsive_s: float = 120.0  # a worker that was healthy and is silent for so long is ended and started again
    resident_period_s: float = 5.0  # between two looks at the memory of CPU workers
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    stop_grace_s: float = 35.0  # between SIGTERM and SIGKILL; the embedded engine drains for 30 at most
    memory_free_timeout_s: float = 15.0  # for a GPU to show a stopped worker's memory free
    log_max_bytes: int = 8 * 2**20
    log_files: int = 3
    log_tail_bytes: int = 65536  # where a failure's cause is looked for; vLLM's tracebacks alone take 10,000
    max_workers: int = 64
    ended_kept: int = 20  # folders of ended workers, kept for their logs

    def __post_init__(self) -> None:
        for name in ("tick_s", "load_window_s", "probe_timeout_s", "start_timeout_s", "warm_up_s", "stop_grace_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in 0..65535, got {self.port}")

    @property
    def workers_folder(self) -> Path:
        return self.home / "workers"

    @property
    def run_folder(self) -> Path:
        return self.home / "run"
