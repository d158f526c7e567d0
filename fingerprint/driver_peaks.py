"""Peak figures of an NVIDIA GPU from what its driver reports of the chip, for GPUs that no datasheet table has.

Bandwidth is bus width times memory clock, arithmetic is SMs times clock times what one SM of that generation does
in a cycle; the tests hold both against the datasheets of listed GPUs. A short benchmark says what the driver does
not. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.errors import NotMeasuredError
from fingerprint.gpu_file import GpuDescription, plain_name

__all__ = ["Benchmark", "DriverFacts", "described_gpu"]

_MIB, _GB, _TERA, _MHZ = 2**20, 1e9, 1e12, 1e6
_PER_CYCLE = 2.0  # transfers of a memory clock, as the driver counts it, and flops of a multiply-add
# Dense 16-bit flops of one SM in a cycle, with fp32 accumulation, by compute capability.
_SM_FLOPS = {
    (7, 0): 1024,
    (7, 5): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 1024,
}
_HALVED = ((7, 5), (8, 6), (8, 9), (12, 0))  # GeForce parts of these do half with fp32 accumulation
_FEWER_CORES = ((6, 0), (7, 0), (7, 5), (8, 0))  # 64 an SM; every other one has 128
_FP8_SINCE = (8, 9)
_PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 1.0, 4: 2.0, 5: 4.0, 6: 8.0}  # by generation


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverFacts:
    """Facts of one GPU that a driver reports; ``None``: it does not say."""

    product: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    cuda_cores: int | None = None
    sm_mhz: int | None = None  # the highest
    memory_mhz: int | None = None  # the highest
    memory_bus_bits: int | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    power_limit_w: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """Result of a short benchmark on one GPU."""

    memory_bytes_per_s: float
    flops_16bit_per_s: float


def described_gpu(facts: DriverFacts, reached: Benchmark | None = None, *, source: str = "") -> GpuDescription:
    """Describe the GPU by its driver; what was ``reached`` is used where that is more, or all there is.

    A link between GPUs is taken to be PCIe: the driver has no figure of any other link.

    Raises:
        NotMeasuredError: neither says its bandwidth or its arithmetic.
    """
    bandwidth = _most(_bandwidth(facts), None if reached is None else reached.memory_bytes_per_s)
    flops = _most(_flops_16bit(facts), None if reached is None else reached.flops_16bit_per_s)
    if bandwidth is None or flops is None:
        what = "memory bandwidth" if bandwidth is None else "arithmetic"
        raise NotMeasuredError(
            f"the driver of {facts.product!r} does not say what its {what} follows from, and it was not measured"
        )
    lane = _PCIE_LANE_GB_PER_S.get(facts.pcie_generation or 0)
    pcie = None if lane is None or not facts.pcie_lanes else lane * facts.pcie_lanes
    return GpuDescription(
        name=plain_name(facts.product),
        memory_mib=facts.memory_bytes / _MIB,
        memory_gb_per_s=bandwidth / _GB,
        tflops_16bit=flops / _TERA,
        tflops_fp8=2 * flops / _TERA if facts.compute_capability >= _FP8_SINCE else None,
        compute_capability="{}.{}".format(*facts.compute_capability),
        pcie_gb_per_s=GpuDescription.pcie_gb_per_s if pcie is None else pcie,
        tdp_w=facts.power_limit_w or None,
        source=source,
    )


def _most(*figures: float | None) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)


def _bandwidth(facts: DriverFacts) -> float | None:
    if not facts.memory_bus_bits or not facts.memory_mhz:
        return None
    return facts.memory_bus_bits / 8 * facts.memory_mhz * _MHZ * _PER_CYCLE


def _flops_16bit(facts: DriverFacts) -> float | None:
    """Return the 16-bit FLOP/s by the driver's facts.

    For an unknown generation that is what its cores do in 32 bits, which no GPU does faster than 16.
    """
    if not facts.cuda_cores or not facts.sm_mhz:
        return None
    hertz, per_sm = facts.sm_mhz * _MHZ, _SM_FLOPS.get(facts.compute_capability)
    if per_sm is None:
        return facts.cuda_cores * hertz * _PER_CYCLE
    if facts.compute_capability in _HALVED and "GeForce" in facts.product:
        per_sm //= 2
    return facts.cuda_cores / (64 if facts.compute_capability in _FEWER_CORES else 128) * hertz * per_sm
