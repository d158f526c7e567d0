"""NVIDIA GPUs through NVML: one init, cached handles, one look per call. Reads only; changes no setting."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

from daemon.devices import Device, DeviceReading
from fingerprint.driver_peaks import DriverFacts
from fingerprint.errors import ConfigError

__all__ = ["NvmlDevices", "ask_driver", "driver_facts", "driver_version", "gpu_names", "visible_gpus"]

log = logging.getLogger(__name__)

_NO_MORE = ("-1", "NoDevFiles")

T = TypeVar("T")


def visible_gpus(named: str | None, uuids: list[str]) -> list[int]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` names, in the driver's order; all where it is unset.

    Args:
        named: its value: indexes in the driver's (PCI) order or UUIDs (or their beginnings), with commas; "" hides
            all. As CUDA does, what follows -1 or NoDevFiles is not read.
        uuids: of the node's GPUs, by index.

    Raises:
        ConfigError: a name that is none of this node's GPUs, or of several.
    """
    if named is None:
        return list(range(len(uuids)))
    found = set()
    for name in filter(None, map(str.strip, named.split(","))):
        if name in _NO_MORE:
            break
        if name.startswith("MIG-"):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES names {name!r}: parts of a GPU (MIG) are not supported; name whole GPUs"
            )
        fitting = [i for i, uuid in enumerate(uuids) if (str(i) == name or uuid.startswith(name))]
        if len(fitting) != 1:
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES names {name!r}, which is {'no' if not fitting else 'more than one'} GPU of "
                f"this node; give indexes of 0 to {len(uuids) - 1} or UUIDs, or unset it to offer all GPUs"
            )
        found.update(fitting)
    return sorted(found)


class NvmlDevices:
    """The GPUs of the node that are offered, known by UUID: all, or those of ``CUDA_VISIBLE_DEVICES``."""

    def __init__(self, nvml: ModuleType) -> None:
        """Take an initialised ``pynvml``; use :meth:`open`."""
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        devices = []
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        for index in visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids):
            handle, uuid = handles[index], uuids[index]
            self._handles[uuid] = handle
            devices.append(
                Device(
                    device_id=uuid,
                    index=index,
                    kind="cuda",
                    name=nvml.nvmlDeviceGetName(handle),
                    total_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
                    on_node=len(handles),
                )
            )
        self._devices = tuple(devices)
        self.driver: str | None = self._ask(lambda: str(nvml.nvmlSystemGetDriverVersion()))

    @classmethod
    def open(cls, nvml: ModuleType) -> NvmlDevices | None:
        """Return the node's GPUs as ``nvml`` (pynvml) shows them; None where there is no driver, no library or no
        GPU.

        Raises:
            ConfigError: as :func:`visible_gpus`.
        """
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            log.info("no NVIDIA GPU: %s", error)
            return None
        try:
            found = cls(nvml)
        except nvml.NVMLError as error:
            log.warning("the GPUs cannot be listed and are left alone: %s", error)
            nvml.nvmlShutdown()
            return None
        except ConfigError:
            nvml.nvmlShutdown()
            raise
        if not found.devices:
            nvml.nvmlShutdown()
            return None
        return found

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._devices

    def facts(self, product: str) -> DriverFacts | None:
        """Return what the driver says of the first GPU called ``product``.

        None where there is none, or it does not even say its compute capability.
        """
        nvml = self._nvml
        found = next((device for device in self._devices if device.name == product), None)
        if found is None:
            return None
        handle = self._handles[found.device_id]
        capability = self._ask(lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
        if capability is None:
            return None
        limit_mw = self._ask(lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
        return DriverFacts(
            product=product,
            memory_bytes=found.total_bytes,
            compute_capability=(int(capability[0]), int(capability[1])),
            cuda_cores=self._ask(lambda: nvml.nvmlDeviceGetNumGpuCores(handle)),
            sm_mhz=self._ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_mhz=self._ask(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            memory_bus_bits=self._ask(lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle)),
            pcie_generation=self._ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            pcie_lanes=self._ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
        )

    def read(self) -> Mapping[str, DeviceReading]:
        return {device_id: self._read_one(handle) for device_id, handle in self._handles.items()}

    def _read_one(self, handle: Any) -> DeviceReading:
        nvml = self._nvml
        try:
            free_bytes = nvml.nvmlDeviceGetMemoryInfo(handle).free
        except nvml.NVMLError as error:  # a lost GPU: nothing else it says would be worth more
            return DeviceReading(free_bytes=None, error=str(error))
        power_mw = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        utilisation_percent = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        processes = self._ask(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return DeviceReading(
            free_bytes=free_bytes,
            utilisation_fraction=None if utilisation_percent is None else utilisation_percent / 100,
            power_w=None if power_mw is None else power_mw / 1000,
            sm_clock_mhz=self._ask(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            process_bytes=None if processes is None else {p.pid: p.usedGpuMemory for p in processes},
        )

    def _ask(self, question: Callable[[], T]) -> T | None:
        """Return the answer, or None where this GPU or driver has none to give (MIG parts, virtual GPUs)."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            log.info("NVML shutdown: %s", error)


def ask_driver(question: Callable[[ModuleType], T]) -> T | None:
    """Return what ``question`` finds in an initialised NVML; None without a driver, or where it does not say."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None where there is none."""
    return ask_driver(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def gpu_names() -> tuple[str, ...]:
    """Return product names of the GPUs that can be offered here; none without a driver."""
    found = _opened()
    if found is None:
        return ()
    found.close()
    return tuple(device.name for device in found.devices)


def driver_facts(product: str) -> DriverFacts | None:
    """Return what the driver says of the first GPU here called ``product``; None where it says nothing of one."""
    found = _opened()
    if found is None:
        return None
    try:
        return found.facts(product)
    finally:
        found.close()


def _opened() -> NvmlDevices | None:
    """Return the GPUs that can be offered here; None where there is no driver or none of them."""
    import pynvml

    try:
        return NvmlDevices.open(pynvml)
    except ConfigError as error:  # CUDA_VISIBLE_DEVICES names what is not there
        log.info("no GPU is offered: %s", error)
        return None
