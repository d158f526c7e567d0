"""The register of variants: one namespace, names that change content in one step."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fingerprint.errors import ConflictError, NotFoundError
from iserve.merged_keys import merged_key
from iserve.state.database import open_database
from iserve.state.rows import VariantRow
from iserve.state.store import Store
from tests.fingerprint.small_adapters import write_base
from tests.golden_words import Golden
from tests.iserve.state.raw_sql import Where, execute

ROW = VariantRow(
    name="style",
    base="llama",
    base_directory="/models/llama",
    content_hash="a" * 64,
    max_rank=16,
    num_modules=4,
    num_bytes=3 * 2**31,
    disk_bytes=5 * 2**30,
    trained_on="example/base",
    pinned=False,
    created_at=1.5,
)


def test_a_variant_is_kept_over_restarts(at: Callable[[], Store]) -> None:
    store = at()
    assert store.variants.put(ROW) == (ROW, None)
    store.variants.put(replace(ROW, name="other", trained_on=None, pinned=True))
    store = at()
    assert [row.name for row in store.variants.all()] == ["other", "style"]
    assert store.variants.get("style") == ROW
    assert store.variants.count() == 2
    assert store.variants.pin("style", pinned=True).pinned
    removed, own_deployment = store.variants.remove("other")
    assert (removed.name, removed.trained_on, own_deployment) == ("other", None, None)
    assert store.variants.has_content(ROW.content_hash)
    store.variants.remove("style")
    assert not store.variants.has_content(ROW.content_hash)
    for missing in (store.variants.get, store.variants.remove, lambda name: store.variants.pin(name, pinned=True)):
        with pytest.raises(NotFoundError, match="style"):
            missing("style")


@pytest.mark.parametrize(
    "other", [replace(ROW, content_hash="b" * 64, created_at=9.0), replace(ROW, base_directory="/models/x")]
)
def test_a_name_changes_what_it_means_only_when_asked(at: Callable[[], Store], other: VariantRow) -> None:
    store = at()
    store.variants.put(replace(ROW, pinned=True))
    with pytest.raises(ConflictError, match="--replace"):
        store.variants.put(other)
    assert store.variants.all() == (replace(ROW, pinned=True),)
    kept, former = store.variants.put(other, replace=True)
    assert (kept, former) == (replace(other, pinned=True), replace(ROW, pinned=True))
    assert store.variants.all() == (kept,)
    assert (kept.engine_name == ROW.engine_name) == (other.content_hash == ROW.content_hash)


def test_the_same_variant_again_changes_nothing_but_a_pin(at: Callable[[], Store]) -> None:
    store = at()
    store.variants.put(ROW)
    again = replace(ROW, created_at=9.0, base="an-alias")
    assert store.variants.put(again) == (ROW, ROW)
    assert store.variants.put(replace(again, pinned=True))[0] == replace(ROW, pinned=True)


def test_bytes_on_disk_are_those_of_the_last_addition(at: Callable[[], Store]) -> None:
    """A damaged tensor may have been plain, and is packed when it is mended."""
    store = at()
    store.variants.put(ROW)
    again = replace(ROW, disk_bytes=2**30, created_at=9.0)
    assert store.variants.put(again)[0] == replace(ROW, disk_bytes=2**30)
    assert store.variants.all() == (replace(ROW, disk_bytes=2**30),)


def test_tensors_of_before_were_plain(where: Where, at: Callable[[], Store]) -> None:
    database = open_database(where)
    database.migrate(to="0013")
    database.close()
    values = {name: value for name, value in asdict(ROW).items() if name != "disk_bytes"}
    words = ", ".join("false" if value is False else f"'{value}'" for value in values.values())
    execute(where, f"INSERT INTO variants ({', '.join(values)}) VALUES ({words})")
    assert at().variants.all() == (replace(ROW, disk_bytes=ROW.num_bytes),)


def test_one_name_means_one_model(at: Callable[[], Store], golden: Golden) -> None:
    store = at()
    store.put_model("model", "/m")
    store.add_deployment("deployment", b"{}")
    for name, owner in (("model", "registered model"), ("deployment", "a deployment"), ("iserve-demo", "bundled")):
        with pytest.raises(ConflictError, match=owner):
            store.variants.put(replace(ROW, name=name), replace=True)
        with pytest.raises(ConflictError, match=owner):
            store.variants.check_free(name)
    store.variants.put(ROW)
    with golden.raises("controller", ConflictError):
        store.put_model("style", "/m")
    with golden.raises("controller", ConflictError):
        store.add_deployment("style", b"{}")
    assert [row.name for row in store.deployments()] == ["deployment"]


def test_a_deployment_of_its_own_has_the_variants_name(where: Where, tmp_path: Path, golden: Golden) -> None:
    """And it alone: of the merged checkpoint of what the variant is now, under no other name, by no update."""
    base = write_base(tmp_path / "base")
    row_of = replace(ROW, base_directory=str(base))
    merged = {letter: tmp_path / "merged" / merged_key(letter * 64, str(base)) for letter in "ab"}
    for letter, folder in merged.items():
        golden.hide(folder.name, letter * 64)
    own, another = (json.dumps({"model": str(merged[letter])}).encode() for letter in "ab")
    store = Store.open(where, merged_folder=tmp_path / "merged")
    store.variants.put(row_of)
    with golden.raises("controller", ConflictError):
        store.add_deployment("style", another)
    row = store.add_deployment("style", own)
    store.variants.check_free("style")
    assert store.variants.put(replace(row_of, pinned=True)) == (replace(row_of, pinned=True), row_of)
    with golden.raises("controller", ConflictError):
        store.variants.put(replace(row_of, content_hash="b" * 64), replace=True)
    with golden.raises("controller", ConflictError):
        store.add_deployment("style", own)
    store.update_deployment(row.id, phase="ready")
    with golden.raises("controller", ConflictError):
        store.begin_update(row.id, another, "another model", former=own.decode())
    assert store.begin_update(row.id, own, "as it is", former=own.decode())
    store.delete_deployment(row.id)
    store.variants.remove("style")
    with pytest.raises(ConflictError, match="removed"):  # the variant is gone, and its merge is of none
        store.add_deployment("style", own)
    ordinary = store.add_deployment("style", b'{"model": "/models/other"}')
    with pytest.raises(ConflictError, match="choose another name"):
        store.variants.put(row_of)
    store.delete_deployment(ordinary.id)
    store.variants.put(row_of)


def test_a_state_without_variants_is_migrated(where: Where, at: Callable[[], Store]) -> None:
    database = open_database(where)
    database.migrate(to="0011")
    database.close()
    execute(where, "INSERT INTO models VALUES ('m', '/m', 1.5)")
    store = at()
    assert [model.name for model in store.models()] == ["m"]
    assert store.variants.all() == ()
