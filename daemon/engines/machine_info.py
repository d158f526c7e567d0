"""The machine as a profile records it, for engines that cannot say it themselves: GPU, CPU, driver."""

from __future__ import annotations

from collections.abc import Iterable

from daemon.devices import Device, read_machine
from daemon.nvml import driver_version
from daemon.unlisted_gpus import device_spec, kept_file
from fingerprint.errors import ConfigError
from fingerprint.measurements import MachineInfo

__all__ = ["gpu_machine"]


def gpu_machine(devices: Iterable[Device], versions: tuple[tuple[str, str], ...]) -> MachineInfo:
    """Return what is known of the machine that ``devices``, GPUs of one kind, are in. Touches no GPU.

    Raises:
        ConfigError: GPUs of several kinds, or one of which neither a table nor its driver says enough.
    """
    listed = list(devices)
    names = sorted({device.name for device in listed})
    if len(names) != 1:
        raise ConfigError(f"a profile is of one kind of GPU, these are {', '.join(names) or 'none'}")
    known = device_spec(names[0])
    if known is None:
        raise ConfigError(
            f"{names[0]!r} is in no datasheet table, and its driver does not say what it can do; describe it in "
            f"{kept_file(names[0])} (docs/gpus.md), or profile with engine torch, which measures it"
        )
    host = read_machine()
    return MachineInfo(
        device=known,
        num_devices=len(listed),
        cores_per_device=max(1, len(host.cores) // len(listed)),
        cpu_model=host.cpu_model,
        driver=driver_version(),
        versions=versions,
    )
