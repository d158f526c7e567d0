"""Our plug-in for variants (``variants``) as a launch gives it to vLLM: its folder, and its settings.

The plug-in's module of settings is used itself, which needs neither torch nor vLLM. It has absolute imports of a
package that is found in vLLM's interpreter by ``PYTHONPATH``; here it is found by its folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

from daemon.devices import Device, read_machine
from daemon.worker_spec import WorkerSpec
from fingerprint.config import DeploymentConfig
from fingerprint.errors import ConfigError

__all__ = [
    "ADAPTER_KERNELS",
    "BACKGROUND_LOADS",
    "DELTA_ARENA",
    "PLUG_IN_NAME",
    "PLUG_IN_PATH",
    "additional_config",
    "arena_mib",
    "foreign_reason",
    "has_adapter_kernels",
    "has_background_loads",
    "may_use_plug_in",
    "needs_plug_in",
    "plug_in_releases",
    "takes_release",
]

ADAPTER_KERNELS = "ISERVE_VLLM_ADAPTER_KERNELS"  # a setting of iServe: 1 for our kernels of adapters
BACKGROUND_LOADS = "ISERVE_VLLM_BACKGROUND_LOADS"  # a setting of iServe: 1 for loads of adapters next to steps
DELTA_ARENA = "ISERVE_VLLM_DELTA_ARENA_MIB"  # and one for the host's memory that keeps deltas
_MOST_ARENA_MIB = 16 * 1024  # of a worker, without the setting
_ARENA_PART = 8  # one such part of the machine's memory is for all its workers together

PLUG_IN_PATH = str(Path(__file__).parent / "variants")  # for ``PYTHONPATH``: the package, and its entry point
PLUG_IN_NAME = _PACKAGE = "iserve_variants"  # of the entry point, and of its package


def has_adapter_kernels() -> bool:
    """Return whether adapters are to be computed by our kernels: so the environment says (docs/decisions/0054)."""
    return _is_on(ADAPTER_KERNELS)


def has_background_loads() -> bool:
    """Return whether adapters are to be loaded next to steps: so the environment says (docs/decisions/0048)."""
    return _is_on(BACKGROUND_LOADS)


def _is_on(setting: str) -> bool:
    return os.environ.get(setting, "").lower() in ("1", "true", "yes")


def needs_plug_in(config: DeploymentConfig) -> bool:
    """Return whether vLLM needs the plug-in for the slots of ``config``."""
    return config.has_delta_slots or (config.adapter_rank > 0 and (has_adapter_kernels() or _loads_aside(config)))


def _loads_aside(config: DeploymentConfig) -> bool:
    """Return whether adapters in the slots of ``config`` are loaded next to steps: on one GPU, as deltas are."""
    return has_background_loads() and config.num_gpus == 1


def foreign_reason(version: str) -> str:
    """Return why slots of adapters are refused with a release that the plug-in was not written for."""
    asked = []
    if has_adapter_kernels():
        asked.append(f"{ADAPTER_KERNELS} asks for kernels of adapters that are not for release {version}")
    if has_background_loads():
        asked.append(f"{BACKGROUND_LOADS} asks for loads next to steps, which are not for release {version}")
    return f"{'; '.join(asked)}; unset it, or install {' or '.join(plug_in_releases())}"


def may_use_plug_in(spec: WorkerSpec) -> bool:
    """Return whether a worker of ``spec`` has the plug-in where its release takes it.

    It reads adapters' files in less time, so every worker with slots has it; a profiling one gets its slots with
    each order.
    """
    return spec.config.adapter_slots > 0 or spec.profiling


def arena_mib(spec: WorkerSpec, devices: Mapping[str, Device]) -> int:
    """Return the host's memory, in MiB, in which each GPU's process of the worker keeps deltas that it read.

    A setting says how much all of them take; else it is the part of an eighth of the machine's memory that the
    worker was promised of all its GPUs' memory, so that all workers of a machine together take an eighth at most,
    and 16 GiB at most. Each has a power of two, in which torch takes page-locked memory, of at most its share.

    Args:
        spec: of the worker.
        devices: its GPUs, by id.

    Raises:
        ConfigError: the setting is no number of MiB.
    """
    given = os.environ.get(DELTA_ARENA, "")
    if given and not (given.isascii() and given.isdigit()):
        raise ConfigError(f"{DELTA_ARENA} is {given!r}; give a whole number of MiB, 0 for none")
    share = (int(given) if given else _MOST_ARENA_MIB) // spec.config.num_gpus
    if not given:
        whole_mib = read_machine().memory_bytes // _ARENA_PART >> 20
        for device_id, promised_bytes in spec.promised_bytes().items():
            device = devices[device_id]
            share = min(share, whole_mib * promised_bytes // (device.total_bytes * device.on_node))
    return 1 << (share.bit_length() - 1) if share else 0


def additional_config(
    config: DeploymentConfig, *, for_profile: bool = False, kept_mib: int = 0
) -> dict[str, object]:
    """Return the value of ``--additional-config`` for the slots of ``config``; empty: vLLM needs none.

    Args:
        for_profile: whether loads are timed, each by one call that waits for it.
        kept_mib: in which the worker keeps deltas that it read; those of profiles load each but once.
    """
    found = _of_deltas(config, kept_mib) if config.has_delta_slots else {}
    if config.adapter_rank and has_adapter_kernels():
        found |= _settings().adapters_config()
    if config.adapter_rank and _loads_aside(config) and not for_profile:
        found |= _settings().adapter_loads_config()
    return found


def _of_deltas(config: DeploymentConfig, kept_mib: int) -> dict[str, object]:
    """Return settings of slots that have room for all that a fine-tune may change.

    Output layers that are the embedding have its format, whatever is said here.
    """
    from fingerprint.delta import EMBEDDING_FORMAT  # loads NumPy: a daemon without such slots does not

    found: dict[str, object] = (
        _settings()
        .Settings(
            format=str(config.delta_format),
            embedding_format=EMBEDDING_FORMAT.name,
            output_format=str(config.delta_format),
            norms=True,
            adapters=config.adapter_rank > 0,
            background=True,
            arena_mib=kept_mib,
        )
        .to_config()
    )
    return found


def plug_in_releases() -> tuple[str, ...]:
    """Return the releases of vLLM that the plug-in was written for."""
    releases: tuple[str, ...] = _settings().RELEASES
    return releases


def takes_release(version: str) -> bool:
    """Return whether the plug-in was written for ``version`` of vLLM."""
    return version in plug_in_releases()


@cache
def _settings() -> ModuleType:
    if _PACKAGE not in sys.modules:
        folder = Path(PLUG_IN_PATH) / _PACKAGE
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"{_PACKAGE}.settings")
