"""Modules of the profiling worker, imported where the worker's own Python would find them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from daemon.engines.external import PROFILING_PATH

__all__ = ["profiling_module"]


def profiling_module(name: str) -> ModuleType:
    """Return the module ``iserve_profiling.name``."""
    sys.path.insert(0, PROFILING_PATH)
    try:
        return importlib.import_module(f"iserve_profiling.{name}")
    finally:
        sys.path.remove(PROFILING_PATH)
