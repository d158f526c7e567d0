"""Names of merged checkpoints: another base, or a base that was edited, is another one."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from fingerprint.errors import CheckpointError, ConflictError, NotFoundError
from iserve.merged_keys import is_merged, merged_key, merged_keys
from iserve.settings import Settings
from iserve.state.store import Store, VariantRow
from tests.fingerprint.small_adapters import write_base

HASH, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def bases(tmp_path: Path) -> tuple[Path, Path]:
    """Two bases of the same files."""
    first, second = (write_base(tmp_path / name) for name in ("first", "second"))
    for file in first.iterdir():
        os.utime(second / file.name, ns=(0, file.stat().st_mtime_ns))
    return first, second


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


@pytest.fixture
def store(settings: Settings, tmp_path: Path) -> Store:
    return Store.open(tmp_path / "state.db", merged_folder=settings.merged_folder)


def row(base: Path, content_hash: str = HASH) -> VariantRow:
    return VariantRow(
        name="tuned",
        base="chat",
        base_directory=str(base),
        content_hash=content_hash,
        max_rank=8,
        num_modules=1,
        num_bytes=1,
        disk_bytes=1,
        trained_on=None,
        pinned=False,
        created_at=0.0,
    )


def request(folder: Path) -> bytes:
    return json.dumps({"model": str(folder)}).encode()


def edit(base: Path) -> None:
    (base / "config.json").write_text((base / "config.json").read_text() + " ")


def test_content_base_and_what_the_base_is_make_the_name(bases: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = bases
    link = tmp_path / "link"
    link.symlink_to(first)
    made = merged_key(HASH, str(first))
    assert made == merged_key(HASH, str(first)) == merged_key(HASH, str(link))
    assert len({made, merged_key(OTHER, str(first)), merged_key(HASH, str(second))}) == 3
    edit(first)
    assert merged_key(HASH, str(first)) != made
    with pytest.raises(CheckpointError):
        merged_key(HASH, str(tmp_path / "gone"))


def test_a_deployment_of_the_merge_is_the_variants_own_alone(
    bases: tuple[Path, Path], settings: Settings, store: Store
) -> None:
    first, second = bases
    kept, _ = store.variants.put(row(first))
    own = settings.merged_folder / merged_key(HASH, str(first))
    for other in (merged_key(HASH, str(second)), HASH):
        with pytest.raises(ConflictError, match="tuned"):
            store.add_deployment("tuned", request(settings.merged_folder / other))
    with pytest.raises(ConflictError, match="tuned"):  # a folder of that name elsewhere
        store.add_deployment("tuned", request(settings.home / own.name))
    store.add_deployment("tuned", request(own))
    assert store.variants.put(row(first)) == (kept, kept)
    for changed in (row(second), row(first, OTHER)):
        with pytest.raises(ConflictError, match="deployment"):
            store.variants.put(changed, replace=True)
    store.variants.check_free("tuned")


def test_a_base_that_was_edited_makes_it_another_and_what_serves_can_be_updated(
    bases: tuple[Path, Path], settings: Settings, store: Store
) -> None:
    base, other = bases
    store.variants.put(row(base))
    own = settings.merged_folder / merged_key(HASH, str(base))
    served = store.add_deployment("tuned", request(own))
    store.update_deployment(served.id, phase="ready")
    edit(base)
    with pytest.raises(ConflictError, match="variant rm tuned"):
        store.variants.check_free("tuned")
    with pytest.raises(ConflictError, match="without another model"):
        store.begin_update(served.id, request(other), "", former=request(own).decode())
    assert store.begin_update(served.id, request(own), "", former=request(own).decode())


def test_a_merged_checkpoint_is_one_of_the_homes_folder(settings: Settings, tmp_path: Path) -> None:
    inside, outside = settings.merged_folder / HASH, tmp_path / HASH
    assert is_merged(request(inside).decode(), settings.merged_folder)
    assert not is_merged(request(inside).decode(), None)
    for other in (request(outside).decode(), "{}", json.dumps({"model": "a\0b"}), '{"model": null}'):
        assert not is_merged(other, settings.merged_folder)


def test_a_merge_whose_variant_is_gone_is_not_deployed(
    bases: tuple[Path, Path], settings: Settings, store: Store
) -> None:
    """Removed, or replaced, while a command merged it."""
    own = request(settings.merged_folder / merged_key(HASH, str(bases[0])))
    store.variants.put(row(bases[0]))
    assert store.variants.remove("tuned") == (row(bases[0]), None)
    chat = store.add_deployment("chat", request(bases[0]))
    store.update_deployment(chat.id, phase="ready")
    for name in ("tuned", "another"):
        with pytest.raises(ConflictError, match="variant deploy"):
            store.add_deployment(name, own)
    with pytest.raises(ConflictError, match="variant deploy"):
        store.begin_update(chat.id, own, "", former=request(bases[0]).decode())
    store.variants.put(row(bases[1]))
    with pytest.raises(ConflictError, match="replaced"):
        store.add_deployment("tuned", own)


def test_a_variant_and_its_own_deployment_are_removed_in_one_step(
    bases: tuple[Path, Path], settings: Settings, store: Store
) -> None:
    kept, _ = store.variants.put(row(bases[0]))
    own = store.add_deployment("tuned", request(settings.merged_folder / merged_key(HASH, str(bases[0]))))
    other = store.add_deployment("chat", b"{}")
    assert store.variants.remove("tuned") == (kept, own.id)
    assert {one.name: one.desired for one in store.deployments()} == {"tuned": "removed", "chat": "running"}
    assert store.deployment("chat") == other
    with pytest.raises(NotFoundError, match="tuned"):
        store.variants.remove("tuned")


def test_keys_of_many_are_those_of_each(bases: tuple[Path, Path], tmp_path: Path) -> None:
    asked = [(HASH, str(bases[0])), (OTHER, str(bases[0])), (HASH, str(bases[1])), (HASH, str(tmp_path / "gone"))]
    assert list(merged_keys(asked)) == [*(merged_key(*one) for one in asked[:3]), None]


def test_of_two_variants_of_one_content_the_first_is_named(
    bases: tuple[Path, Path], settings: Settings, store: Store
) -> None:
    for name in ("tuned", "also"):
        store.variants.put(dataclasses.replace(row(bases[0]), name=name))
    found = store.variants.merged_in(settings.merged_folder / merged_key(HASH, str(bases[0])))
    assert found is not None
    assert found.name == "also"
    assert store.variants.merged_in(bases[0]) is None
