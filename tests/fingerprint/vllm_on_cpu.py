"""vLLM's model classes without a GPU: its platform says that it is an H200. Import before vLLM's engine.

Weights lie on torch's meta device and no kernel is run; vLLM's compiled modules, which need CUDA's libraries, are
empty ones. What it answers is what its own Python says of shapes. For ``record_kv_specs`` alone.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch
import torch._ops
import torch.library

_COMPILED = ("_C_stable_libtorch", "_C", "_moe_C_stable_libtorch", "_moe_C", "cumem_allocator")
_ATTENTION = ("_vllm_fa2_C", "_vllm_fa3_C")
_OPERATORS = ("_C", "_moe_C", "_C_cache_ops", "_vllm_fa3_C", "_C_custom_ar", "_C_stable_libtorch")
GIB = 2**30


class _Anything:
    """An operator that is asked what it supports: everything."""

    def __call__(self, *_: object, **__: object) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _NoStream:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Properties:
    name, major, minor = "NVIDIA H200", 9, 0
    multi_processor_count, total_memory, L2_cache_size = 132, 141 * GIB, 50 * 2**20
    shared_memory_per_block_optin, warp_size = 232_448, 32


def play_h200() -> None:
    """Make every later import of vLLM in this process believe in an H200."""
    for name in [f"vllm.{one}" for one in _COMPILED] + [f"vllm.vllm_flash_attn.{one}" for one in _ATTENTION]:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    _answer_operators()
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    torch.cuda.get_device_properties = lambda *_, **__: _Properties()
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_stream = lambda *_: _NoStream()
    torch.cuda.Stream = torch.cuda.Event = _NoStream
    _set_platform()


def _answer_operators() -> None:
    of_namespace = torch._ops._OpNamespace.__getattr__
    register_fake = torch.library.register_fake

    def operator(self: Any, name: str) -> Any:
        try:
            return of_namespace(self, name)
        except AttributeError:
            if name.startswith("__") or str(self.name) not in _OPERATORS:
                raise
            return _Anything()

    def register(op: Any, func: Any = None, **options: Any) -> Any:
        def keep(function: Any) -> Any:
            try:
                return register_fake(op, function, **options)
            except RuntimeError:  # of an operator that is not there
                return function

        return keep if func is None else keep(func)

    torch._ops._OpNamespace.__getattr__ = operator
    torch.library.register_fake = register


def _set_platform() -> None:
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H200(CudaPlatformBase):
        device_type = "cpu"  # buffers of layers are made there

    answers = {
        "get_device_capability": DeviceCapability(9, 0),
        "get_device_name": _Properties.name,
        "get_device_total_memory": _Properties.total_memory,
        "device_count": 1,
        "num_compute_units": _Properties.multi_processor_count,
        "is_fully_connected": True,
        "log_warnings": None,
        "get_current_memory_usage": 0.0,
    }
    for name, answer in answers.items():
        setattr(H200, name, staticmethod(lambda *_, answer=answer, **__: answer))
    H200.has_device_capability = staticmethod(
        lambda capability, *_: (capability if isinstance(capability, int) else 10 * capability[0]) <= 90
    )
    vllm.platforms._current_platform = H200()
    import vllm.triton_utils

    class Config:
        def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 2, **_: object) -> None:
            self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages

    vllm.triton_utils.triton.Config = Config
