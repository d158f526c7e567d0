"""Arena of deltas in host memory: its bound, what gives way, and loads of content that was read before."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.delta import FORMATS
from tests.daemon.variant_kernels import variant_module
from tests.fingerprint.small_fine_tunes import tiny_tensors, write_model
from tests.fingerprint.test_delta_reader import FILE, MATRIX, write_delta

arena_module = variant_module("arena")
folder_module = variant_module("folder")
kept_module = variant_module("kept_folders")
Arena, KeptFolders = arena_module.Arena, kept_module.KeptFolders
PAGE = 4096
PAGES = 8


class _User:
    """User of a delta that is found by its key, whose files are all of one byte."""

    def __init__(self, held: Any, files: list[torch.Tensor], byte: int) -> None:
        self.held, self.files, self.byte = held, files, byte

    def is_whole(self) -> bool:
        """Return whether the files are as they were written."""
        return all(bool((file == self.byte).all()) for file in self.files)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["load", "load", "load", "release", "drop"]),
            st.integers(0, 5),
            st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=3),
        ),
        max_size=40,
    )
)
@settings(max_examples=150, deadline=None)
def test_it_is_never_beyond_its_bound_and_what_is_used_is_never_written(steps: list[Any]) -> None:
    arena = Arena(PAGES * PAGE, pin=False)
    users: list[_User] = []
    kept: dict[str, _User] = {}
    for step, number, sizes in steps:
        key = str(number)
        if step == "load":
            held = arena.find(key)
            if held is not None:
                assert kept[key].held is held
                users.append(_User(held, held.found, number))
            else:
                held, files = arena.begin(key), []
                for size in sizes:
                    memory = arena.take(held, size)
                    if memory is None:
                        break
                    assert len(memory) == size
                    files.append(memory.fill_(number))
                users.append(_User(held, files, number))
                if len(files) == len(sizes) and arena.keep(held, files):
                    kept[key] = users[-1]
        elif users:
            arena.release(users.pop(number % len(users)).held)
        assert 0 <= arena.taken_bytes() <= PAGES * PAGE
        live = {id(user.held): user.held for user in [*users, *kept.values()]}
        extents = sorted(extent for held in live.values() for extent in held.extents)
        assert all(one[1] <= two[0] for one, two in pairwise(extents))
        assert all(0 <= begin < end <= PAGES * PAGE for begin, end in extents)
        assert all(user.is_whole() for user in users)
        assert sum(end - begin for begin, end in extents) == arena.taken_bytes()
    for user in users:
        arena.release(user.held)
    assert arena.taken_bytes() == sum(held.num_bytes for held in arena._kept.values())


def test_the_least_valuable_gives_way() -> None:
    """Loads count, and age: what was loaded often, long ago, gives way at last."""
    waits = list[None]()
    arena = Arena(3 * PAGE, pin=False, before_reuse=lambda: waits.append(None))

    def load(key: str) -> None:
        held = arena.find(key)
        if held is None:
            held = arena.begin(key)
            assert arena.take(held, PAGE) is not None
            assert arena.keep(held, key)
        arena.release(held)

    def kept() -> set[str]:
        return {key for key in "abcdefgh" if key in arena._kept}

    for key in "aabacb":
        load(key)
    assert kept() == {"a", "b", "c"}
    assert not waits
    load("d")
    assert kept() == {"a", "b", "d"}
    assert waits  # for copies from what gave way
    for key in "ef":
        load(key)
    assert "a" in kept()
    for key in "ghgh":
        load(key)
    assert "a" not in kept()


def test_what_does_not_fit_leaves_all_that_is_kept() -> None:
    arena = Arena(2 * PAGE, pin=False)
    used = arena.begin("used")
    arena.take(used, PAGE)
    idle = arena.begin("idle")
    arena.take(idle, PAGE)
    arena.keep(idle, "found")
    arena.release(idle)
    assert arena.take(arena.begin("large"), 2 * PAGE) is None
    assert arena.find("idle") is idle
    assert Arena(0, pin=False).take(arena.begin("any"), 1) is None


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    write_delta(tmp_path / "delta", write_model(tmp_path / "base", tiny_tensors()))
    return tmp_path / "delta"


def _folders(num_bytes: int = 2**20) -> Any:
    return KeptFolders(Arena(num_bytes, pin=False), pins=False)


def _place(found: Any) -> dict[str, Any]:
    pairs = {name: (one.codes, one.scales) for name, one in found.matrices.items()}
    return pairs | {name: (one, one) for name, one in found.exact.items()}


def _same(found: Any, folder: Path) -> bool:
    """Return whether ``found`` has the tensors of the files in ``folder``, to the bit."""
    wanted = _place(folder_module.read_folder(folder))
    return found.keys() == wanted.keys() and all(
        torch.equal(mine, its) for name in wanted for mine, its in zip(found[name], wanted[name], strict=True)
    )


def test_a_load_again_is_the_file_to_the_bit_without_reading_it(delta: Path, tmp_path: Path) -> None:
    folders = _folders()
    first = folders.load(delta, _place)
    assert _same(first, delta)
    folders.wait()
    shutil.copytree(delta, tmp_path / "kept")
    (delta / FILE).unlink()
    second = folders.load(delta, _place)
    assert _same(second, tmp_path / "kept")
    assert second[MATRIX][0].data_ptr() == first[MATRIX][0].data_ptr()
    del first
    gc.collect()
    assert _same(second, tmp_path / "kept")
    third = folders.load(tmp_path / "kept", _place)  # by its content, wherever it lies
    assert third[MATRIX][0].data_ptr() == second[MATRIX][0].data_ptr()


def test_another_content_of_the_same_folder_is_not_served_stale(delta: Path, tmp_path: Path) -> None:
    folders = _folders()
    folders.load(delta, _place)
    folders.wait()
    shutil.rmtree(delta)
    write_delta(delta, tmp_path / "base", "int4")
    assert _same(folders.load(delta, _place), delta)
    assert FORMATS["int4"].codes_shape((64, 64))[-1] == folders.load(delta, _place)[MATRIX][0].shape[-1]


def test_bytes_that_are_not_the_manifests_are_never_kept(delta: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = (delta / FILE).read_bytes()
    (delta / FILE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    folders = _folders()
    damaged = folders.load(delta, _place)
    assert _same(damaged, delta)  # the gateway checks files before a load; the worker serves what it reads
    folders.wait()
    assert "its manifest says" in caplog.text
    (delta / FILE).write_bytes(whole)
    again = folders.load(delta, _place)
    assert _same(again, delta)
    folders.wait()
    del damaged, again
    gc.collect()
    (delta / FILE).unlink()
    assert folders.load(delta, _place)  # of the whole one


@pytest.mark.parametrize("num_bytes", [0, PAGE])
def test_without_room_each_load_reads_the_file(delta: Path, num_bytes: int) -> None:
    folders = _folders(num_bytes)
    for _ in range(2):
        loaded = folders.load(delta, _place)
        assert _same(loaded, delta)
        assert folders.arena.taken_bytes() <= num_bytes
    (delta / FILE).unlink()
    with pytest.raises(OSError, match=FILE):
        folders.load(delta, _place)


def test_a_manifest_without_hashes_is_read_each_time(delta: Path) -> None:
    manifest = json.loads((delta / "delta.json").read_text())
    del manifest["matrices"][0]["codes"]
    (delta / "delta.json").write_text(json.dumps(manifest))
    folders = _folders()
    loaded = folders.load(delta, _place)
    folders.wait()
    assert _same(loaded, delta)
    del loaded
    gc.collect()
    assert folders.arena.taken_bytes() == 0


def test_what_cannot_be_hashed_is_not_kept_and_ends_nothing(
    delta: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta fails in the thread that hashes.

    Its memory is given back, and the next one is kept.
    """
    write_delta(tmp_path / "next", tmp_path / "base", "int4")
    of_tensor, failed = kept_module._hash, list[str]()

    def fail_once(tensor: torch.Tensor) -> str:
        if not failed:
            failed.append("")
            raise MemoryError("no memory to hash")
        return str(of_tensor(tensor))

    monkeypatch.setattr(kept_module, "_hash", fail_once)
    folders = _folders()
    loaded = folders.load(delta, _place)
    _wait(folders)
    assert "cannot be hashed" in caplog.text
    del loaded
    gc.collect()
    assert folders.arena.taken_bytes() == 0
    loaded = folders.load(tmp_path / "next", _place)
    _wait(folders)
    (tmp_path / "next" / FILE).unlink()
    again = folders.load(tmp_path / "next", _place)
    assert all(torch.equal(again[name][0], loaded[name][0]) for name in loaded)


def _wait(folders: Any) -> None:
    """Wait until all is hashed, or fail: a thread that ended would have this wait for ever."""
    waiting = threading.Thread(target=folders.wait, daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize("shape", [(), (0,), (3,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
def test_tensors_of_any_shape_have_a_hash(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int16: "I16"}[dtype]
    tensor = torch.ones(shape, dtype=dtype)
    raw = tensor.flatten().view(torch.uint8).numpy().tobytes()
    assert kept_module._hash(tensor) == hashlib.sha256(f"{name} {list(shape)}\n".encode() + raw).hexdigest()


def test_a_delta_that_has_no_place_gives_its_memory_back(delta: Path) -> None:
    def refuse(found: Any) -> Any:
        raise ValueError("no place")

    folders = _folders()
    with pytest.raises(ValueError, match="no place"):
        folders.load(delta, refuse)
    assert folders.arena.taken_bytes() == 0
