"""What this worker's device can do: datasheet figures for a known GPU, a short measurement for anything else.

A CPU share is measured with the cores this process may use; call it in a pinned, otherwise idle process. The
figures are what torch reaches, so they are lower than the hardware's peaks, and efficiencies over them near 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import match_device

__all__ = ["measure_device"]

_MIN_SECONDS = 0.1  # per figure
_COPY_BYTES = 256 * 2**20  # well beyond a CPU's caches
_ALL = 2**20
_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


def measure_device(*, memory_bytes: int) -> GpuSpec:
    """The device torch computes on now. Takes about half a second on a CPU.

    Args:
        memory_bytes: what a worker may use of it (a CPU share has no driver to ask).

    Returns:
        On a CPU ``name`` is "cpu"; the link between two shares is a copy through memory, which reads and
        writes, so its bandwidth is taken as half the memory's (not measured over gloo, whose latency is larger).
    """
    if torch.cuda.is_available():
        known = match_device(torch.cuda.get_device_name())
        if known is not None:
            return known
        return _measured("cuda", torch.cuda.get_device_name(), memory_bytes)
    return _measured("cpu", "cpu", memory_bytes)


def _measured(kind: str, name: str, memory_bytes: int) -> GpuSpec:
    bandwidth = _bytes_per_s(kind)
    return GpuSpec(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=bandwidth,
        flops_16bit_per_s=_flops_per_s(kind),
        flops_8bit_per_s=None,
        flops_fp8_per_s=None,
        compute_capability=torch.cuda.get_device_capability() if kind == "cuda" else None,
        link_bytes_per_s=bandwidth / 2,
        link_group_size=_ALL if kind == "cpu" else 1,  # all shares of a CPU reach each other through memory
        pcie_bytes_per_s=bandwidth / 2,
    )


def _bytes_per_s(kind: str) -> float:
    """Bandwidth of reading, as a step reads its weights: a matrix of 16-bit weights times one vector."""
    rows = _COPY_BYTES // 2 // 4096
    weights = torch.ones(rows, 4096, dtype=torch.bfloat16, device=kind)
    vector = torch.ones(1, 4096, dtype=torch.bfloat16, device=kind)
    return _COPY_BYTES / _best_s(kind, lambda: torch.nn.functional.linear(vector, weights))


def _flops_per_s(kind: str) -> float:
    size = _MATMUL_SIZE[kind]
    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=kind)
    return 2 * size**3 / _best_s(kind, lambda: matrix @ matrix)


def _best_s(kind: str, work: Callable[[], object]) -> float:
    """Shortest of the runs that fit into ``_MIN_SECONDS`` (at least three) after one that warms up."""
    times: list[float] = []
    with torch.inference_mode():
        work()
        begun = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - begun < _MIN_SECONDS:
            if kind == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if kind == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return min(times)
