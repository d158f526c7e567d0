"""Loadable folders are read before they are loaded, once for each state of their files; damage is mended."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from daemon.variants import loadable_folder
from daemon.variants import store as variant_store
from daemon.variants.store import VariantStore
from fingerprint.errors import UnavailableError
from fingerprint.lora import LoraAdapter, read_adapter
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from iserve.gateway.__main__ import _StoredVariants
from tests.fingerprint.small_adapters import Q0, factors, write_adapter
from tests.golden_words import Golden
from tests.waiting import wait_until


@pytest.fixture
def added(tmp_path: Path) -> LoraAdapter:
    return read_adapter(write_adapter(tmp_path / "a"))


@pytest.fixture
def store(tmp_path: Path) -> VariantStore:
    return VariantStore(tmp_path / "variants")


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the folders that were read whole, as they are read."""
    read, found = loadable_folder._is_unchanged, list[Path]()

    def noted(folder: Path, manifest: Any) -> bool:
        found.append(folder)
        return read(folder, manifest)

    monkeypatch.setattr(loadable_folder, "_is_unchanged", noted)
    return found


def zeroed(file: Path) -> bytes:
    """Zero the last two thirds of a file, which keeps its size; return what it had."""
    whole = file.read_bytes()
    kept = len(whole) // 3
    file.write_bytes(whole[:kept] + bytes(len(whole) - kept))
    assert file.read_bytes() != whole
    return whole


def flipped(file: Path) -> bytes:
    """Change one bit, and set the time of the last write back; return what it had."""
    whole, before = file.read_bytes(), file.stat()
    with file.open("r+b") as stream:
        stream.seek(len(whole) - 2)
        stream.write(bytes([whole[-2] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return whole


@pytest.mark.parametrize("damage", [zeroed, flipped])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_damage_that_keeps_sizes_is_mended_before_a_load(
    store: VariantStore, added: LoraAdapter, caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    """A gateway that has loaded the folder before finds it, and so does one that was started since."""
    content = store.add(added).content_hash
    for gateway in (store, VariantStore(store.root)):
        file = gateway.loadable(content) / name
        whole = damage(file)
        caplog.clear()
        assert gateway.loadable(content) == file.parent
        assert file.read_bytes() == whole
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "made anew" in caplog.text


def test_a_folder_is_read_once_for_each_state_of_its_files(
    store: VariantStore, added: LoraAdapter, readings: list[Path]
) -> None:
    content = store.add(added).content_hash
    folder = store.loadable(content)
    assert readings == [], "it was made of tensors that were checked"

    def asked() -> int:
        before = len(readings)
        assert store.loadable(content) == folder
        return len(readings) - before

    assert asked() == 1
    wait_until(lambda: asked() == 0, "what was read once its files were at rest is remembered")
    assert [asked() for _ in range(3)] == [0, 0, 0]
    os.utime(folder / "adapter_model.safetensors")
    assert asked() == 1
    assert VariantStore(store.root).loadable(content) == folder
    assert readings[-1] == folder, "another process knows nothing of it"


def test_the_gateway_remembers_what_it_has_read(
    store: VariantStore, added: LoraAdapter, readings: list[Path]
) -> None:
    content = store.add(added).content_hash
    gateway = _StoredVariants(store.root)

    def asked() -> int:
        before = len(readings)
        gateway.loadable(content)
        return len(readings) - before

    wait_until(lambda: asked() == 0, "it is remembered")
    file = gateway.loadable(content) / "adapter_model.safetensors"
    whole = zeroed(file)
    assert gateway.loadable(content) / file.name == file
    assert file.read_bytes() == whole


def test_an_addition_of_the_same_content_removes_a_damaged_folder_alone(
    store: VariantStore, added: LoraAdapter
) -> None:
    content = store.add(added).content_hash
    file = store.loadable(content) / "adapter_model.safetensors"
    inode = file.stat().st_ino
    assert store.add(added).content_hash == content
    assert file.stat().st_ino == inode, "an engine may be reading it"
    whole = zeroed(file)
    store.add(added)
    assert not file.parent.exists()
    assert store.loadable(content) / file.name == file
    assert file.read_bytes() == whole


@pytest.mark.parametrize("refusal", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_takes_the_folders_that_are_past_their_grace(
    store: VariantStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int, golden: Golden
) -> None:
    """The disk has room for one folder: its bound is the kernel's refusal of the next file."""
    contents = [
        store.add(read_adapter(write_adapter(tmp_path / str(n), factors({Q0: 4}, seed=n)))).content_hash
        for n in range(3)
    ]
    first = store.loadable(contents[0])
    room_bytes = sum(file.stat().st_size for file in first.iterdir())

    def write(file: Path, tensors: Sequence[OutputTensor]) -> None:
        write_safetensors(file, tensors)
        if sum(each.stat().st_size for each in (file, *first.parent.glob("*/*"))) > room_bytes:
            raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(variant_store, "write_safetensors", write)
    with golden.raises("adapter-errors", UnavailableError):
        store.loadable(contents[1])  # an engine may be reading the first
    assert read_adapter(first)
    long_ago = time.time() - 3600
    os.utime(first, (long_ago, long_ago))
    second = store.loadable(contents[1])
    assert read_adapter(second)
    assert list(first.parent.iterdir()) == [second]
    with pytest.raises(UnavailableError):
        store.loadable(contents[2])
    assert list(first.parent.iterdir()) == [second]
    assert not list((store.root / "writing").iterdir())
