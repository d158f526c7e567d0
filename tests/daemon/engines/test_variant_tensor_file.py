"""Adapters' files in an engine's worker are read as safetensors reads them, in groups and by several threads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.daemon.variant_kernels import variant_module

tensor_file = variant_module("tensor_file")


class CountedPauses(variant_module("background").Pauses):  # type: ignore[misc, name-defined]
    """Pauses that are counted, and take no time."""

    called = taken = 0

    def __call__(self) -> None:
        self.called += 1

    def take(self) -> None:
        self.taken += 1


@pytest.mark.parametrize("group_bytes", [1, 700, 2**22])
def test_all_tensors_are_those_that_safetensors_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    monkeypatch.setattr(tensor_file, "_GROUP_BYTES", group_bytes)
    random = torch.Generator().manual_seed(0)
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.uint8)
    tensors = {
        f"layers.{number}.lora_{side}.weight": torch.randn(shape, generator=random).to(types[number % 6])
        for number in range(7)
        for side, shape in (("A", (3, 16 + number)), ("B", (40, 3)))
    }
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "adapter.safetensors", metadata={"format": "pt"})
    with tensor_file.AdapterFile(tmp_path / "adapter.safetensors", pin=False) as found:
        assert sorted(found.keys()) == sorted(tensors)
        for name, want in load_file(tmp_path / "adapter.safetensors").items():
            assert torch.equal(found.get_tensor(name), want)
            assert found.get_tensor(name).dtype == want.dtype


def test_tensors_of_a_group_share_memory_and_groups_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So much page-locked memory is taken as the tensors have, and a large file by pieces."""
    monkeypatch.setattr(tensor_file, "_GROUP_BYTES", 256)
    save_file({f"t{number}": torch.zeros(32) for number in range(5)}, tmp_path / "adapter.safetensors")
    found = tensor_file.AdapterFile(tmp_path / "adapter.safetensors", pin=False)
    owners = [found.get_tensor(f"t{number}").untyped_storage() for number in range(5)]
    assert [owner.nbytes() for owner in owners] == [256, 256, 256, 256, 128]
    assert len({owner.data_ptr() for owner in owners}) == 3


def test_a_thread_next_to_steps_pauses_before_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_PAUSED_GROUP_BYTES", 256)
    save_file(
        {f"t{number}": torch.full((64,), float(number)) for number in range(5)}, tmp_path / "adapter.safetensors"
    )
    pause = CountedPauses()
    found = tensor_file.AdapterFile(tmp_path / "adapter.safetensors", pin=False, pause=pause)
    assert (pause.taken, pause.called) == (5, 0)  # each tensor is a group
    assert len([*found.keys()]) == pause.called == 5
    assert [int(found.get_tensor(f"t{number}")[0]) for number in range(5)] == [*range(5)]


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_file_that_is_cut_short_is_refused_with_its_name(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "adapter.safetensors"
    save_file({"a": torch.ones(64), "b": torch.ones(64)}, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"adapter\.safetensors"):
        tensor_file.AdapterFile(file, pin=False)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},  # beyond the end
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]},  # of another size
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F4", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": [], "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0]},
        {"dtype": "F32", "shape": [4], "data_offsets": "0 16"},
        {"dtype": "F32", "shape": [4], "data_offsets": None},
        "a tensor",
    ],
)
def test_a_header_that_is_not_true_is_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"a": entry}).encode()
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(ValueError, match=r"adapter\.safetensors|F4"):
        tensor_file.AdapterFile(file, pin=False)


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(struct.pack("<Q", 100_000) + b"[" * 100_000)
    with pytest.raises(ValueError, match=r"adapter\.safetensors"):
        tensor_file.AdapterFile(file, pin=False)


def test_values_behind_an_odd_number_of_smaller_ones_are_read(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        }
    ).encode()
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes([1, 2, 3]) + struct.pack("<2f", 1.5, -2.0))
    found = tensor_file.AdapterFile(file, pin=False)
    assert found.get_tensor("a").tolist() == [1, 2, 3]
    assert found.get_tensor("b").tolist() == [1.5, -2.0]


def test_threads_read_all_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 999)
    want = bytes(number % 251 for number in range(10_001))
    (tmp_path / "file").write_bytes(b"head" + want)
    found = bytearray(len(want))
    with (tmp_path / "file").open("rb") as stream:
        tensor_file.read_by_threads(stream.fileno(), memoryview(found), 4, tmp_path / "file")
        assert found == want
        with pytest.raises(ValueError, match="file ends"):
            tensor_file.read_by_threads(stream.fileno(), memoryview(found), 5, tmp_path / "file")
