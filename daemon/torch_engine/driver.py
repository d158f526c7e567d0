"""Facts of this process and its GPU by the NVIDIA driver; none where there is no driver."""

from __future__ import annotations

import os
from types import ModuleType

import torch

from daemon.nvml import ask_driver

__all__ = ["clock_and_power", "own_gpu_bytes"]


def own_gpu_bytes(uuid: str) -> int | None:
    """Return the calling process's bytes on the GPU named by ``uuid`` (``GPU-...``); CUDA counts all processes.

    Returns:
        None when the driver does not tell, as in a container that hides process ids.
    """

    def own(nvml: ModuleType) -> int | None:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        return None

    return ask_driver(own)


def clock_and_power() -> tuple[float | None, float | None]:
    """Return SM clock in MHz and power in W of torch's current GPU, now; None where there is none."""
    if not torch.cuda.is_available():
        return None, None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"

    def now(nvml: ModuleType) -> tuple[float | None, float | None]:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        clock_mhz = float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return clock_mhz, nvml.nvmlDeviceGetPowerUsage(handle) / 1e3

    return ask_driver(now) or (None, None)
