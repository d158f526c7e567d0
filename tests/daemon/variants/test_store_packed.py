"""Packed tensors in the variant store: they load as plain ones, to the byte, and damage is mended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from threading import Barrier, Event, current_thread, main_thread
from typing import BinaryIO

import numpy as np
import pytest

from daemon.variants import tensor_files
from daemon.variants.manifest import TensorRecord, read_manifest
from daemon.variants.store import VariantStore
from daemon.variants.tensor_files import FRAME_BYTES, read_tensor
from fingerprint.delta import Delta, read_delta
from fingerprint.errors import CheckpointError
from fingerprint.lora import read_adapter
from tests.daemon.tiny_deltas import write_exact_delta
from tests.daemon.variants.test_tensor_files import with_length
from tests.fingerprint.small_adapters import Q0, write_adapter
from tests.fingerprint.small_fine_tunes import read_bytes
from tests.waiting import PATIENCE_S

FIRST, SECOND = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"
FIRST_BIAS, SECOND_BIAS = FIRST.replace("weight", "bias"), SECOND.replace("weight", "bias")
SHAPE, BIAS_SHAPE = (4, 70_000), (8000,)  # a weight has two frames; the second bias has noise, which does not pack


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return numbers of random bits, which do not pack; none is infinite or not a number."""
    bits = np.random.default_rng(seed).integers(2**32, size=shape, dtype=np.uint32)
    return (bits & np.uint32(0xBFFFFFFF)).view(np.float32)


def delta(folder: Path, seed: int = 0) -> Delta:
    """Return a delta of two layers, of whose tensors all but one pack."""
    tensors = {SECOND_BIAS: noise(BIAS_SHAPE, 50)}
    for number, (name, shape) in enumerate({FIRST: SHAPE, FIRST_BIAS: BIAS_SHAPE, SECOND: SHAPE}.items()):
        tensors[name] = np.random.default_rng([seed, number]).integers(16, size=shape).astype(np.float32) / 16
    return write_exact_delta(folder, tensors)


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Delta:
    return delta(tmp_path_factory.mktemp("deltas") / "a")


@pytest.fixture
def store(tmp_path: Path) -> VariantStore:
    return VariantStore(tmp_path / "variants")


def records(store: VariantStore, content: str) -> dict[str, TensorRecord]:
    manifest = read_manifest((store.root / "manifests" / content).read_bytes(), content)
    return {record.name: record for record in manifest.tensors}


def file_of(store: VariantStore, record: TensorRecord) -> Path:
    return store.root / "tensors" / record.sha256[:2] / record.sha256


def files_of(store: VariantStore) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in (store.root / "tensors").rglob("*") if file.is_file()}


def make_plain(store: VariantStore, content: str) -> None:
    """Have the store as an iServe that packed nothing left it."""
    for record in records(store, content).values():
        file = file_of(store, record)
        file.write_bytes(b"".join(read_tensor(file, record.num_bytes)))


def check_left(store: VariantStore, contents: list[str]) -> None:
    """Check that the files are those of ``contents``, and that all are intact."""
    named = {file_of(store, record) for content in contents for record in records(store, content).values()}
    assert files_of(store).keys() == named
    assert list((store.root / "writing").iterdir()) == []
    for content in contents:
        store.verified(content)


def test_a_tensor_is_packed_where_that_saves_and_loads_as_a_plain_one(
    store: VariantStore, added: Delta, tmp_path: Path
) -> None:
    stored = store.add(added)
    sizes = {
        name: file_of(store, each).stat().st_size for name, each in records(store, stored.content_hash).items()
    }
    is_plain = {name: sizes[name] == each.num_bytes for name, each in records(store, stored.content_hash).items()}
    assert [name for name in is_plain if is_plain[name]] == [SECOND_BIAS]
    assert stored.disk_bytes == sum(sizes.values()) < 0.3 * stored.num_bytes
    assert stored.new_bytes == stored.num_bytes
    of_packed = read_bytes(store.loadable(stored.content_hash))
    plain = VariantStore(tmp_path / "plain")
    plain.add(added)
    make_plain(plain, stored.content_hash)
    assert read_bytes(plain.loadable(stored.content_hash)) == of_packed
    assert of_packed["delta-00000.safetensors"] == (added.folder / "delta-00000.safetensors").read_bytes()
    assert read_delta(store.loadable(stored.content_hash)).manifest.content_hash == stored.content_hash


