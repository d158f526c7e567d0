"""Processes that take the GPU of an engine that is measured, and reasons for a lower clock, from the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.daemon.profiling_modules import profiling_module

GIB = 2**30


@pytest.fixture
def gpus(fake_nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two GPUs as the profiling worker sees them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with profiling_module("base").Nvml(fake_nvml) as nvml:
        yield nvml


@pytest.fixture(scope="module")
def neighbours() -> ModuleType:
    return profiling_module("neighbours")


def test_a_process_that_appears_is_named_and_those_of_the_engine_and_of_before_are_not(
    fake_nvml, gpus, neighbours
) -> None:
    fake_nvml.GPUS[0].processes = {7: GIB}  # before the engine
    before = gpus.processes()
    fake_nvml.GPUS[0].processes = {7: GIB, 100: 20 * GIB}
    known = neighbours.Neighbours(gpus, before, {100, 101}, None)
    assert known.appeared(gpus, {100, 101}) == []
    fake_nvml.GPUS[1].processes = {101: GIB, 4711: 3 * GIB, 4712: None}
    assert known.appeared(gpus, {100, 101}) == [
        {"pid": 4711, "used_bytes": 3 * GIB},
        {"pid": 4712, "used_bytes": None},
    ]
    fake_nvml.GPUS[1].processes = {101: GIB}
    assert known.appeared(gpus, {100, 101}) == []


def test_one_that_appears_while_the_engine_starts_is_seen(fake_nvml, gpus, neighbours) -> None:
    before = gpus.processes()
    fake_nvml.GPUS[0].processes = {100: 20 * GIB, 4711: GIB}
    known = neighbours.Neighbours(gpus, before, {100}, None)
    assert known.appeared(gpus, {100}) == [{"pid": 4711, "used_bytes": GIB}]


def test_ids_of_another_namespace_are_the_engines_where_they_are_there_when_it_has_started(
    fake_nvml, gpus, neighbours
) -> None:
    before = gpus.processes()
    fake_nvml.GPUS[0].processes = {90001: 20 * GIB}  # the engine, which is 100 in its container
    known = neighbours.Neighbours(gpus, before, {100}, None)
    assert known.appeared(gpus, {100}) == []
    fake_nvml.GPUS[0].processes[90002] = GIB
    assert known.appeared(gpus, {100}) == [{"pid": 90002, "used_bytes": GIB}]


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize(("more", "is_seen"), [(-1, False), (0, True)])
def test_without_a_list_memory_tells(fake_nvml, gpus, neighbours, is_listed, more, is_seen) -> None:
    """The engine's allocator grows by 18 GiB in kept recordings: what it holds does not count."""
    if not is_listed:
        fake_nvml.FAILING["nvmlDeviceGetComputeRunningProcesses", "GPU-aaaa"] = fake_nvml.NVML_ERROR_NOT_SUPPORTED
    fake_nvml.GPUS[0].used = 10 * GIB
    known = neighbours.Neighbours(gpus, gpus.processes(), {100}, 9 * GIB)
    fake_nvml.GPUS[0].used = 28 * GIB
    assert known.appeared(gpus, {100}, 27 * GIB) == []
    nbytes = neighbours.LEAST_BYTES + more
    fake_nvml.GPUS[1].used = nbytes
    expected = [{"pid": None, "used_bytes": nbytes}] if is_seen else []
    assert known.appeared(gpus, {100}, 27 * GIB) == expected
    assert known.appeared(gpus, {100}) == [], "the engine does not tell what it holds"


def test_a_family_is_a_process_and_all_below_it(neighbours) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the grandchild is there
        found = neighbours.own_family()
        assert {os.getpid(), child.pid} < found
        below = neighbours.family(child.pid)
        assert len(below) == 2
        assert below < found
        assert os.getppid() not in found
        child.communicate(b"\n")


def test_reasons_for_a_lower_clock_are_those_of_all_gpus(fake_nvml, gpus) -> None:
    fake_nvml.GPUS[0].reasons, fake_nvml.GPUS[1].reasons = 0x05, 0x20  # idle and power cap; heat
    assert gpus.look()[3] == 0x25
    fake_nvml.FAILING["nvmlDeviceGetCurrentClocksEventReasons", "GPU-bbbb"] = fake_nvml.NVML_ERROR_NOT_SUPPORTED
    assert gpus.look()[3] == 0
    del fake_nvml.nvmlDeviceGetCurrentClocksEventReasons  # of an older library
    assert gpus.look()[3] == 0


class TestKernelCaches:
    @pytest.fixture
    def caches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
        return tmp_path

    def test_there_is_none(self, caches) -> None:
        assert profiling_module("kernel_caches").newest_kernel_s() == 0.0

    @pytest.mark.parametrize("where", ["triton", "inductor", ".cache/flashinfer/0.6/90a/cached_ops/norm"])
    def test_a_kernel_that_is_added_is_seen(self, caches, where) -> None:
        folder = caches / where
        folder.mkdir(parents=True)
        for path in (folder, *folder.parents):
            if path.is_relative_to(caches):
                os.utime(path, (1.0, 1.0))
        newest = profiling_module("kernel_caches").newest_kernel_s
        assert newest() == 1.0
        begun = time.time()
        (folder / "kernel.cubin").write_bytes(b"1")
        assert newest() >= begun - 1.0
