"""Figures of this worker's device: datasheet figures for a known GPU, a short measurement for anything else.

A CPU share is measured with the cores this process may use; call it in a pinned, otherwise idle process. The
figures are what torch reaches, so they are lower than the hardware's peaks, and efficiencies over them near 1.
"""

from __future__ import annotations

import torch

from daemon.gpu_bench import bytes_per_s, flops_per_s
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import match_device

__all__ = ["measure_device"]

_SECONDS = 0.1  # per figure
_ALL = 2**20


def measure_device(*, memory_bytes: int) -> GpuSpec:
    """Measure the device torch computes on now. Takes about half a second on a CPU.

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
    bandwidth = bytes_per_s(kind, _SECONDS)
    return GpuSpec(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=bandwidth,
        flops_16bit_per_s=flops_per_s(kind, _SECONDS),
        flops_8bit_per_s=None,
        flops_fp8_per_s=None,
        compute_capability=torch.cuda.get_device_capability() if kind == "cuda" else None,
        link_bytes_per_s=bandwidth / 2,
        link_group_size=_ALL if kind == "cpu" else 1,  # all shares of a CPU reach each other through memory
        pcie_bytes_per_s=bandwidth / 2,
    )
