"""The datasheet table and its names."""

import json
import os
import re
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError, NotFoundError
from fingerprint.gpu_spec import Vendor
from fingerprint.gpus import gpu_spec, known_gpus, match_device, parse_gpus
from tests.golden_words import Golden


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("a6000", "a6000"),
        ("A6000", "a6000"),
        ("h200", "h200-sxm"),
        ("H200-SXM", "h200-sxm"),
        ("h100", "h100-sxm"),
        ("a100", "a100-80gb-sxm"),
        ("a100-40gb", "a100-40gb-sxm"),
        ("l40s", "l40s"),
        ("b200", "b200-sxm"),
        ("NVIDIA RTX A6000 48GB", "a6000"),
        ("rtx5090", "rtx5090"),
        ("RTX-5090", "rtx5090"),
        ("5090", "rtx5090"),
        ("RTX 5090", "rtx5090"),
        ("RTX PRO 6000", "rtx-pro-6000"),
        ("pro6000", "rtx-pro-6000"),
        ("b300", "b300-sxm"),
        ("GB300", "gb300"),
        ("h100-nvl", "h100-nvl"),
        ("h20", "h20"),
        ("a40", "a40"),
        ("l20", "l20"),
        ("mi300x", "mi300x"),
        ("MI325X", "mi325x"),
        ("mi355x", "mi355x"),
    ],
)
def test_names_and_aliases(asked: str, name: str) -> None:
    assert gpu_spec(asked).name == name


def test_a6000_row_is_the_datasheet() -> None:
    gpu = gpu_spec("a6000")
    assert gpu.memory_bytes == 49140 * 2**20
    assert gpu.memory_bytes_per_s == 768e9
    assert gpu.flops_16bit_per_s == 154.8e12
    assert not gpu.has_fp8
    assert gpu.compute_capability == (8, 6)
    assert gpu.tdp_w == 300


def test_a6000_pairs_are_bridged_and_everything_beyond_is_pcie() -> None:
    gpu = gpu_spec("a6000")
    assert gpu.slowest_link_bytes_per_s(2) == 112.5e9 / 2
    assert gpu.slowest_link_bytes_per_s(4) == 32e9


def test_nvlink_figures_are_one_direction() -> None:
    assert gpu_spec("h200").slowest_link_bytes_per_s(8) == 450e9
    assert gpu_spec("l40s").slowest_link_bytes_per_s(2) == 32e9  # no NVLink at all


def test_unknown_gpu_names_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match=r"'h300'.*a6000.*h200-sxm"):
        gpu_spec("h300")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8xH100", "h100:8"),
        ("8 x h100", "h100:8"),
        ("8:h100", "h100:8"),
        ("h100*8", "h100:8"),
        ("H100 8", "h100:8"),
        ("a600:8", "a6000:8"),
        ("a600", "a6000"),
        ("2xa600", "a6000:2"),
        ("8 x mi300x", "mi300x:8"),
        ("mi300", "mi300x"),
        ("mi30x:8", "mi300x:8"),
        ("rtx509", "rtx5090"),
        ("h100x8", "h100:8"),
        ("rtx5090 x8", "rtx5090:8"),
        ("2xpro600", "pro6000:2"),
    ],
)
def test_a_slip_is_told_what_was_meant(text: str, meant: str, golden: Golden) -> None:
    with golden.raises("fingerprint", NotFoundError):
        parse_gpus(text)


def test_nothing_alike_is_suggested_for_nonsense() -> None:
    for text in ("potato", "8xpotato", "", ":", "x", "9" * 100):
        with pytest.raises(NotFoundError) as caught:
            parse_gpus(text)
        assert "did you mean" not in str(caught.value)


def test_parse_gpus() -> None:
    assert parse_gpus("a6000:8") == (gpu_spec("a6000"), 8)
    assert parse_gpus("h200") == (gpu_spec("h200"), 1)


@pytest.mark.parametrize(
    "text", ["a6000:0", "a6000:1025", "a6000:-1", "a6000:", "a6000:2.5", "a6000:8:8", "a6000:٨"]
)
def test_parse_gpus_bounds_the_count(text: str) -> None:
    with pytest.raises(ConfigError, match="1 to 1024"):
        parse_gpus(text)


def test_several_kinds_are_refused_as_such(golden: Golden) -> None:
    with golden.raises("fingerprint", ConfigError):
        parse_gpus("h100:2,a6000:2")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        _, count = parse_gpus(text)
    except (ConfigError, NotFoundError):
        return
    assert 1 <= count <= 1024


@pytest.mark.parametrize(
    ("nvml_name", "name"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA RTX A6000", "a6000"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L20", "l20"),
    ],
)
def test_nvml_product_names(nvml_name: str, name: str) -> None:
    spec = match_device(nvml_name)
    assert spec is not None
    assert spec.name == name


@pytest.mark.parametrize(
    "other",
    [
        "NVIDIA H200 NVL",
        "NVIDIA H20-3e",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA GB300-WS",
        "NVIDIA GH200 480GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA L40",
        "NVIDIA A10",
        "",
    ],
)
def test_a_part_with_a_similar_name_is_not_the_part(other: str) -> None:
    assert match_device(other) is None