def test_an_adapter_stays_plain_and_loads_to_the_byte(store: VariantStore, tmp_path: Path) -> None:
    """Values that would pack well stay plain: requests wait for the load. What an earlier store packed is read."""
    values = np.random.default_rng(0).integers(16, size=SHAPE).astype(np.float32) / 16
    name = f"base_model.model.{Q0}.lora"
    tensors = {f"{name}_A.weight": values, f"{name}_B.weight": values.T}
    adapter = read_adapter(write_adapter(tmp_path / "adapter", tensors))
    stored = store.add(adapter)
    assert stored.disk_bytes == stored.num_bytes == sum(map(len, files_of(store).values()))
    weights = (adapter.folder / "adapter_model.safetensors").read_bytes()
    assert read_bytes(store.verified(stored.content_hash))["adapter_model.safetensors"] == weights
    packed = VariantStore(tmp_path / "packed")
    packed.add(adapter)
    for file, content in files_of(packed).items():
        file.write_bytes(b"".join(tensor_files.pack([content])))
    again = packed.add(adapter)
    assert (again.new_bytes, again.disk_bytes < 0.3 * again.num_bytes) == (0, True)
    assert read_bytes(packed.verified(stored.content_hash)) == read_bytes(store.loadable(stored.content_hash))
    for file, content in files_of(packed).items():
        file.write_bytes(content[:-1])
    assert packed.add(adapter).disk_bytes == stored.num_bytes


def test_a_store_of_before_is_read_and_stays_as_it_is(store: VariantStore, added: Delta, tmp_path: Path) -> None:
    """A variant that is added now shares tensors with it."""
    content = store.add(added).content_hash
    make_plain(store, content)
    before = files_of(store)
    again = store.add(added)
    assert (again.new_bytes, again.disk_bytes) == (0, again.num_bytes)
    assert files_of(store) == before
    other = store.add(delta(tmp_path / "b", seed=1))
    shared = records(store, content)[SECOND_BIAS].num_bytes
    assert other.new_bytes == other.num_bytes - shared
    store.remove(content)
    check_left(store, [other.content_hash])


def test_a_file_that_two_tensors_share_is_counted_once(store: VariantStore, tmp_path: Path) -> None:
    values = (np.arange(12_000) % 7).astype(np.float32)
    shapes = {FIRST: (4, 3000), SECOND: (4, 3000), FIRST_BIAS: (12_000,), SECOND_BIAS: (12_000,)}
    tensors = {name: values.reshape(shape) for name, shape in shapes.items()}
    stored = store.add(write_exact_delta(tmp_path / "a", tensors))
    assert stored.disk_bytes == sum(map(len, files_of(store).values()))
    assert len(files_of(store)) == 2


def shorter(whole: bytes) -> bytes:
    return whole[:-1]


def without_its_end(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def empty(whole: bytes) -> bytes:
    return b""


def longer(whole: bytes) -> bytes:
    return whole + b"\0"


def changed(whole: bytes) -> bytes:
    return whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]


def changed_in_its_length(whole: bytes) -> bytes:
    return whole[:8] + bytes([whole[8] ^ 1]) + whole[9:]


def bomb(whole: bytes) -> bytes:
    frame = bytes.fromhex("28b52ffd e0") + (2**40).to_bytes(8, "little") + bytes.fromhex("010000")
    return with_length(frame)


def other_content(whole: bytes) -> bytes:
    """Return sound frames of as many bytes, of another tensor."""
    return b"".join(tensor_files.pack([bytes(prod(SHAPE) * 4)]))


def as_large_as_the_tensor(whole: bytes) -> bytes:
    return whole.ljust(prod(SHAPE) * 4, b"\0")


