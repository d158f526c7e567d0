"""Specification of one GPU (or a CPU offered as a device).

Values only; the datasheet table is ``fingerprint.gpus``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fingerprint.interconnect import MeasuredLinks

__all__ = ["GpuSpec", "Vendor"]


class Vendor(StrEnum):
    """Kind of a device: an NVIDIA GPU, an AMD GPU, or a CPU (share)."""

    NVIDIA = "nvidia"
    AMD = "amd"
    CPU = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """Peak figures of one device, and what it costs.

    ``None`` means the hardware has no such thing, or that it is not known; nothing is ever guessed from it.
    """

    name: str
    """Short name such as `a6000`, `h200` or `cpu`."""
    memory_bytes: int
    """Memory that the driver offers."""
    memory_bytes_per_s: float
    """Peak memory bandwidth in bytes per second."""
    flops_16bit_per_s: float
    """Peak dense 16-bit operations per second."""
    flops_8bit_per_s: float | None
    """Peak dense int8 tensor operations per second; None: none, or not known."""
    flops_fp8_per_s: float | None
    """Peak dense fp8 operations per second; None: none, or not known."""
    compute_capability: tuple[int, int] | None
    """CUDA compute capability, major and minor; None: no NVIDIA GPU."""
    link_bytes_per_s: float
    """Bandwidth in one direction between two GPUs of a link group."""
    link_group_size: int
    """GPUs joined by that link: 2 for NVLink bridge pairs, 8 for all to all."""
    pcie_bytes_per_s: float
    """Bandwidth in one direction beyond the link group."""
    tdp_w: float | None = None
    """Thermal design power in watts; None: not known."""
    price_usd_per_gpu_hour: float | None = None
    """List price in US dollars of one GPU for an hour; None: not known."""
    gfx: str | None = None
    """Instruction set of an AMD GPU, such as `gfx942`; None: no AMD GPU."""
    link_mesh: bool = False
    """Whether each pair of the link group has a link of its own; false: a switch or bridge joins all."""
    interconnect: tuple[MeasuredLinks, ...] = ()
    """Measured times of groups of these GPUs; empty: not measured."""

    @property
    def vendor(self) -> Vendor:
        if self.compute_capability is not None:
            return Vendor.NVIDIA
        return Vendor.CPU if self.gfx is None else Vendor.AMD

    @property
    def is_cpu(self) -> bool:
        return self.vendor is Vendor.CPU

    @property
    def kind(self) -> str:
        """Name of the kind of device in messages."""
        return "CPU device" if self.is_cpu else "GPU"

    @property
    def has_fp8(self) -> bool:
        return self.flops_fp8_per_s is not None

    def measured_links(self, group: int) -> MeasuredLinks | None:
        """Return the measured times of ``group`` adjacent GPUs; None: not measured."""
        return next((links for links in self.interconnect if links.gpus == group), None)

    def slowest_link_bytes_per_s(self, group: int) -> float:
        """Return the one-direction bandwidth of the slowest link between two of ``group`` adjacent GPUs."""
        if group <= 1:
            return float("inf")
        return self.link_bytes_per_s if group <= self.link_group_size else self.pcie_bytes_per_s

    def collective_bytes_per_s(self, group: int) -> float:
        """Return the one-direction bandwidth of each of ``group`` adjacent GPUs, all exchanging data at once.

        In a mesh a GPU drives its links to all of them; behind a switch, a bridge or PCIe it has one.
        """
        slowest = self.slowest_link_bytes_per_s(group)
        return slowest * (group - 1) if self.link_mesh and 1 < group <= self.link_group_size else slowest
