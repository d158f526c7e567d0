"""The store of variants: what is read back is what was added, shared tensors are kept once, damage is found."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.variants.manifest import Manifest, read_manifest
from daemon.variants.store import StoredVariant, VariantStore
from fingerprint.errors import CheckpointError, NotFoundError, UnavailableError, UnsupportedAdapterError
from fingerprint.float_bytes import decode_floats
from fingerprint.lora import LoraAdapter, read_adapter
from fingerprint.lora.adapter import open_weights
from tests.fingerprint.adapter_cases import CASES
from tests.fingerprint.small_adapters import Q0, V1, factors, module_names, write_adapter, write_tensors
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
MODULES = module_names(["q_proj", "v_proj"])


@pytest.fixture
def store(tmp_path: Path) -> VariantStore:
    return VariantStore(tmp_path / "variants")


def adapter(folder: Path, tensors: Arrays | None = None, **config: Any) -> LoraAdapter:
    return read_adapter(write_adapter(folder, tensors, **config))


def files_of(store: VariantStore, part: str) -> set[str]:
    return {file.name for file in (store.root / part).rglob("*") if file.is_file()}


def manifest_of(store: VariantStore, content_hash: str) -> Manifest:
    return read_manifest((store.root / "manifests" / content_hash).read_bytes(), content_hash)


def check_consistent(store: VariantStore, contents: Iterable[str]) -> None:
    """All that manifests name is there, and nothing else is."""
    contents = set(contents)
    assert {content.content_hash for content in store.contents()} == contents
    named = {record.sha256 for content in contents for record in manifest_of(store, content).tensors}
    assert files_of(store, "tensors") == named
    assert list((store.root / "writing").iterdir()) == []
    for content in contents:
        read_adapter(store.loadable(content))


def updates(found: LoraAdapter) -> Arrays:
    """Return scale * B @ A of each module."""
    weights = open_weights(found.folder)
    products = {}
    for module in found.modules:
        down, up = (
            decode_floats(weights.read(name), weights.tensors[name].dtype).reshape(weights.tensors[name].shape)
            for name in module.factors
        )
        products[module.name] = np.float32(module.scale) * (up @ down)
    return products


@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_updates_the_base_as_what_was_added(store: VariantStore, tmp_path: Path, case: str) -> None:
    """Ranks and updates are the same, and the scale is one: vLLM reads no ``alpha_pattern``."""
    found = CASES[case]
    added = adapter(tmp_path / "a", factors(found.ranks), dtype=found.adapter_dtype, **found.config)
    folder = store.loadable(store.add(added).content_hash)
    loaded = read_adapter(folder)
    assert [(m.name, m.rank) for m in loaded.modules] == [(m.name, m.rank) for m in added.modules]
    assert loaded.unsupported == ()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == added.max_rank
    for module in loaded.modules:
        assert module.scale == pytest.approx(config["lora_alpha"] / config["r"], rel=1e-12)
    before, after = updates(added), updates(loaded)
    for name in before:
        np.testing.assert_allclose(after[name], before[name], rtol=1e-5, atol=1e-6)


def test_tensors_of_one_scale_are_kept_as_they_are(store: VariantStore, tmp_path: Path) -> None:
    added = adapter(tmp_path / "a", dtype="BF16")
    loaded = open_weights(store.loadable(store.add(added).content_hash))
    given = open_weights(added.folder)
    assert {name: loaded.read(name) for name in loaded.tensors} == {n: given.read(n) for n in given.tensors}


def test_shared_tensors_are_kept_once(store: VariantStore, tmp_path: Path) -> None:
    first = factors(dict.fromkeys(MODULES, 4))
    second = first | factors({Q0: 4}, seed=7)
    one = store.add(adapter(tmp_path / "a", first))
    assert one.new_bytes == one.num_bytes == sum(array.nbytes for array in first.values())
    two = store.add(adapter(tmp_path / "b", second))
    changed = sum(array.nbytes for name, array in second.items() if Q0 in name)
    assert (two.num_bytes, two.new_bytes) == (one.num_bytes, changed)
    again = store.add(adapter(tmp_path / "c", first))
    assert again == StoredVariant(
        content_hash=one.content_hash, num_bytes=one.num_bytes, new_bytes=0, disk_bytes=one.disk_bytes
    )
    store.remove(one.content_hash)
    check_consistent(store, [two.content_hash])


def test_the_content_hash_is_of_what_changes_answers(store: VariantStore, tmp_path: Path) -> None:
    first = factors({Q0: 4})
    name = next(iter(first))
    changed = {name: first[name].copy()} | {n: a for n, a in first.items() if n != name}
    changed[name][0, 0] += 1
    same = [
        adapter(tmp_path / "a", first, target_modules=["q_proj"]),
        adapter(tmp_path / "b", first, target_modules=".*q_proj", base_model_name_or_path="x", lora_dropout=0.1),
        adapter(tmp_path / "c", first, r=2, lora_alpha=4, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 8}),
    ]
    different = [
        adapter(tmp_path / "d", first, lora_alpha=9),
        adapter(tmp_path / "e", first, use_rslora=True),
        adapter(tmp_path / "f", first, dtype="BF16"),
        adapter(tmp_path / "g", changed),
        adapter(tmp_path / "h", factors({V1: 4})),
    ]
    assert len({store.add(each).content_hash for each in same}) == 1
    assert len({store.add(each).content_hash for each in (same[0], *different)}) == 1 + len(different)


def test_what_is_not_a_plain_lora_is_not_kept(store: VariantStore, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAdapterError):
        store.add(adapter(tmp_path / "a", use_dora=True))
    assert not store.root.exists()


def test_an_update_that_its_type_does_not_hold_with_its_scale_is_refused(
    store: VariantStore, tmp_path: Path
) -> None:
    tensors = {name: array * 1000 for name, array in factors(dict.fromkeys(MODULES, 4)).items()}
    found = adapter(tmp_path / "a", tensors, dtype="F16", alpha_pattern={"layers.1.self_attn.v_proj": 10_000})
    with pytest.raises(CheckpointError, match="too large for F16"):
        store.add(found)
    check_consistent(store, [])


def test_an_adapter_that_changed_since_it_was_read_is_refused(
    store: VariantStore, tmp_path: Path, golden: Golden
) -> None:
    found = adapter(tmp_path / "a")
    write_tensors(found.folder / "adapter_model.safetensors", factors(dict.fromkeys(MODULES, 2)))
    with golden.raises("adapter-errors", CheckpointError):
        store.add(found)


def tensor_file(store: VariantStore, content_hash: str) -> tuple[str, Path]:
    """Return name and file of the first tensor of a content."""
    record = manifest_of(store, content_hash).tensors[0]
    return record.name, store.root / "tensors" / record.sha256[:2] / record.sha256


def truncated(data: bytes) -> bytes:
    return data[:-1]


def longer(data: bytes) -> bytes:
    return data + b"\0"


def changed(data: bytes) -> bytes:
    return data[:5] + bytes([data[5] ^ 1]) + data[6:]


@pytest.mark.parametrize("damage", [truncated, longer, changed, None])
def test_a_damaged_tensor_is_named_and_mended_by_adding_again(
    store: VariantStore, tmp_path: Path, damage: Any
) -> None:
    found = adapter(tmp_path / "a")
    content = store.add(found).content_hash
    name, file = tensor_file(store, content)
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=name):
        store.loadable(content)
    assert files_of(store, "loadable") == set()
    store.add(found)
    check_consistent(store, [content])


def test_a_manifest_that_cannot_be_read_says_what_mends_it(
    store: VariantStore, tmp_path: Path, golden: Golden
) -> None:
    found = adapter(tmp_path / "a")
    content = store.add(found).content_hash
    (store.root / "manifests" / content).write_bytes(b"{")
    with golden.raises("adapter-errors", CheckpointError):
        store.loadable(content)
    store.add(found)
    assert store.loadable(content).is_dir()


def test_a_changed_manifest_is_found_and_nothing_is_collected_by_it(store: VariantStore, tmp_path: Path) -> None:
    found = adapter(tmp_path / "a")
    content = store.add(found).content_hash
    file = store.root / "manifests" / content
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"q_proj", b"k_proj"))
    with pytest.raises(CheckpointError, match="manifest"):
        store.loadable(content)
    file.write_bytes(whole[:-9])
    store.collect()
    store.add(found)
    check_consistent(store, [content])


def test_a_damaged_loadable_folder_is_made_anew(store: VariantStore, tmp_path: Path) -> None:
    content = store.add(adapter(tmp_path / "a")).content_hash
    weights = store.loadable(content) / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert store.loadable(content) == weights.parent
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("name", ["", "0" * 63, "../" + "0" * 61, "0" * 63 + "/", "A" * 64, "0" * 64])
def test_a_content_that_is_not_there_is_not_found(store: VariantStore, name: str) -> None:
    with pytest.raises(NotFoundError):
        store.loadable(name)


def test_the_least_recently_used_folders_are_removed_beyond_the_bound(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "variants", loadable_bytes=1, grace_s=60.0)
    contents = [
        store.add(adapter(tmp_path / str(n), factors({Q0: 4}, seed=n * 10))).content_hash for n in range(4)
    ]
    folders = [store.loadable(content) for content in contents[:3]]
    assert all(folder.is_dir() for folder in folders)  # beyond the bound, and within their grace
    long_ago = time.time() - 3600
    for folder in folders:
        os.utime(folder, (long_ago, long_ago))
    store.loadable(contents[1])
    store.loadable(contents[3])
    assert {folder.name for folder in (store.root / "loadable").iterdir()} == {contents[1], contents[3]}
    check_consistent(store, contents)


def test_no_folder_is_removed_within_the_bound(tmp_path: Path) -> None:
    store = VariantStore(tmp_path / "variants", loadable_bytes=1 << 20, grace_s=0.0)
    for number in range(4):
        store.loadable(store.add(adapter(tmp_path / str(number), factors({Q0: 4}, seed=number))).content_hash)
    assert len(list((store.root / "loadable").iterdir())) == 4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoraAdapter]:
    """Adapters of which each shares a tensor with the next."""
    folder = tmp_path_factory.mktemp("adapters")
    modules = module_names(["q_proj", "k_proj", "v_proj", "o_proj"])
    found = []
    for number in range(6):
        first, second = factors({modules[0]: 2}, number // 2), factors({modules[1]: 2}, 100 + (number + 1) // 2)
        config = {"r": 2, "target_modules": None, "lora_alpha": 2 + number % 3}
        found.append(adapter(folder / str(number), first | second, **config))
    return found


STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "load", "collect"]), st.integers(0, 5)), max_size=25)


@settings(max_examples=25)
@given(steps=STEPS)
def test_referenced_tensors_are_there_and_all_else_is_gone(
    tmp_path_factory: pytest.TempPathFactory, adapters: list[LoraAdapter], steps: list[tuple[str, int]]
) -> None:
    """After any sequence of additions and removals, against a model that is a set of contents."""
    store = VariantStore(tmp_path_factory.mktemp("store"), loadable_bytes=3000, grace_s=0.0)
    hashes = {number: content_of(store, found) for number, found in enumerate(adapters)}
    there: set[str] = set()
    for verb, number in steps:
        content = hashes[number]
        if verb == "add":
            assert store.add(adapters[number]).content_hash == content
            there.add(content)
        elif verb == "remove":
            store.remove(content)
            there.discard(content)
        elif verb == "collect":
            store.collect()
        elif content in there:
            assert updates(read_adapter(store.loadable(content))).keys()
        else:
            with pytest.raises(NotFoundError):
                store.loadable(content)
    check_consistent(store, there)


def content_of(store: VariantStore, found: LoraAdapter) -> str:
    content = store.add(found).content_hash
    store.remove(content)
    return content


def test_threads_add_load_and_remove_at_once(store: VariantStore, adapters: list[LoraAdapter]) -> None:
    """Each thread removes its own content while those of the rest share its tensors."""

    def work(number: int) -> str | None:
        for _ in range(6):
            content = store.add(adapters[number]).content_hash
            read_adapter(store.loadable(content))
            if number % 2:
                store.remove(content)
        return None if number % 2 else content

    with ThreadPoolExecutor(6) as pool:
        left = [content for content in pool.map(work, range(6)) if content is not None]
    check_consistent(store, left)


_WORKER = """
import sys
from pathlib import Path
from daemon.variants.store import VariantStore
from fingerprint.lora import read_adapter

