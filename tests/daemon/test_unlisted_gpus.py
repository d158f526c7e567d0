"""GPUs that the datasheet table does not have: the driver's figures, the benchmark, the file that is kept."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from daemon.procfs import pids_with
from daemon.unlisted_gpus import device_spec, kept_file, measure_if_unlisted
from fingerprint.gpu_file import read_gpu_file
from fingerprint.gpus import gpu_spec
from tests.golden_words import Golden

ADA = "NVIDIA RTX 6000 Ada Generation"
MARK = "ISERVE_TEST_BENCHMARK"


@pytest.fixture
def driver(fake_nvml: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Two RTX 6000 Ada, and a home of their own."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    for gpu in fake_nvml.GPUS:
        gpu.name, gpu.compute_capability, gpu.total = ADA, (8, 9), 49140 * 2**20
        gpu.cores, gpu.max_sm_mhz, gpu.max_memory_mhz, gpu.bus_bits = 18176, 2505, 10001, 384
    return fake_nvml


def python_that(tmp_path: Path, lines: str) -> str:
    """An interpreter that runs ``lines`` in place of the script that it is given."""
    script = tmp_path / "stand-in.py"
    script.write_text(lines)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def saying(memory: object, flops: object) -> str:
    figures = json.dumps({"memory_bytes_per_s": memory, "flops_16bit_per_s": flops})
    return f"print('a warning of torch')\nprint({figures!r})\n"


def test_the_driver_describes_it(driver: ModuleType) -> None:
    found = device_spec(ADA)
    assert found is not None
    assert (found.name, found.memory_bytes, found.compute_capability) == (ADA, 49140 * 2**20, (8, 9))
    assert found.memory_bytes_per_s == pytest.approx(960e9, rel=0.01)  # NVIDIA's sheet: 960 GB/s
    assert found.flops_16bit_per_s == pytest.approx(364.2e12, rel=0.01)  # and 364.2 TFLOP/s
    assert found.has_fp8
    assert not kept_file(ADA).exists()


def test_a_listed_gpu_is_its_row(driver: ModuleType) -> None:
    assert device_spec("NVIDIA H200") == gpu_spec("h200")
    measure_if_unlisted("NVIDIA H200", "GPU-aaaa", "/no/python")
    assert not kept_file("NVIDIA H200").parent.exists()


@pytest.mark.parametrize(
    "silent", ["nvmlDeviceGetMemoryBusWidth", "nvmlDeviceGetNumGpuCores", "nvmlDeviceGetCudaComputeCapability"]
)
def test_of_what_says_too_little_nothing_is_known(driver: ModuleType, silent: str) -> None:
    driver.FAILING[silent, "GPU-aaaa"] = driver.NVML_ERROR_NOT_SUPPORTED
    assert device_spec(ADA) is None
    assert device_spec("NVIDIA Abacus") is None


def test_what_the_benchmark_reaches_is_kept_and_taken(driver: ModuleType, tmp_path: Path) -> None:
    lines = f"import os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-aaaa'\n{saying(990e9, 300e12)}"
    measure_if_unlisted(ADA, "GPU-aaaa", python_that(tmp_path, lines))
    kept = read_gpu_file(kept_file(ADA))
    assert kept.memory_bytes_per_s == pytest.approx(990e9)  # more than the driver's figure
    assert kept.flops_16bit_per_s == pytest.approx(364.2e12, rel=0.01)  # less than it
    assert "990 GB/s, 300.0 TFLOP/s" in json.loads(kept_file(ADA).read_text())["source"]
    driver.FAILING["nvmlInit", ""] = driver.NVML_ERROR_LIBRARY_NOT_FOUND
    found = device_spec(ADA)
    assert found is not None
    assert (found.name, found.memory_bytes_per_s) == (ADA, kept.memory_bytes_per_s)


def test_a_silent_drivers_gpu_is_what_the_benchmark_reaches(driver: ModuleType, tmp_path: Path) -> None:
    for gpu in driver.GPUS:
        for name in ("nvmlDeviceGetMemoryBusWidth", "nvmlDeviceGetNumGpuCores"):
            driver.FAILING[name, gpu.uuid] = driver.NVML_ERROR_NOT_SUPPORTED
    measure_if_unlisted(ADA, "GPU-aaaa", python_that(tmp_path, saying(700e9, 200e12)))
    found = device_spec(ADA)
    assert found is not None
    assert found.memory_bytes_per_s == pytest.approx(700e9)


def test_it_is_measured_once(driver: ModuleType, tmp_path: Path) -> None:
    measure_if_unlisted(ADA, "GPU-aaaa", python_that(tmp_path, saying(990e9, 300e12)))
    first = kept_file(ADA).read_bytes()
    measure_if_unlisted(ADA, "GPU-aaaa", python_that(tmp_path, saying(995e9, 400e12)))
    assert kept_file(ADA).read_bytes() == first


def test_a_file_that_people_edited_holds(driver: ModuleType, tmp_path: Path) -> None:
    measure_if_unlisted(ADA, "GPU-aaaa", python_that(tmp_path, saying(990e9, 300e12)))
    fields = json.loads(kept_file(ADA).read_text()) | {"usd_per_gpu_hour": 0.83, "name": "mine"}
    kept_file(ADA).write_text(json.dumps(fields))
    found = device_spec(ADA)
    assert found is not None
    assert (found.name, found.price_usd_per_gpu_hour) == (ADA, 0.83)


def test_a_broken_file_is_told_and_the_driver_is_asked(
    driver: ModuleType, caplog: pytest.LogCaptureFixture, golden: Golden
) -> None:
    kept_file(ADA).parent.mkdir(parents=True)
    kept_file(ADA).write_text('{"nam": 1}')
    with caplog.at_level(logging.WARNING):
        found = device_spec(ADA)
    assert found is not None
    assert found.memory_bytes_per_s == pytest.approx(960e9, rel=0.01)
    golden("daemon", caplog.messages)


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "raise SystemExit('torch sees no GPU')",
        "print('{')",
        "print('[]')",
        "print('{}')",
        saying(0, 1e12),
        saying(-1e12, 1e12),
        saying("fast", 1e12),
        'print(\'{"memory_bytes_per_s": NaN, "flops_16bit_per_s": 1e12}\')',
        'print(\'{"memory_bytes_per_s": Infinity, "flops_16bit_per_s": 1e12}\')',
        saying(1e30, 1e12),  # beyond what a description may hold
        "print('x' * 10_000_000)",
    ],
)
def test_a_benchmark_that_says_nothing_of_use_changes_nothing(
    driver: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, lines: str
) -> None:
    before = device_spec(ADA)
    with caplog.at_level(logging.WARNING):
        measure_if_unlisted(ADA, "GPU-aaaa", python_that(tmp_path, lines))
    assert caplog.records
    assert not kept_file(ADA).exists()
    assert device_spec(ADA) == before


def test_an_interpreter_that_is_gone_changes_nothing(driver: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        measure_if_unlisted(ADA, "GPU-aaaa", "/no/such/python")
    assert "does not start" in caplog.text
    assert not kept_file(ADA).exists()


HANGS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


class GivenUpError(Exception):
    """Error that ends a benchmark from outside."""


def test_it_ends_with_all_its_processes_when_it_is_given_up(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., object]
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    seen: list[int] = []

    def give_up_when_it_runs() -> None:
        others = list(pids_with(MARK, str(tmp_path)))
        if len(others) >= 2:  # it and its child
            seen.extend(others)
            raise GivenUpError

    with pytest.raises(GivenUpError):
        measure_if_unlisted(ADA, "GPU-aaaa", python_that(tmp_path, HANGS), go_on=give_up_when_it_runs)
    assert len(seen) >= 2
    until(lambda: not list(pids_with(MARK, str(tmp_path))), "processes of the benchmark are left")
    assert not kept_file(ADA).exists()


def test_one_that_hangs_is_ended_at_its_limit(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., object]
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    measure_if_unlisted(ADA, "GPU-aaaa", python_that(tmp_path, HANGS), limit_s=0.5)
    until(lambda: not list(pids_with(MARK, str(tmp_path))), "processes of the benchmark are left")
    assert device_spec(ADA) is not None