@pytest.mark.parametrize(
    "damage",
    [
        shorter,
        without_its_end,
        empty,
        longer,
        changed,
        changed_in_its_length,
        bomb,
        other_content,
        as_large_as_the_tensor,
    ],
)
def test_a_damaged_packed_tensor_is_named_and_mended_by_adding_again(
    store: VariantStore, added: Delta, damage
) -> None:
    content = store.add(added).content_hash
    before = files_of(store)
    file = file_of(store, records(store, content)[FIRST])
    assert file.stat().st_size > 2 * 9
    file.write_bytes(damage(file.read_bytes()))
    assert files_of(store) != before
    with pytest.raises(CheckpointError, match=FIRST) as caught:
        store.loadable(content)
    assert "iserve variant add" in str(caught.value)
    assert list((store.root / "loadable").iterdir()) == []
    assert store.add(added).new_bytes == 0
    assert files_of(store) == before
    check_left(store, [content])


def test_a_load_that_meets_damage_while_it_is_mended_fails_and_the_next_one_works(
    store: VariantStore, added: Delta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load has the damaged file open: none reads the beginning of one file and the end of another."""
    content = store.add(added).content_hash
    file = file_of(store, records(store, content)[FIRST])
    file.write_bytes(changed(file.read_bytes()))
    is_begun, is_mended, real = Event(), Event(), tensor_files.unpack

    def paused(stream: BinaryIO, num_bytes: int) -> Iterator[bytes]:
        for piece in real(stream, num_bytes):
            yield piece
            if current_thread() is not main_thread() and num_bytes == prod(SHAPE) * 4:
                is_begun.set()
                assert is_mended.wait(PATIENCE_S)

    monkeypatch.setattr(tensor_files, "unpack", paused)
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(store.loadable, content)
        assert is_begun.wait(PATIENCE_S)
        assert store.add(added).new_bytes == 0
        is_mended.set()
        with pytest.raises(CheckpointError, match=FIRST):
            load.result()
    check_left(store, [content])


def test_additions_of_the_same_content_at_once_leave_one_file_of_each_tensor(
    store: VariantStore, added: Delta
) -> None:
    start = Barrier(4)

    def work(number: int) -> str:
        start.wait()
        return store.add(added).content_hash

    with ThreadPoolExecutor(4) as pool:
        contents = set(pool.map(work, range(4)))
    check_left(store, sorted(contents))
    assert len(contents) == 1


_CHILD = """
import sys, time
from pathlib import Path
from daemon.variants import tensor_files
from daemon.variants.store import VariantStore
from fingerprint.delta import read_delta

root, folder, content, verb, name = sys.argv[1:]
real = getattr(tensor_files, name)

def paused(*arguments):
    for number, piece in enumerate(real(*arguments)):
        if number == {"pack": 2, "unpack": 1}[name]:
            print("paused", flush=True)
            time.sleep(10_000)
        yield piece

setattr(tensor_files, name, paused)
store = VariantStore(Path(root))
store.add(read_delta(Path(folder))) if verb == "add" else store.loadable(content)
"""


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        pytest.param("add", "pack", id="add-behind-a-frame"),
        pytest.param("add", "unpack", id="add-reading-back"),
        pytest.param("loadable", "unpack", id="load-behind-a-frame"),
    ],
)
def test_a_process_killed_between_frames_leaves_a_store_that_works(
    store: VariantStore, added: Delta, tmp_path: Path, verb: str, name: str
) -> None:
    kept = store.add(delta(tmp_path / "kept", seed=7)).content_hash
    content = "0" * 64 if verb == "add" else store.add(added).content_hash
    words = [str(store.root), str(added.folder), content, verb, name]
    child = subprocess.Popen([sys.executable, "-c", _CHILD, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "paused\n"
        assert list((store.root / "writing").iterdir()) or name == "unpack"
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE_S)
    finally:
        child.kill()
        child.communicate()
    store.verified(kept)
    content = store.add(added).content_hash
    store.collect()
    check_left(store, [kept, content])
    store.remove(content)
    check_left(store, [kept])


def test_a_tensor_whose_beginning_alone_packs_is_kept_plain(store: VariantStore, tmp_path: Path) -> None:
    values = noise((4, 140_000), seed=0)
    values.reshape(-1)[: FRAME_BYTES // 40] = 0.0  # a tenth of the first frame
    stored = store.add(write_exact_delta(tmp_path / "a", {FIRST: values, FIRST_BIAS: np.zeros(8, np.float32)}))
    assert stored.disk_bytes == stored.num_bytes
    check_left(store, [stored.content_hash])
