"""Devices of a compression: a GPU that has too little memory is refused or given up, and the work is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from daemon.devices import read_machine
from daemon.variants.compress import CompressOrder, compress_delta, compressor, compute_device, devices
from daemon.variants.compress.devices import check_free, clear_out_of_memory
from daemon.variants.compress.work_folder import work_folder_of
from fingerprint.errors import ConfigError, UnavailableError
from tests.daemon.variants import tiny_pairs
from tests.fingerprint.small_fine_tunes import HIDDEN, INNER
from tests.golden_words import Golden


def order(folder: Path) -> CompressOrder:
    tiny_pairs.write_pair(folder)
    return tiny_pairs.order(folder, calibration=None)


def two_gpus(monkeypatch: pytest.MonkeyPatch, free_gib: float) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 80 * 2**30))


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch, 80)
    names = {name: compute_device(name) for name in ("cpu", "cuda", "cuda:1")}
    assert {name: str(device) for name, device in names.items()} == {
        "cpu": "cpu",
        "cuda": "cuda:0",
        "cuda:1": "cuda:1",
    }
    with pytest.raises(ConfigError):
        compute_device("cuda:2")


@pytest.mark.parametrize(
    "name",
    ["cuda:255", "cuda:256", "cuda:257", "cuda:01", "cuda:", "cuda:-1", "cuda:1\n", "cuda:\u0661", "mps", ""],
)
@pytest.mark.parametrize("has_gpus", [True, False])
def test_names_that_are_no_device_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, has_gpus: bool) -> None:
    """A number of 8 bits, as torch keeps it, takes 256 for the first GPU."""
    if has_gpus:
        two_gpus(monkeypatch, 80)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 300)
    with pytest.raises(ConfigError):
        compute_device(name)


def test_a_gpu_whose_memory_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    two_gpus(monkeypatch, 7.5)
    check_free(torch.device("cuda:1"), 7 * 2**30)
    with golden.raises("variant", UnavailableError):
        check_free(torch.device("cuda:1"), 8 * 2**30)


def test_a_host_whose_memory_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    machine = replace(read_machine(), memory_bytes=16 * 2**30, available_bytes=15 * 2**29)
    monkeypatch.setattr(devices, "read_machine", lambda: machine)
    check_free(torch.device("cpu"), 7 * 2**30)
    with golden.raises("variant", UnavailableError):
        check_free(torch.device("cpu"), 8 * 2**30)


def test_a_compression_on_a_host_without_memory_is_refused_and_keeps_nothing_it_did_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, machine = order(tmp_path), read_machine()
    with monkeypatch.context() as patch:
        patch.setattr(devices, "read_machine", lambda: replace(machine, available_bytes=2**20))
        with pytest.raises(UnavailableError, match="this machine has"):
            compress_delta(made)
    assert not made.target.exists()
    assert compress_delta(made).units_found_done == 0


def test_a_full_gpu_is_refused_before_a_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context finds no room, or leaves none: CUDA's own error, or a number."""
    made, read = replace(order(tmp_path), device=torch.device("cuda:1")), list[str]()

    def no_context(device: torch.device) -> tuple[int, int]:
        raise torch.AcceleratorError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    for mem_get_info in (no_context, lambda device: (2**20, 80 * 2**30)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        with pytest.raises(UnavailableError, match=r"cuda:1"):
            compress_delta(made, lambda what, done, total: read.append(what))
    assert not read


def test_tokens_that_find_no_room_are_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compressor, "random_tokens", full)
    with pytest.raises(UnavailableError):
        compress_delta(order(tmp_path))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    ],
    ids=["torch", "cuda", "cublas", "cusolver"],
)
def test_a_gpu_says_in_several_ways_that_it_is_full(error: Exception) -> None:
    with pytest.raises(UnavailableError, match="cuda:1 ran out"), clear_out_of_memory(torch.device("cuda:1")):
        raise error


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_machine_that_has_no_memory_left_is_named_and_no_gpu(device: str, golden: Golden) -> None:
    def allocate() -> None:
        torch.empty(2**60, dtype=torch.uint8)

    with pytest.raises(UnavailableError, match="this machine"), clear_out_of_memory(torch.device(device)):
        np.empty(2**60, np.uint8)
    with golden.raises("variant", UnavailableError), clear_out_of_memory(torch.device(device)):
        allocate()


def test_other_errors_stay_as_they_are() -> None:
    for error in (RuntimeError("shapes differ"), torch.linalg.LinAlgError("not positive-definite")):
        with pytest.raises(type(error), match=str(error)), clear_out_of_memory(torch.device("cuda:1")):
            raise error


def test_a_compression_asks_for_all_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(compressor, "check_free", lambda device, needed: asked.append(needed))
    compress_delta(order(tmp_path))
    (needed,) = asked
    tokens = 32 * 512
    assert needed > 4 * tokens * (4 * HIDDEN + 3 * INNER)


def test_out_of_memory_keeps_the_layers_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """The same command goes on, and ends with the same delta."""
    made = order(tmp_path)

    def exhausted(what: str, done: int, total: int) -> None:
        if what.startswith("matrices") and done == total:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with golden.raises("variant", UnavailableError):
        compress_delta(made, exhausted)
    assert (work_folder_of(made.target) / "job.json").exists()
    assert compress_delta(made).units_found_done > 1


def test_the_time_that_is_left_is_shown_where_it_is_long(golden: Golden) -> None:
    shown = [compressor._compressing(left_s, torch.device("cpu")) for left_s in (None, 59.0, 300.0, 9000.0)]
    shown.append(compressor._compressing(9000.0, torch.device("cuda:0")))
    assert shown[0] == shown[1]
    golden("variant", "\n".join(shown))
