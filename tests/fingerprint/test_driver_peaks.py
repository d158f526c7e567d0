"""Peaks from what a driver reports, against the datasheets of GPUs that are listed."""

from __future__ import annotations

import pytest

from fingerprint.driver_peaks import Benchmark, DriverFacts, described_gpu
from fingerprint.errors import NotMeasuredError
from fingerprint.gpu_file import spec_of
from fingerprint.gpus import gpu_spec
from tests.golden_words import Golden

ADA_6000 = DriverFacts(
    product="NVIDIA RTX 6000 Ada Generation",
    memory_bytes=49140 * 2**20,
    compute_capability=(8, 9),
    cuda_cores=18176,
    sm_mhz=2505,
    memory_mhz=10001,
    memory_bus_bits=384,
    pcie_generation=4,
    pcie_lanes=16,
    power_limit_w=300.0,
)


# Cores, boost and memory clocks as the vendor prints them; a driver's highest clock may be above the boost clock.
@pytest.mark.parametrize(
    ("name", "product", "cores", "boost_mhz", "memory_mhz", "bus_bits", "pcie"),
    [
        ("t4", "Tesla T4", 2560, 1590, 5001, 256, (3, 16)),
        ("a6000", "NVIDIA RTX A6000", 10752, 1800, 8001, 384, (4, 16)),
        ("a40", "NVIDIA A40", 10752, 1740, 7251, 384, (4, 16)),
        ("l40s", "NVIDIA L40S", 18176, 2520, 9001, 384, (4, 16)),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 16384, 2520, 10501, 384, (4, 16)),
        ("rtx5090", "NVIDIA GeForce RTX 5090", 21760, 2407, 14001, 512, (5, 16)),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 24064, 2617, 14001, 512, (5, 16)),
        ("a100-40gb-sxm", "NVIDIA A100-SXM4-40GB", 6912, 1410, 1215, 5120, (4, 16)),
        ("h100-sxm", "NVIDIA H100 80GB HBM3", 16896, 1830, 2619, 5120, (5, 16)),
    ],
)
def test_the_drivers_figures_make_the_datasheets(
    name: str, product: str, cores: int, boost_mhz: int, memory_mhz: int, bus_bits: int, pcie: tuple[int, int]
) -> None:
    listed = gpu_spec(name)
    found = spec_of(
        described_gpu(
            DriverFacts(
                product=product,
                memory_bytes=listed.memory_bytes,
                compute_capability=listed.compute_capability or (0, 0),
                cuda_cores=cores,
                sm_mhz=boost_mhz,
                memory_mhz=memory_mhz,
                memory_bus_bits=bus_bits,
                pcie_generation=pcie[0],
                pcie_lanes=pcie[1],
                power_limit_w=listed.tdp_w,
            )
        )
    )
    assert found.memory_bytes == listed.memory_bytes
    assert found.memory_bytes_per_s == pytest.approx(listed.memory_bytes_per_s, rel=0.02)
    assert found.flops_16bit_per_s == pytest.approx(listed.flops_16bit_per_s, rel=0.03)
    assert found.has_fp8 == listed.has_fp8
    assert found.compute_capability == listed.compute_capability
    assert found.pcie_bytes_per_s == listed.pcie_bytes_per_s
    assert found.tdp_w == listed.tdp_w
    assert found.link_group_size == 1


def test_what_was_reached_stands_where_it_is_more() -> None:
    driver = spec_of(described_gpu(ADA_6000))
    less = Benchmark(memory_bytes_per_s=800e9, flops_16bit_per_s=300e12)
    assert spec_of(described_gpu(ADA_6000, less)) == driver
    more = Benchmark(memory_bytes_per_s=1000e9, flops_16bit_per_s=400e12)
    found = spec_of(described_gpu(ADA_6000, more))
    assert found.memory_bytes_per_s == pytest.approx(1000e9)
    assert found.flops_16bit_per_s == pytest.approx(400e12)


SILENT = DriverFacts(product="NVIDIA A16-4Q", memory_bytes=4 * 2**30, compute_capability=(8, 6))


def test_a_silent_driver_needs_a_benchmark(golden: Golden) -> None:
    with golden.raises("fingerprint", NotMeasuredError):
        described_gpu(SILENT)
    found = spec_of(described_gpu(SILENT, Benchmark(memory_bytes_per_s=180e9, flops_16bit_per_s=30e12)))
    assert found.memory_bytes_per_s == pytest.approx(180e9)
    assert (found.has_fp8, found.tdp_w) == (False, None)


def test_an_unknown_generation_does_what_its_cores_do_in_32_bits() -> None:
    """A floor: 12,800 cores at 2 GHz, two flops each."""
    later = DriverFacts(
        product="NVIDIA X",
        memory_bytes=2**36,
        compute_capability=(13, 0),
        cuda_cores=12_800,
        sm_mhz=2000,
        memory_mhz=1000,
        memory_bus_bits=4096,
    )
    found = spec_of(described_gpu(later))
    assert found.flops_16bit_per_s == pytest.approx(12_800 * 2e9 * 2)
    assert found.has_fp8
