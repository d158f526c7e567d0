"""Status of a daemon and of a worker. Observations only, made fresh for each answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from daemon.worker_spec import WorkerSpec
from daemon.worker_stats import DeviceBusy, WorkerStats
from fingerprint.measurements import MachineInfo

__all__ = ["DeviceBusy", "DeviceHeld", "DeviceStatus", "NodeStatus", "WorkerState", "WorkerStats", "WorkerStatus"]


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"  # waiting out the backoff
    FAILED = "failed"  # gave up; ``error`` says why
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHeld:
    """Memory of a GPU that one worker's processes hold, by the driver's list of processes."""

    device_id: str
    held_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """Status of one worker as the daemon sees it now."""

    spec: WorkerSpec  # with the port that was chosen
    state: WorkerState
    url: str
    pid: int | None  # of the worker's process group
    restarts: int
    started_at: str  # ISO 8601, UTC
    error: str | None = None
    versions: tuple[tuple[str, str], ...] = ()  # of its engine when this process was started; (): not recorded
    token: str | None = field(default=None, repr=False)  # its clients send it; None: an older release started it
    held: tuple[DeviceHeld, ...] = ()  # of its GPUs, those whose driver tells; containers hide process ids from it

    def is_of(self, spec: WorkerSpec) -> bool:
        """Return whether ``spec``, at whatever port, started this worker; an id alone may be of a former state."""
        return replace(self.spec, port=0) == replace(spec, port=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceStatus:
    """Status of one device of the node.

    ``free_bytes`` is what a new worker may take: on a CPU, the share less what the workers on it were promised or
    use, whichever is more.
    """

    device_id: str
    """GPU's UUID, or `cpu:0` for a share of the CPU."""
    index: int
    """Position of the device on its node, from 0."""
    kind: str
    """Kind of device: `cuda` or `cpu`."""
    name: str
    """Product name that the driver or the operating system reports."""
    total_bytes: int
    """Memory of the device, used or free."""
    free_bytes: int
    """Memory that a new worker may take."""
    load_fraction: float
    """Fraction of the last 120 s, or of the time since the daemon started, in which the device was busy."""
    cores: tuple[int, ...] = ()
    """CPU cores to which a worker on this CPU share is pinned; empty for a GPU."""
    power_w: float | None = None
    """Power draw in watts; None: not reported."""
    sm_clock_mhz: float | None = None
    """Clock of the GPU's multiprocessors in MHz; None: not reported."""
    used_bytes: int | None = None
    """Memory in use by all processes, as the driver counts it; None: no driver counts here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """Status of the whole node at one moment."""

    node_id: str
    observed_at: float  # seconds since the epoch
    devices: tuple[DeviceStatus, ...]
    workers: tuple[WorkerStatus, ...]
    machine: MachineInfo | None = None  # None until an engine has measured it
    driver: str | None = None  # version of the GPUs' driver; None on a CPU
