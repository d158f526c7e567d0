"""What the driver says this process holds on a GPU: NVML tells processes apart, CUDA counts them together."""

from __future__ import annotations

import os

import pynvml

__all__ = ["own_gpu_bytes"]


def own_gpu_bytes(uuid: str, *, pid: int | None = None) -> int | None:
    """Bytes of the calling process on the GPU named by ``uuid`` (``GPU-...``).

    Returns:
        None when the driver does not tell: no NVML, or a container that hides process ids.
    """
    own = os.getpid() if pid is None else pid
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == own:
                    used = process.usedGpuMemory
                    return None if used is None else int(used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return None
