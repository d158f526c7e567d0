"""Files that describe a GPU: what is read, and what is refused in which words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import BadInputError, ConfigError, NotFoundError
from fingerprint.gpu_file import MAX_FILE_BYTES, describe, plain_name, read_gpu_file, spec_of
from fingerprint.gpu_spec import Vendor
from fingerprint.gpus import gpu_spec, parse_gpus
from tests.golden_words import Golden

FIELDS: dict[str, Any] = {
    "name": "my-gpu",
    "memory_mib": 49140,
    "memory_gb_per_s": 960,
    "tflops_16bit": 364.2,
    "compute_capability": "8.9",
}
A6000_FILE = {
    "name": "other-a6000",
    "memory_mib": 49140,
    "memory_gb_per_s": 768,
    "tflops_16bit": 154.8,
    "tops_int8": 309.7,
    "compute_capability": "8.6",
    "link_gb_per_s": 56.25,
    "link_group_size": 2,
    "tdp_w": 300,
    "usd_per_gpu_hour": 0.66,
}
MI300X_FILE = {
    "name": "other-mi300x",
    "memory_mib": 196592,
    "memory_gb_per_s": 5300,
    "tflops_16bit": 1307.4,
    "tflops_fp8": 2614.9,
    "tops_int8": 2614.9,
    "gfx": "gfx942",
    "link_gb_per_s": 64,
    "link_group_size": 8,
    "link_mesh": True,
    "pcie_gb_per_s": 64,
    "tdp_w": 750,
    "usd_per_gpu_hour": 3.45,
}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / "gpu.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(("name", "fields"), [("a6000", A6000_FILE), ("mi300x", MI300X_FILE)])
def test_a_file_with_a_rows_figures_is_that_row(tmp_path: Path, name: str, fields: dict[str, Any]) -> None:
    found, listed = read_gpu_file(written(tmp_path, fields)), gpu_spec(name)
    for field in listed.__slots__:
        wanted = f"other-{name}" if field == "name" else getattr(listed, field)
        assert getattr(found, field) == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), field


def test_what_is_left_out_is_unknown_or_pcie(tmp_path: Path) -> None:
    found = read_gpu_file(written(tmp_path, FIELDS))
    assert (found.flops_fp8_per_s, found.tdp_w, found.price_usd_per_gpu_hour) == (None, None, None)
    assert (found.link_group_size, found.link_bytes_per_s, found.pcie_bytes_per_s) == (1, 32e9, 32e9)
    assert found.vendor is Vendor.NVIDIA


@pytest.mark.parametrize(
    "change",
    [
        {"memory_gbps": 960},
        {"zzz": 1},
        {"a\u001b[31m": 1},
        {"memory_mib": None},
        {"memory_mib": "48 GiB"},
        {"memory_mib": 48},
        {"memory_gb_per_s": 5.3},
        {"tflops_16bit": 3.6e14},
        {"tflops_16bit": -1},
        {"compute_capability": 8.9},
        {"compute_capability": "sm_89"},
        {"compute_capability": None},
        {"gfx": "gfx942"},
        {"compute_capability": None, "gfx": "MI300X"},
        {"link_gb_per_s": 50},
        {"link_group_size": 8},
        {"link_mesh": True},
        {"link_group_size": 0},
        {"name": ""},
        {"name": "a:8"},
        {"name": "cpu"},
        {"name": "x" * 65},
    ],
    ids=str,
)
def test_a_field_that_cannot_be_used_is_named(tmp_path: Path, change: dict[str, Any], golden: Golden) -> None:
    with golden.raises("fingerprint", BadInputError) as caught:
        read_gpu_file(written(tmp_path, FIELDS | change))
    assert "gpu.json" in str(caught.value)


@pytest.mark.parametrize("missing", ["name", "memory_mib", "memory_gb_per_s", "tflops_16bit"])
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"missing {missing}"):
        read_gpu_file(written(tmp_path, {name: value for name, value in FIELDS.items() if name != missing}))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'"a6000"', b"\xff\xfe", b"[" * 60_000, b"{}", b"NaN"]
)
def test_what_is_no_description_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^f\.json"):
        describe(data, "f.json")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(FIELDS | {"source": "x" * MAX_FILE_BYTES}))
    with pytest.raises(ConfigError, match="65,536 bytes"):
        read_gpu_file(path)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(NotFoundError, match="not a file"):
            read_gpu_file(path)
    with pytest.raises(NotFoundError, match="No such file"):
        read_gpu_file(tmp_path / "none.json")


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        described = describe(data, "f.json")
    except BadInputError:
        return
    assert spec_of(described).memory_bytes > 0


def test_the_described_gpu_is_meant_by_its_name_alone(tmp_path: Path, golden: Golden) -> None:
    mine = read_gpu_file(written(tmp_path, FIELDS))
    assert parse_gpus("MY-GPU:8", mine) == (mine, 8)
    with golden.raises("fingerprint", NotFoundError):
        parse_gpus("h200:8", mine)
    with pytest.raises(ConfigError, match="1 to 1024"):
        parse_gpus("my-gpu:0", mine)
    listed = read_gpu_file(written(tmp_path, FIELDS | {"name": "H200"}))
    with golden.raises("fingerprint", ConfigError):
        parse_gpus("h200:8", listed)


@given(st.text(max_size=100))
def test_any_product_name_becomes_a_name(product: str) -> None:
    fields = FIELDS | {"name": plain_name(product)}
    if fields["name"].casefold() != "cpu":
        describe(json.dumps(fields).encode(), "f.json")
