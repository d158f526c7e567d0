"""What one GPU (or a CPU offered as a device) can do. Values only; the datasheet table is ``fingerprint.gpus``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GpuSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """Peak figures of one device, and what it costs.

    ``None`` means the hardware has no such thing, or that it is not known; nothing is ever guessed from it.
    """

    name: str  # "a6000", "h200", "cpu"
    memory_bytes: int  # what the driver offers
    memory_bytes_per_s: float
    flops_16bit_per_s: float  # dense
    flops_8bit_per_s: float | None  # dense int8 tensor operations
    flops_fp8_per_s: float | None
    compute_capability: tuple[int, int] | None  # None: not an NVIDIA GPU
    link_bytes_per_s: float  # one direction, between two GPUs of one link group
    link_group_size: int  # GPUs joined by that link (2: NVLink bridge pairs; 8: all to all)
    pcie_bytes_per_s: float  # one direction, beyond the link group
    tdp_w: float | None = None
    price_usd_per_gpu_hour: float | None = None

    @property
    def has_fp8(self) -> bool:
        return self.flops_fp8_per_s is not None

    def slowest_link_bytes_per_s(self, group: int) -> float:
        """One-direction bandwidth of the slowest link among ``group`` adjacent GPUs."""
        if group <= 1:
            return float("inf")
        return self.link_bytes_per_s if group <= self.link_group_size else self.pcie_bytes_per_s
