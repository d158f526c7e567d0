"""The machine as a profile records it, for engines that cannot say it themselves: datasheet, CPU, driver."""

from __future__ import annotations

from collections.abc import Iterable

from daemon.devices import Device, read_machine
from daemon.nvml import driver_version
from fingerprint.errors import ConfigError
from fingerprint.gpus import match_device
from fingerprint.measurements import MachineInfo

__all__ = ["gpu_machine"]


def gpu_machine(devices: Iterable[Device], versions: tuple[tuple[str, str], ...]) -> MachineInfo:
    """What is known of the machine that ``devices``, GPUs of one kind, are in. Touches no GPU.

    Raises:
        ConfigError: GPUs of several kinds, or one that is in no datasheet of ours.
    """
    listed = list(devices)
    names = sorted({device.name for device in listed})
    if len(names) != 1:
        raise ConfigError(f"a profile is of one kind of GPU, these are {', '.join(names) or 'none'}")
    known = match_device(names[0])
    if known is None:
        raise ConfigError(
            f"there is no datasheet of {names[0]!r} in fingerprint/data/gpus.json; add its row, or profile with "
            "engine torch, which measures it"
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
