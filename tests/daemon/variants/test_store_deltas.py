"""Deltas in the variant store: what is loaded is what was added, shared tensors once, damage is named."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, local

import numpy as np
import pytest

from daemon.variants import loadable_folder
from daemon.variants.base_checks import BaseChecks
from daemon.variants.store import VariantStore
from fingerprint.delta import Delta, export_delta, read_delta
from fingerprint.errors import CheckpointError, NotFoundError, UnavailableError
from tests.daemon.tiny_deltas import write_tiny_delta
from tests.fingerprint.small_adapters import write_adapter
from tests.fingerprint.small_fine_tunes import read_bytes, tiny_tensors, write_model
from tests.golden_words import Golden


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base") / "base", tiny_tensors())


@pytest.fixture(scope="module")
def delta(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Delta:
    return read_delta(write_tiny_delta(base, tmp_path_factory.mktemp("delta"), "int2", seed=1))


@pytest.fixture
def store(tmp_path: Path) -> VariantStore:
    return VariantStore(tmp_path / "variants")


def tensors_of(store: VariantStore) -> list[Path]:
    return [file for file in (store.root / "tensors").rglob("*") if file.is_file()]


def test_what_is_loaded_exports_as_what_was_added(store, base: Path, delta: Delta, tmp_path: Path) -> None:
    stored = store.add(delta)
    assert stored.content_hash == delta.manifest.content_hash
    tensors = [entry for file in delta.files.values() for entry in file.tensors.values()]
    assert stored.num_bytes == stored.new_bytes == sum(entry.num_bytes for entry in tensors)
    assert stored.disk_bytes == sum(file.stat().st_size for file in tensors_of(store))
    loaded = read_delta(store.loadable(stored.content_hash))
    assert loaded.manifest.content_hash == stored.content_hash
    for name, each in (("added", delta), ("loaded", loaded)):
        export_delta(base, each, tmp_path / name)
    files = [read_bytes(tmp_path / name) for name in ("added", "loaded")]
    assert files[0]["model.safetensors"] == files[1]["model.safetensors"]


def test_the_same_delta_again_is_nothing_new_and_the_last_one_removes_its_tensors(
    store, delta: Delta, tmp_path: Path
) -> None:
    """Next to an adapter, whose tensors stay."""
    from fingerprint.lora import read_adapter

    adapter = store.add(read_adapter(write_adapter(tmp_path / "adapter")))
    kept = set(tensors_of(store))
    first, second = store.add(delta), store.add(delta)
    assert (second.content_hash, second.new_bytes) == (first.content_hash, 0)
    store.loadable(first.content_hash)
    store.remove(first.content_hash)
    store.collect()
    assert set(tensors_of(store)) == kept
    assert store.loadable(adapter.content_hash).is_dir()
    assert not store.has(first.content_hash)


def test_fine_tunes_share_the_tensors_that_are_alike(store, base: Path, delta: Delta, tmp_path: Path) -> None:
    part = write_tiny_delta(base, tmp_path, "int2", seed=1, is_changed=lambda name: name == "lm_head.weight")
    store.add(delta)
    one_matrix = store.add(read_delta(part))
    assert one_matrix.new_bytes == 0


def test_a_truncated_tensor_is_named_and_mended_by_adding_again(store, delta: Delta, golden: Golden) -> None:
    content = store.add(delta).content_hash
    name = delta.manifest.matrices[0].codes
    file = store.root / "tensors" / name[:2] / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        store.loadable(content)
    golden("daemon", str(caught.value).replace(str(store.root), "STORE"))
    assert store.add(delta).content_hash == content
    read_delta(store.loadable(content))


def test_a_manifest_whose_tensors_were_exchanged_is_refused(store, delta: Delta) -> None:
    content = store.add(delta).content_hash
    manifest = store.root / "manifests" / content
    codes = [matrix.codes for matrix in delta.manifest.matrices]
    manifest.write_bytes(manifest.read_bytes().replace(codes[0].encode(), codes[1].encode(), 1))
    with pytest.raises(CheckpointError, match="was changed"):
        store.loadable(content)


def test_tensors_that_changed_after_they_were_read_are_not_stored(store, base: Path, tmp_path: Path) -> None:
    folder = write_tiny_delta(base, tmp_path, "int2", seed=2)
    delta = read_delta(folder)
    file = folder / delta.manifest.matrices[0].file
    raw = np.frombuffer(file.read_bytes(), np.uint8).copy()
    raw[-1] ^= 1
    file.write_bytes(raw.tobytes())
    with pytest.raises(CheckpointError, match="changed"):
        store.add(delta)
    assert not store.contents()
    assert not tensors_of(store)


class TestBeforeALoad:
    """For engines that check neither a delta nor their base."""

    def test_a_folder_in_which_a_byte_was_changed_is_made_anew(self, store, delta: Delta) -> None:
        content = store.add(delta).content_hash
        folder = store.verified(content)
        (weights,) = folder.glob("*.safetensors")
        for file in (weights, folder / "delta.json"):
            kept = file.read_bytes()
            file.write_bytes(kept[:-2] + bytes([kept[-2] ^ 1]) + kept[-1:])
            assert store.loadable(content) == folder  # which looks at sizes alone
            assert store.verified(content) == folder
            assert file.read_bytes() == kept
        read_delta(folder)

    def test_a_changed_folder_is_made_anew_once(
        self, store, delta: Delta, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second that has seen the change takes no folder from the engine that the first has given it to."""
        content = store.add(delta).content_hash
        (weights,) = store.loadable(content).glob("*.safetensors")
        kept = weights.read_bytes()
        weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        is_unchanged, both_saw, first_is_done = loadable_folder._is_unchanged, Barrier(2), Event()
        turns = iter((Event(), first_is_done))  # of the two threads, once both have read the folder
        mine = local()

        def seen_by_both(*arguments) -> bool:
            found = is_unchanged(*arguments)
            if not hasattr(mine, "turn"):
                mine.turn = next(turns)
                both_saw.wait()
                if mine.turn is first_is_done:
                    first_is_done.wait()
            return found

        def given() -> int:
            store.verified(content)
            descriptor = os.open(weights, os.O_RDONLY)  # as an engine that reads it
            first_is_done.set()
            return descriptor

        monkeypatch.setattr(loadable_folder, "_is_unchanged", seen_by_both)
        with ThreadPoolExecutor(2) as threads:
            descriptors = [done.result() for done in [threads.submit(given) for _ in range(2)]]
        for descriptor in descriptors:
            assert os.fstat(descriptor).st_nlink == 1  # it still has its name
            os.close(descriptor)
        assert weights.read_bytes() == kept

    def test_a_tensor_that_was_changed_in_the_store_as_well_is_named(
        self, store, delta: Delta, golden: Golden
    ) -> None:
        content = store.add(delta).content_hash
        (weights,) = store.loadable(content).glob("*.safetensors")
        name = delta.manifest.matrices[0].codes
        for file in (weights, store.root / "tensors" / name[:2] / name):
            kept = file.read_bytes()
            file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(CheckpointError) as caught:
            store.verified(content)
        golden("daemon", str(caught.value).replace(str(store.root), "STORE"))
        assert store.add(delta).content_hash == content
        read_delta(store.verified(content))

    def test_the_manifest_of_a_delta_is_told_from_that_of_an_adapter(
        self, store, delta: Delta, tmp_path: Path
    ) -> None:
        from fingerprint.lora import read_adapter

        adapter = store.add(read_adapter(write_adapter(tmp_path / "adapter"))).content_hash
        manifest = store.delta(store.add(delta).content_hash)
        assert manifest is not None
        assert manifest.content_hash == delta.manifest.content_hash
        assert store.delta(adapter) is None
        assert read_bytes(store.verified(adapter)) == read_bytes(store.loadable(adapter))
        with pytest.raises(NotFoundError):
            store.delta("0" * 64)

    def test_a_manifest_that_cannot_be_read_is_an_error_of_ours(self, store, delta: Delta) -> None:
        """Any other would end the pass of the controller in which all routes are made."""
        content = store.add(delta).content_hash
        manifest = store.root / "manifests" / content
        manifest.unlink()
        manifest.mkdir()
        with pytest.raises(UnavailableError, match="cannot be used"):
            store.delta(content)

    def test_a_base_that_changes_while_it_is_read_is_not_taken(
        self, base: Path, delta: Delta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first tensors were compared in the files before, and nothing has looked at those of the new ones."""
        from fingerprint.checkpoint import Checkpoint

        folder, chunks = shutil.copytree(base, tmp_path / "base"), Checkpoint.chunks
        last = sorted(tensor.name for tensor in delta.manifest.base)[-1]

        def replaced_before_the_last(self: Checkpoint, name: str) -> object:
            if name == last:
                monkeypatch.undo()
                changed = dict(tiny_tensors())
                first = sorted(changed)[0]
                changed[first] = changed[first] + 1
                write_model(tmp_path / "other", changed)
                for file in (tmp_path / "other").iterdir():
                    file.replace(folder / file.name)
            return chunks(self, name)

        monkeypatch.setattr(Checkpoint, "chunks", replaced_before_the_last)
        checks = BaseChecks()
        with pytest.raises(UnavailableError, match="changed while"):
            checks.check(folder, delta.manifest)
        with pytest.raises(CheckpointError, match="another base"):
            checks.check(folder, delta.manifest)

    def test_a_base_is_read_once_and_again_where_it_has_changed(
        self, base: Path, delta: Delta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fingerprint.checkpoint import Checkpoint

        folder, read = shutil.copytree(base, tmp_path / "base"), list[str]()
        chunks = Checkpoint.chunks

        def noted(self: Checkpoint, name: str) -> object:
            read.append(name)
            return chunks(self, name)

        monkeypatch.setattr(Checkpoint, "chunks", noted)
        checks = BaseChecks()
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(checks.check, folder, delta.manifest) for _ in range(8)]:
                done.result()
        assert sorted(read) == sorted(tensor.name for tensor in delta.manifest.base)
        changed = dict(tiny_tensors())
        name = "model.layers.1.mlp.up_proj.weight"
        changed[name] = changed[name] + 1
        write_model(tmp_path / "other", changed)
        for file in (tmp_path / "other").iterdir():
            file.replace(folder / file.name)
        with pytest.raises(CheckpointError, match=name):
            checks.check(folder, delta.manifest)
