"""Devices of a node and their readings: the protocol, and the CPU offered as devices.

A CPU is cut into equal shares of its cores and of its memory, within what the control group grants, so that
placement on a machine without a GPU is a real choice. The GPUs are in ``daemon.nvml``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fingerprint.errors import ConfigError

__all__ = ["CpuDevices", "Device", "DeviceReading", "DeviceSource", "Machine", "read_machine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Facts of a device that do not change while the daemon runs."""

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
    cores: tuple[int, ...] = ()
    """CPU cores of a CPU share; empty for a GPU."""
    on_node: int = 1
    """Devices of this kind on its node, among which the node's memory is divided; those not offered too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """Reading of a device at one moment. ``None``: the device did not say."""

    free_bytes: int | None  # not used by any process now; what was promised is not known here
    utilisation_fraction: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    process_bytes: Mapping[int, int | None] | None = None  # by process id; an unknown size is None
    error: str | None = None


class DeviceSource(Protocol):
    """Source of one kind of devices. ``read`` may block in a driver, so it is called outside the event loop."""

    @property
    def devices(self) -> tuple[Device, ...]: ...

    @property
    def driver(self) -> str | None:
        """Version of the driver that all devices are behind; None where there is none."""
        ...

    def read(self) -> Mapping[str, DeviceReading]:
        """Look at every device afresh; a device that fails has its ``error`` set, and nothing is raised."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The part of the machine this process may use."""

    cores: tuple[int, ...]
    memory_bytes: int
    available_bytes: int  # of these, not in use now
    cpu_model: str


class CpuDevices:
    """The CPU as ``count`` devices ``cpu:0`` .. with equal shares of cores and memory."""

    def __init__(self, count: int, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        if not 1 <= count <= 64:
            raise ConfigError(f"the CPU can be offered as 1 to 64 devices, got {count}")
        self._proc, self._cgroup = proc, cgroup
        machine = read_machine(proc=proc, cgroup=cgroup)
        self._devices = tuple(
            Device(
                device_id=f"cpu:{index}",
                index=index,
                kind="cpu",
                name=machine.cpu_model,
                total_bytes=machine.memory_bytes // count,
                cores=_share(machine.cores, index, count),
                on_node=count,
            )
            for index in range(count)
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._devices

    @property
    def driver(self) -> str | None:
        return None

    def read(self) -> Mapping[str, DeviceReading]:
        """Return each share of what is available now, workers' own use included (the monitor adds that back)."""
        machine = read_machine(proc=self._proc, cgroup=self._cgroup)
        share_bytes = machine.available_bytes // len(self._devices)
        return {device.device_id: DeviceReading(free_bytes=share_bytes) for device in self._devices}

    def close(self) -> None:
        """Do nothing: the CPU holds no handle."""


def _share(cores: tuple[int, ...], index: int, count: int) -> tuple[int, ...]:
    """Return the ``index``-th of ``count`` runs of cores; with fewer cores than devices, devices share cores."""
    if len(cores) < count:
        return (cores[index % len(cores)],)
    return cores[index * len(cores) // count : (index + 1) * len(cores) // count]


def read_machine(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Machine:
    """Return the cores and memory that affinity and control group (version 1 or 2) leave to this process."""
    meminfo = _key_values(proc / "meminfo")
    memory_bytes = meminfo["MemTotal:"] * 1024
    available_bytes = meminfo.get("MemAvailable:", meminfo["MemFree:"]) * 1024
    cores = tuple(sorted(os.sched_getaffinity(0)))
    for folder, names in _cgroup_folders(proc, cgroup):
        limit_bytes = _number(folder / names.limit)
        if limit_bytes is not None and limit_bytes < memory_bytes:
            used_bytes = _number(folder / names.used) or 0
            used_bytes -= _key_values(folder / "memory.stat").get(names.inactive_file, 0)  # given back when asked
            memory_bytes = limit_bytes
            available_bytes = min(available_bytes, max(0, limit_bytes - max(0, used_bytes)))
        quota_cores = _quota_cores(folder)
        if quota_cores is not None:
            cores = cores[: max(1, math.ceil(quota_cores))]
    return Machine(
        cores=cores,
        memory_bytes=memory_bytes,
        available_bytes=min(available_bytes, memory_bytes),
        cpu_model=_cpu_model(proc),
    )


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    limit: str
    used: str
    inactive_file: str


_V2 = _MemoryFiles("memory.max", "memory.current", "inactive_file")
_V1 = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _cgroup_folders(proc: Path, cgroup: Path) -> list[tuple[Path, _MemoryFiles]]:
    """Return the control groups this process is in, each with its ancestors, whose limits hold too."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root, names = (cgroup, _V2) if not controllers else (cgroup / controllers.split(",")[0], _V1)
        if controllers and not {"memory", "cpu"} & set(controllers.split(",")):
            continue
        if controllers and not root.exists():
            root = cgroup / controllers
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [(root.joinpath(*parts[:depth]), names) for depth in range(len(parts) + 1)]
    return found


def _quota_cores(folder: Path) -> float | None:
    """Return the cores' worth of time that the group may use; None for no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        return quota_us / period_us if quota_us and period_us and quota_us > 0 else None
    return int(quota) / int(period) if quota.isdigit() and int(period) > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _key_values(path: Path) -> dict[str, int]:
    """Return the first number of each line by its first word."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.split() for line in lines)
    return {word[0]: int(word[1]) for word in words if len(word) >= 2 and word[1].isdigit()}


def _cpu_model(proc: Path) -> str:
    try:
        for line in (proc / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"
