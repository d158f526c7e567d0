"""``variant merge NAME OUT``: what a merge of the folder gives, after that folder has gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.variants.store import VariantStore
from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import ConflictError
from iserve.controller.variants import Variants
from iserve.model_source import resolve
from iserve.registered_merges import merge_registered
from iserve.rest_bodies import VariantBody
from iserve.settings import Settings, load_settings
from iserve.state.store import Store
from tests.daemon.tiny_deltas import write_tiny_delta
from tests.fingerprint.small_adapters import Q0, V1, factors, write_adapter, write_base
from tests.fingerprint.small_fine_tunes import tiny_tensors, write_model
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve

__all__ = ["iserve"]  # a fixture


@pytest.fixture
def variants(iserve: Callable[..., Done]) -> Iterator[Variants]:
    """The register of the home in which commands run."""
    settings: Settings = load_settings()
    settings.home.mkdir(exist_ok=True)
    state = Store.open(settings.state)
    found = Variants(settings, state, resolve, dict)
    yield found
    found.close()
    state.close()


def tensors(folder: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def test_a_registered_adapter_is_merged_as_its_folder_is(
    iserve: Callable[..., Done], variants: Variants, tmp_path: Path, golden: Golden
) -> None:
    base = write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", factors({Q0: 2, V1: 4}), r=4, rank_pattern={"q_proj": 2})
    variants.add(VariantBody(name="style", base=str(base), path=str(adapter)))
    assert iserve("variant", "merge", base, adapter, tmp_path / "whole").code == 0
    shutil.rmtree(adapter)
    done = iserve("variant", "merge", "style", tmp_path / "merged")
    assert done.code == 0
    golden("variant", done.out)
    assert tensors(tmp_path / "merged") == tensors(tmp_path / "whole") != tensors(base)
    document: dict[str, Any] = iserve("variant", "merge", "style", tmp_path / "again", "--json").document
    assert (document["base"], document["adapter"], document["num_merged"]) == (str(base), "style", 2)


def test_a_registered_delta_is_written_out_as_by_export(
    iserve: Callable[..., Done], variants: Variants, tmp_path: Path, golden: Golden
) -> None:
    base = tmp_path / "base"
    write_model(base, tiny_tensors())
    write_tiny_delta(base, tmp_path, "int2", seed=1)
    variants.add(VariantBody(name="tuned", base=str(base), path=str(tmp_path / "delta")))
    assert iserve("variant", "export", base, tmp_path / "delta", tmp_path / "whole").code == 0
    shutil.rmtree(tmp_path / "delta")
    done = iserve("variant", "merge", "tuned", tmp_path / "merged")
    assert done.code == 0
    golden("variant", done.out)
    assert tensors(tmp_path / "merged") == tensors(tmp_path / "whole") != tensors(base)


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(
    iserve: Callable[..., Done], variants: Variants, tmp_path: Path, golden: Golden
) -> None:
    base = write_base(tmp_path / "base")
    golden("variant", iserve("variant", "merge", "no-such", tmp_path / "out").line)
    variants.add(VariantBody(name="style", base=str(base), path=str(write_adapter(tmp_path / "adapter"))))
    shutil.rmtree(base)
    golden("variant", iserve("variant", "merge", "style", tmp_path / "out").line)
    base = write_base(tmp_path / "base")
    store = VariantStore(load_settings().variant_folder)
    shutil.rmtree(store.root / "loadable")
    for file in (store.root / "tensors").rglob("*"):
        if file.is_file():
            file.write_bytes(bytes(file.stat().st_size))
    golden("variant", iserve("variant", "merge", "style", tmp_path / "out").line)
    assert not (tmp_path / "out").exists()


def test_what_was_replaced_since_it_was_asked_about_is_not_merged(
    iserve: Callable[..., Done], variants: Variants, tmp_path: Path
) -> None:
    base, other = write_base(tmp_path / "base"), write_base(tmp_path / "other")
    first, second = write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", lora_alpha=32)

    def add(folder: Path, of: Path) -> tuple[str, str]:
        body = VariantBody(name="style", base=str(of), path=str(folder), replace=True)
        added = variants.add(body)
        return added.content_hash, added.base_directory

    asked, settings = add(first, base), load_settings()
    for replaced in (add(second, base), add(first, other)):
        assert replaced != asked
        with pytest.raises(ConflictError, match="replaced"):
            merge_registered("style", str(tmp_path / "out"), settings, expected=asked)
        assert not (tmp_path / "out").exists()
    merge_registered("style", str(tmp_path / "out"), settings, expected=add(first, base))
    assert tensors(tmp_path / "out") != tensors(base)
