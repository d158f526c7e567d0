"""Our plug-in for variants (``variants``) as a launch gives it to vLLM: its folder, and its settings.

The plug-in's module of settings is used itself, which needs neither torch nor vLLM. It has absolute imports of a
package that is found in vLLM's interpreter by ``PYTHONPATH``; here it is found by its folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from daemon.worker_spec import WorkerSpec
from fingerprint.config import DeploymentConfig

__all__ = [
    "ADAPTER_KERNELS",
    "PLUG_IN_NAME",
    "PLUG_IN_PATH",
    "additional_config",
    "has_adapter_kernels",
    "may_need_plug_in",
    "needs_plug_in",
    "plug_in_releases",
    "takes_release",
]

ADAPTER_KERNELS = "ISERVE_VLLM_ADAPTER_KERNELS"  # a setting of iServe: 1 for our kernels of adapters

PLUG_IN_PATH = str(Path(__file__).parent / "variants")  # for ``PYTHONPATH``: the package, and its entry point
PLUG_IN_NAME = _PACKAGE = "iserve_variants"  # of the entry point, and of its package


def has_adapter_kernels() -> bool:
    """Return whether adapters are to be computed by our kernels: so the environment says (docs/decisions/0054)."""
    return os.environ.get(ADAPTER_KERNELS, "").lower() in ("1", "true", "yes")


def needs_plug_in(config: DeploymentConfig) -> bool:
    """Return whether vLLM needs the plug-in for the slots of ``config``."""
    return config.has_delta_slots or (config.adapter_rank > 0 and has_adapter_kernels())


def may_need_plug_in(spec: WorkerSpec) -> bool:
    """Return whether a worker of ``spec`` may need the plug-in: a profiling one gets its slots with each order."""
    return needs_plug_in(spec.config) or (spec.profiling and has_adapter_kernels())


def additional_config(config: DeploymentConfig) -> dict[str, object]:
    """Return the value of ``--additional-config`` for the slots of ``config``; empty: vLLM needs none."""
    deltas = _of_deltas(config) if config.has_delta_slots else {}
    adapters = _settings().adapters_config() if config.adapter_rank and has_adapter_kernels() else {}
    return deltas | adapters


def _of_deltas(config: DeploymentConfig) -> dict[str, object]:
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