store, folder = VariantStore(Path(sys.argv[1])), Path(sys.argv[2])
for turn in range(8):
    content = store.add(read_adapter(folder)).content_hash
    read_adapter(store.loadable(content))
    if turn % 2 == 0:
        store.remove(content)
    store.collect()
print(content)
"""


def test_processes_add_load_remove_and_collect_at_once(store: VariantStore, adapters: list[LoraAdapter]) -> None:
    command = [sys.executable, "-c", _WORKER, str(store.root)]
    children = [
        subprocess.Popen([*command, str(found.folder)], stdout=subprocess.PIPE, text=True)
        for found in adapters[:4]
    ]
    said = [child.communicate(timeout=PATIENCE_S)[0].strip() for child in children]
    assert [child.returncode for child in children] == [0] * len(children)
    check_consistent(store, said)


_CHILD = """
import sys, time
from pathlib import Path
import daemon.variants.store as module
from daemon.variants.store import VariantStore
from fingerprint.lora import read_adapter

root, folder, content, verb, owner, name, call = sys.argv[1:]
calls = iter(range(1000))
where = getattr(module, owner) if owner else module
real = getattr(where, name)

def paused(*arguments, **more):
    if next(calls) == int(call):
        print("paused", flush=True)
        time.sleep(10_000)
    return real(*arguments, **more)

