"""A strict NVML of two GPUs: it knows what pynvml knows, and raises where the real library would.

Every name here exists in nvidia-ml-py with the same arguments (a test compares the signatures); calls before
``nvmlInit``, after ``nvmlShutdown`` or with a handle it never gave out fail. Tests set ``GPUS`` and ``FAILING``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15

GIB = 2**30
PROCESSES_FILE = Path(__file__).with_name("processes.json")


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return f"NVML error {self.value}"


@dataclass
class Gpu:
    uuid: str
    total: int = 48 * GIB
    used: int = 0
    gpu_percent: int = 0
    power_mw: int = 25_000
    sm_mhz: int = 210
    processes: dict[int, int | None] = field(default_factory=dict)
    reasons: int = 0  # for which the clock is lower
    name: str = "NVIDIA RTX A6000"
    compute_capability: tuple[int, int] = (8, 6)
    cores: int = 10752
    max_sm_mhz: int = 1800
    max_memory_mhz: int = 8001
    bus_bits: int = 384
    pcie: tuple[int, int] = (4, 16)  # generation, lanes
    power_limit_mw: int = 300_000


class _Handle:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu


GPUS = [Gpu("GPU-aaaa"), Gpu("GPU-bbbb")]
FAILING: dict[tuple[str, str], int] = {}  # (function, uuid or "") -> error
CALLS: list[str] = []
_state = {"inits": 0}
_handles: set[int] = set()


def _called(name: str, uuid: str = "") -> None:
    CALLS.append(name)
    if (name, uuid) in FAILING:
        raise NVMLError(FAILING[name, uuid])
    if name != "nvmlInit" and not _state["inits"]:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)


def _gpu(name: str, handle: object) -> Gpu:
    if not isinstance(handle, _Handle) or id(handle) not in _handles:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    _called(name, handle.gpu.uuid)
    return handle.gpu


def nvmlInit():
    _called("nvmlInit")
    _state["inits"] += 1


def nvmlShutdown():
    _called("nvmlShutdown")
    _state["inits"] -= 1


def nvmlDeviceGetCount():
    _called("nvmlDeviceGetCount")
    return len(GPUS)


def nvmlSystemGetDriverVersion():
    _called("nvmlSystemGetDriverVersion")
    return "570.86.15"


_kept: list[_Handle] = []


def nvmlDeviceGetHandleByIndex(index):
    _called("nvmlDeviceGetHandleByIndex")
    if not 0 <= index < len(GPUS):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    handle = _Handle(GPUS[index])
    _kept.append(handle)
    _handles.add(id(handle))
    return handle


def nvmlDeviceGetUUID(handle):
    return _gpu("nvmlDeviceGetUUID", handle).uuid


def nvmlDeviceGetName(handle):
    return _gpu("nvmlDeviceGetName", handle).name


def nvmlDeviceGetCudaComputeCapability(handle):
    return _gpu("nvmlDeviceGetCudaComputeCapability", handle).compute_capability


def nvmlDeviceGetNumGpuCores(device):
    return _gpu("nvmlDeviceGetNumGpuCores", device).cores


def nvmlDeviceGetMaxClockInfo(handle, type):  # noqa: A002
    gpu = _gpu("nvmlDeviceGetMaxClockInfo", handle)
    if type not in (NVML_CLOCK_SM, NVML_CLOCK_MEM):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return gpu.max_sm_mhz if type == NVML_CLOCK_SM else gpu.max_memory_mhz


def nvmlDeviceGetMemoryBusWidth(device):
    return _gpu("nvmlDeviceGetMemoryBusWidth", device).bus_bits


def nvmlDeviceGetMaxPcieLinkGeneration(handle):
    return _gpu("nvmlDeviceGetMaxPcieLinkGeneration", handle).pcie[0]


def nvmlDeviceGetMaxPcieLinkWidth(handle):
    return _gpu("nvmlDeviceGetMaxPcieLinkWidth", handle).pcie[1]


def nvmlDeviceGetPowerManagementDefaultLimit(handle):
    return _gpu("nvmlDeviceGetPowerManagementDefaultLimit", handle).power_limit_mw


def nvmlDeviceGetMemoryInfo(handle, version=None):
    gpu = _gpu("nvmlDeviceGetMemoryInfo", handle)
    return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=_gpu("nvmlDeviceGetUtilizationRates", handle).gpu_percent, memory=0)


def nvmlDeviceGetPowerUsage(handle):
    return _gpu("nvmlDeviceGetPowerUsage", handle).power_mw


def nvmlDeviceGetClockInfo(handle, type):  # noqa: A002
    gpu = _gpu("nvmlDeviceGetClockInfo", handle)
    if type != NVML_CLOCK_SM:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return gpu.sm_mhz


def nvmlDeviceGetComputeRunningProcesses(handle):
    gpu = _gpu("nvmlDeviceGetComputeRunningProcesses", handle)
    if PROCESSES_FILE.exists():  # a daemon's process is given from outside, by UUID: [[process id, bytes], ...]
        gpu.processes = dict(json.loads(PROCESSES_FILE.read_text()).get(gpu.uuid, ()))
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes.items()]


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return _gpu("nvmlDeviceGetCurrentClocksEventReasons", handle).reasons
