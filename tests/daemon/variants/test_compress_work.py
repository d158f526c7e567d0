"""Work on a delta on disk: taken targets, locks, full disks, and commands that were cut short."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.variants.compress import CompressResult, compress_delta, compressor, units
from fingerprint.delta import FORMATS
from fingerprint.errors import (
    CheckpointError,
    ConflictError,
)
from tests.daemon.variants.tiny_pairs import NORM, only, order, write_pair
from tests.fingerprint.small_fine_tunes import (
    LAYERS,
    join_tokens,
    read_bytes,
)


def test_a_target_that_is_there_is_kept(tmp_path: Path) -> None:
    write_pair(tmp_path)
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta" / "mine").write_text("kept")
    with pytest.raises(ConflictError):
        compress_delta(order(tmp_path))
    assert read_bytes(tmp_path / "delta") == {"mine": b"kept"}
    assert not (tmp_path / ".delta.compressing").exists()


def test_a_command_that_was_killed_when_it_had_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it removed its work: the same command finds it finished, another one finds OUT taken."""
    write_pair(tmp_path, change=only(NORM))
    with monkeypatch.context() as patch:
        patch.setattr("daemon.variants.compress.work_folder.WorkFolder.remove", lambda _: None)
        first = compress_delta(order(tmp_path))
    with pytest.raises(ConflictError):
        compress_delta(order(tmp_path, format=FORMATS["int3"]))
    again = compress_delta(order(tmp_path))
    assert again == replace(first, units_found_done=LAYERS + 2)
    assert not (tmp_path / ".delta.compressing").exists()
    with pytest.raises(ConflictError):
        compress_delta(order(tmp_path))


def test_two_commands_do_not_make_one_delta(tmp_path: Path) -> None:
    write_pair(tmp_path, change=only(NORM))
    work = tmp_path / ".delta.compressing"
    work.mkdir()
    handle = os.open(work, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(ConflictError, match="another command"):
        compress_delta(order(tmp_path))
    os.close(handle)
    compress_delta(order(tmp_path))


def test_a_full_disk_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fingerprint.safetensors_writer import write_safetensors

    write_pair(tmp_path)
    whole = compress_delta(order(tmp_path, target=tmp_path / "whole"))

    def full(file: Path, tensors: Any) -> int:
        if "00002" in file.name:
            file.write_bytes(b"a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_safetensors(file, tensors)

    with monkeypatch.context() as patch:
        patch.setattr("daemon.variants.compress.work_folder.write_safetensors", full)
        with pytest.raises(CheckpointError, match=r"disk is full.*goes on"):
            compress_delta(order(tmp_path))
    assert not (tmp_path / "delta").exists()
    left = {file.name for file in (tmp_path / ".delta.compressing" / "delta").iterdir()}
    assert left == {"delta-00000.safetensors", "delta-00001.safetensors"}
    result = compress_delta(order(tmp_path))
    assert result.units_found_done == 2
    assert result.manifest == whole.manifest
    assert read_bytes(tmp_path / "delta") == read_bytes(tmp_path / "whole")


def test_a_disk_without_room_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("daemon.variants.compress.work_folder.shutil.disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="disk is full"):
        compress_delta(order(tmp_path))
    assert not (tmp_path / "delta").exists()


def interrupted(folder: Path, num_matrices: int) -> None:
    """Leave the work of a command that ended after so many matrices."""

    class EndedError(Exception):
        pass

    def end(what: str, done: int, total: int) -> None:
        if what.startswith("matrices") and done == num_matrices:
            raise EndedError

    with pytest.raises(EndedError):
        compress_delta(order(folder), end)


@pytest.mark.parametrize(
    "damage",
    [
        lambda work: (work / "delta" / "delta-00001.safetensors").write_bytes(b""),
        lambda work: (work / "delta" / "delta-00001.safetensors").unlink(),
        lambda work: (work / "records" / "00001.json").write_bytes(b"{"),
        lambda work: _flip(work / "delta" / "delta-00001.safetensors"),
    ],
    ids=["empty", "missing", "record", "changed"],
)
def test_damaged_work_is_done_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    write_pair(tmp_path)
    compress_delta(order(tmp_path, target=tmp_path / "whole"))
    interrupted(tmp_path, 1 + 7 * LAYERS)
    damage(tmp_path / ".delta.compressing")
    assert compress_delta(order(tmp_path)).units_found_done == 1
    assert read_bytes(tmp_path / "delta") == read_bytes(tmp_path / "whole")


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_work_of_another_job_is_begun_anew(tmp_path: Path) -> None:
    write_pair(tmp_path)
    interrupted(tmp_path, 9)
    result: CompressResult = compress_delta(order(tmp_path, format=FORMATS["int3"]))
    assert result.units_found_done == 0
    assert {each.format for each in result.manifest.matrices} == {"int3", "int4"}
    assert not (tmp_path / ".delta.compressing").exists()


def test_work_by_another_tokenizer_is_begun_anew(tmp_path: Path) -> None:
    write_pair(tmp_path)
    join_tokens(tmp_path / "tuned", "Ġplus")
    interrupted(tmp_path, 9)
    shutil.copyfile(tmp_path / "base" / "tokenizer.json", tmp_path / "tuned" / "tokenizer.json")
    assert compress_delta(order(tmp_path)).units_found_done == 0
    compress_delta(order(tmp_path, target=tmp_path / "whole"))
    assert read_bytes(tmp_path / "delta") == read_bytes(tmp_path / "whole")


def test_the_time_that_is_left_after_a_resume_is_that_of_new_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix that is compressed takes 1 s here, and one of a layer that was done, read back, 1,000 s."""
    now_s, shown = 0.0, []

    def taking(seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return work(*args)

        return timed

    base = write_pair(tmp_path)
    interrupted(tmp_path, 9)  # in layer 1
    monkeypatch.setattr(units.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(units, "compress_matrix", taking(1, units.compress_matrix))
    monkeypatch.setattr(units.Compression, "_read_back", taking(1000, units.Compression._read_back))
    monkeypatch.setattr(compressor, "_compressing", lambda left_s, device: shown.append(left_s) or "matrices")
    assert compress_delta(order(tmp_path)).units_found_done == 2
    assert now_s > 8000
    layer = sum(values.size for name, values in base.items() if "layers.1." in name and values.ndim == 2)
    assert shown[:-2] == [None] * (1 + 7 * LAYERS - 1)
    assert shown[-2:] == [pytest.approx(7 * base["lm_head.weight"].size / layer), 0]
