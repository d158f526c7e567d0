"""Facts of this process and its GPU by the NVIDIA driver; none, where there is no library or no driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

__all__ = ["clock_and_power", "driver_version", "own_gpu_bytes"]


class _NoDriverError(Exception):
    """NVML is not there, or does not answer."""


@contextmanager
def _nvml() -> Iterator[ModuleType]:
    try:
        import pynvml
    except ImportError as error:
        raise _NoDriverError from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise _NoDriverError from error


def own_gpu_bytes(uuid: str) -> int | None:
    """Return the calling process's bytes on the GPU named by ``uuid`` (``GPU-...``); CUDA counts all processes.

    Returns:
        None when the driver does not tell, as in a container that hides process ids.
    """
    try:
        with _nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
    except _NoDriverError:
        return None
    return None


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None where there is none."""
    try:
        with _nvml() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except _NoDriverError:
        return None


def clock_and_power() -> tuple[float | None, float | None]:
    """Return SM clock in MHz and power in W of torch's current GPU, now; None where there is none."""
    if not torch.cuda.is_available():
        return None, None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    try:
        with _nvml() as nvml:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            clock_mhz = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
            return clock_mhz, nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    except _NoDriverError:
        return None, None