setattr(where, name, paused)
store = VariantStore(Path(root))
if verb == "add":
    store.add(read_adapter(Path(folder)))
else:
    getattr(store, verb)(content)
"""


@pytest.mark.parametrize(
    ("verb", "owner", "name", "call"),
    [
        pytest.param("add", "", "tensor_hash", 3, id="add-between-tensors"),
        pytest.param("add", "VariantStore", "_write", 1, id="add-before-a-tensor"),
        pytest.param("add", "Path", "replace", 1, id="add-before-a-name"),
        pytest.param("add", "", "sync", 2, id="add-before-it-is-durable"),
        pytest.param("add", "Path", "replace", 4, id="add-before-the-manifest"),
        pytest.param("loadable", "VariantStore", "_verified", 1, id="load-in-the-file"),
        pytest.param("loadable", "Path", "rename", 0, id="load-before-its-name"),
        pytest.param("loadable", "VariantStore", "_evict", 0, id="load-before-the-bound"),
        pytest.param("remove", "Path", "unlink", 0, id="remove-before-the-manifest"),
        pytest.param("remove", "VariantStore", "_discard", 0, id="remove-behind-the-manifest"),
        pytest.param("remove", "Path", "unlink", 3, id="remove-between-tensors"),
    ],
)
def test_a_killed_process_leaves_a_store_that_works(
    store: VariantStore, tmp_path: Path, verb: str, owner: str, name: str, call: int
) -> None:
    tensors = factors({Q0: 4}) | factors({V1: 4}, seed=5)
    kept = store.add(adapter(tmp_path / "kept", tensors | factors({Q0: 4}, seed=50))).content_hash
    found = adapter(tmp_path / "a", tensors | factors({V1: 4}, seed=60))
    content = "0" * 64 if verb == "add" else store.add(found).content_hash
    words = [str(store.root), str(found.folder), content, verb, owner, name, str(call)]
    child = subprocess.Popen([sys.executable, "-c", _CHILD, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "paused\n"
        child.send_signal(signal.SIGKILL)
        child.wait(PATIENCE_S)
    finally:
        child.kill()
        child.communicate()
    read_adapter(store.loadable(kept))
    content = store.add(found).content_hash
    store.collect()
    check_consistent(store, [kept, content])
    store.remove(content)
    check_consistent(store, [kept])


@pytest.mark.parametrize("call", range(5))
def test_a_full_disk_leaves_nothing_behind(
    store: VariantStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, golden: Golden
) -> None:
    """At each of the four tensors and the manifest, in the middle of the file."""
    kept = store.add(adapter(tmp_path / "kept", factors({Q0: 4}))).content_hash
    real, calls = VariantStore._write, iter(range(100))

    def full(self: VariantStore, file: Path, pieces: Iterable[bytes], **more: Any) -> None:
        real(self, file, cut(pieces) if next(calls) == call else pieces, **more)

    def cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
        yield next(iter(pieces))[:3]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(VariantStore, "_write", full)
    found = adapter(tmp_path / "a", factors({Q0: 4, V1: 4}, seed=9))
    with golden.raises("adapter-errors", UnavailableError):
        store.add(found)
    check_consistent(store, [kept])
    monkeypatch.undo()
    check_consistent(store, [kept, store.add(found).content_hash])


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Have the kernel refuse larger files to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [100, 300])
def test_a_write_that_the_kernel_refuses_leaves_nothing_behind(
    store: VariantStore, tmp_path: Path, num_bytes: int
) -> None:
    """The first: a tensor, the second: the manifest or the loadable file."""
    found = adapter(tmp_path / "a")
    with largest_file(num_bytes), pytest.raises(UnavailableError, match="may write"):
        store.add(found)
    check_consistent(store, [])
    content = store.add(found).content_hash
    with largest_file(num_bytes), pytest.raises(UnavailableError, match="may write"):
        store.loadable(content)
    assert files_of(store, "loadable") == set()
    check_consistent(store, [content])


def test_a_store_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "variants").write_text("a file")
    with pytest.raises(UnavailableError, match="variant store"):
        VariantStore(tmp_path / "variants").add(adapter(tmp_path / "a"))
