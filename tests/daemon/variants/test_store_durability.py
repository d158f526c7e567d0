"""Order of writes in the store of variants: what a name leads to is on the disk before the name is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from daemon.variants.manifest import read_manifest
from daemon.variants.store import VariantStore
from fingerprint.lora import read_adapter
from tests.fingerprint.small_adapters import Q0, V1, factors, write_adapter


@dataclass
class Disk:
    """Synced paths and given names, in their order."""

    events: list[tuple[str, Path]] = field(default_factory=list)
    sources: dict[Path, Path] = field(default_factory=dict)  # of names that were given

    def named(self, path: Path) -> int:
        """Return when ``path`` got its name, as an index of events; -1: it had it before."""
        return max((at for at, event in enumerate(self.events) if event == ("name", path)), default=-1)

    def is_synced(self, path: Path, *, after: int, before: int | None = None) -> bool:
        return ("sync", path) in self.events[after + 1 : before]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    sync = os.fsync

    def synced(handle: int) -> None:
        sync(handle)
        found.events.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}"))))

    def recorded(name: str) -> Callable[..., None]:
        real = getattr(os, name)

        def rename(source: Any, target: Any, **more: Any) -> None:
            real(source, target, **more)
            found.events.append(("name", Path(target)))
            found.sources[Path(target)] = Path(source)

        return rename

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, recorded(name))
    return found


def check_durable(store: VariantStore, disk: Disk, content_hash: str) -> None:
    """Check that all that a manifest names, and itself, were on the disk before it was named."""
    manifest = store.root / "manifests" / content_hash
    at = disk.named(manifest)
    assert at >= 0
    assert disk.is_synced(disk.sources[manifest], after=-1, before=at)
    for record in read_manifest(manifest.read_bytes(), content_hash).tensors:
        file = store.root / "tensors" / record.sha256[:2] / record.sha256
        named = disk.named(file)
        assert named < at
        written = (file, disk.sources.get(file, file))
        assert any(disk.is_synced(path, after=-1, before=at) for path in written), f"values of {record.name}"
        assert disk.is_synced(file.parent, after=named, before=at), f"the name of {record.name}"
    assert disk.is_synced(manifest.parent, after=at), "what is added stays added"


def test_tensors_are_on_the_disk_before_a_manifest_names_them(tmp_path: Path, disk: Disk) -> None:
    """Tensors as well that an addition before has written and that may have been killed before it synced them."""
    store = VariantStore(tmp_path / "variants")
    first = read_adapter(write_adapter(tmp_path / "a", factors({Q0: 4, V1: 4})))
    second = read_adapter(write_adapter(tmp_path / "b", factors({Q0: 4})))
    added = store.add(first)
    check_durable(store, disk, added.content_hash)
    disk.events.clear()
    disk.sources.clear()
    shares = store.add(second)
    assert shares.new_bytes == 0
    check_durable(store, disk, shares.content_hash)


def test_a_loadable_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, disk: Disk) -> None:
    store = VariantStore(tmp_path / "variants")
    added = store.add(read_adapter(write_adapter(tmp_path / "a", factors({Q0: 4, V1: 4}))))
    folder = store.loadable(added.content_hash)
    at, part = disk.named(folder), disk.sources[folder]
    assert at >= 0
    files = [part / file.name for file in folder.iterdir()]
    assert files
    assert all(disk.is_synced(path, after=-1, before=at) for path in (*files, part))