@pytest.mark.parametrize("name", known_gpus())
def test_every_row_is_consistent(name: str) -> None:
    gpu = gpu_spec(name)
    assert gpu.memory_bytes > 8e9
    assert 1e11 < gpu.memory_bytes_per_s < 2e13
    assert not gpu.is_cpu
    if gpu.compute_capability != (10, 3):  # Blackwell Ultra has next to no int8
        assert gpu.flops_16bit_per_s < (gpu.flops_8bit_per_s or 1e20)
    assert gpu.flops_fp8_per_s in (None, pytest.approx(2 * gpu.flops_16bit_per_s, rel=0.02))
    assert gpu.link_bytes_per_s >= gpu.pcie_bytes_per_s
    if not gpu.link_mesh:  # one of a mesh's seven links is as wide as PCIe
        assert (gpu.link_group_size == 1) == (gpu.link_bytes_per_s == gpu.pcie_bytes_per_s)
    assert (gpu.compute_capability is None) == (gpu.vendor is Vendor.AMD) == (gpu.gfx is not None)
    assert gpu.has_fp8 == (gpu.compute_capability is None or gpu.compute_capability >= (8, 9))
    assert not gpu.link_mesh or gpu.vendor is Vendor.AMD


def rows() -> dict[str, dict[str, Any]]:
    return json.loads(resources.files("fingerprint").joinpath("data/gpus.json").read_text())["gpus"]


# Bytes and multiply-adds of a chip follow from its clocks: bus width x memory clock x 2 a cycle, and SMs x boost
# clock x what one SM does of dense 16-bit products per cycle. Both clocks are those that the vendor prints.
@pytest.mark.parametrize(
    ("name", "bus_bits", "memory_mhz", "sms", "boost_mhz", "flops_per_sm_cycle"),
    [
        ("a6000", 384, 8001, 84, 1800, 1024),
        ("a40", 384, 7251, 84, 1740, 1024),
        ("l40s", 384, 9001, 142, 2520, 1024),
        ("rtx4090", 384, 10501, 128, 2520, 512),
        ("rtx5090", 512, 14001, 170, 2407, 512),
        ("rtx-pro-6000", 512, 14001, 188, 2617, 1024),
        ("a100-40gb-sxm", 5120, 1215, 108, 1410, 2048),
        ("h100-sxm", 5120, 2619, 132, 1830, 4096),
    ],
)
def test_peaks_follow_from_the_chip(
    name: str, bus_bits: int, memory_mhz: int, sms: int, boost_mhz: int, flops_per_sm_cycle: int
) -> None:
    gpu = gpu_spec(name)
    assert gpu.memory_bytes_per_s == pytest.approx(2 * bus_bits / 8 * memory_mhz * 1e6, rel=0.02)
    assert gpu.flops_16bit_per_s == pytest.approx(sms * boost_mhz * 1e6 * flops_per_sm_cycle, rel=0.03)


def test_later_parts_of_a_line_are_no_slower() -> None:
    for line in (
        ("a6000", "l40s", "rtx-pro-6000"),
        ("rtx4090", "rtx5090"),
        ("h100-pcie", "h100-nvl"),
        ("h100-sxm", "h200-sxm", "b200-sxm", "gb200", "gb300"),
        ("mi300x", "mi325x", "mi355x"),
    ):
        specs = [gpu_spec(name) for name in line]
        for older, newer in pairwise(specs):
            assert newer.memory_bytes_per_s >= older.memory_bytes_per_s
            assert newer.flops_16bit_per_s >= older.flops_16bit_per_s
            assert newer.memory_bytes >= 0.9 * older.memory_bytes  # 48 GB with ECC is less than without
    assert gpu_spec("h20").flops_16bit_per_s < gpu_spec("h100").flops_16bit_per_s / 6  # what it was made for


def test_every_row_names_its_source_and_date() -> None:
    for name, row in rows().items():
        assert len(row["source"]) > 10, name
        assert re.fullmatch(r"2026-\d\d(-\d\d)?", row["source_date"]), name
        assert row["cross_checked_against"], name


def test_a_mesh_gives_a_gpu_a_link_to_each_other() -> None:
    mi300x = gpu_spec("mi300x")
    assert mi300x.slowest_link_bytes_per_s(8) == 64e9
    assert mi300x.collective_bytes_per_s(2) == 64e9
    assert mi300x.collective_bytes_per_s(8) == 7 * 64e9
    assert mi300x.collective_bytes_per_s(16) == mi300x.pcie_bytes_per_s
    assert gpu_spec("h200").collective_bytes_per_s(8) == 450e9  # a switch: one port, however many are beyond it
    assert gpu_spec("gb200").collective_bytes_per_s(64) == 900e9


def test_every_price_is_the_median_of_its_sources() -> None:
    for name, row in rows().items():
        prices = sorted(entry["usd"] for entry in row["price_sources"])
        if not prices:
            assert row["price_usd_per_gpu_hour"] is None, name
            continue
        middle = (prices[(len(prices) - 1) // 2] + prices[len(prices) // 2]) / 2
        assert row["price_usd_per_gpu_hour"] == pytest.approx(middle, rel=1e-3), name


@pytest.mark.skipif("ISERVE_REFERENCE_DATA" not in os.environ, reason="ISERVE_REFERENCE_DATA is not set")
def test_the_table_repeats_the_reference_facts() -> None:
    path = Path(os.environ["ISERVE_REFERENCE_DATA"]) / "reference" / "gpus.json"
    for name, row in json.loads(path.read_text())["gpus"].items():
        gpu = gpu_spec(name)
        assert gpu.memory_bytes == row["memory_visible_mib"] * 2**20
        assert gpu.memory_bytes_per_s == row["memory_bandwidth_bytes_per_s"]
        assert gpu.flops_16bit_per_s == row["dense_flops"]["fp16"]
        assert gpu.flops_fp8_per_s == row["dense_flops"]["fp8"]
        assert gpu.price_usd_per_gpu_hour == row["price_usd_per_gpu_hour"]["median"]
