"""Modules of the delta kernels, imported where an engine's own Python would find them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

import daemon

__all__ = ["VARIANTS_PATH", "kernel_module", "variant_module"]

VARIANTS_PATH = str(Path(daemon.__file__).parent / "engines" / "vllm" / "variants")


def variant_module(name: str) -> ModuleType:
    """Return the module ``iserve_variants.name``, which needs torch alone."""
    sys.path.insert(0, VARIANTS_PATH)
    try:
        return importlib.import_module(f"iserve_variants.{name}")
    finally:
        sys.path.remove(VARIANTS_PATH)


def kernel_module(name: str) -> ModuleType:
    """Return the module ``iserve_variants.name`` for Triton's interpreter; skip the tests where there is none."""
    if importlib.util.find_spec("triton") is None:
        assert (sys.platform, platform.machine()) != ("linux", "x86_64"), "Triton is a development dependency"
        pytest.skip("needs Triton, of which there are wheels for Linux on x86-64", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") != "1":  # set for all tests (tests/conftest.py)
        pytest.skip(
            "on a GPU kernels are compiled: tests.bench.delta_kernels checks them", allow_module_level=True
        )
    version = tuple(map(int, importlib.import_module("triton").__version__.split(".")[:2]))
    if version < (3, 8):
        pytest.skip("needs Triton 3.8: older interpreters do not work with NumPy 2.4", allow_module_level=True)
    return variant_module(name)
