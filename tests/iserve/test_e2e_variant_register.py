"""A home whose controller is killed while it adds a variant: the register works on, and nothing is left over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon.variants.manifest import read_manifest
from daemon.variants.store import VariantStore
from fingerprint.checkpoint import Checkpoint
from fingerprint.lora import read_adapter
from iserve.demo import demo_model_path
from tests.fingerprint.small_adapters import values, write_adapter
from tests.waiting import PATIENCE_S, wait_until

RANK = 128  # for as many bytes as the small base allows


def large_adapter(folder: Path) -> Path:
    tensors = {}
    for number, (name, entry) in enumerate(sorted(Checkpoint.open(demo_model_path()).tensors.items())):
        if name.endswith("_proj.weight"):
            rows, columns = entry.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = values((RANK, columns), number)
            tensors[f"{prefix}.lora_B.weight"] = values((rows, RANK), 1000 + number)
    return write_adapter(folder, tensors, r=RANK, target_modules="all-linear")


def tensor_files(store: VariantStore) -> set[str]:
    return {file.name for file in (store.root / "tensors").rglob("*") if file.is_file()}


def test_a_controller_that_is_killed_while_it_adds_leaves_a_register_that_works(
    make_installation: Any, tmp_path: Path, one_line: Callable[..., str]
) -> None:
    home, adapter = make_installation(), large_adapter(tmp_path / "adapter")
    store = VariantStore(home.home / "variants")
    home.run("up")
    command = home.start("variant", "add", "style", "--base", "iserve-demo", adapter)
    try:
        wait_until(lambda: tensor_files(store), "the first tensor is stored")
        home.kill("controller")
        command.communicate(timeout=PATIENCE_S)
    finally:
        command.kill()
    was_added = command.returncode == 0
    home.run("up")
    names = [one["name"] for one in home.json("variant", "ls")]
    assert names == ["style"] if was_added else names in ([], ["style"])
    if not names:
        wait_until(lambda: not list((store.root / "writing").iterdir()), "what was being written is removed")
    added = home.json("variant", "add", "style", "--base", "iserve-demo", adapter, "--pin")
    assert added["pinned"]
    shutil.rmtree(adapter)  # the home has its own copy
    (content,) = store.contents()
    manifest = read_manifest((store.root / "manifests" / content.content_hash).read_bytes(), content.content_hash)
    assert tensor_files(store) == {record.sha256 for record in manifest.tensors}
    assert read_adapter(store.loadable(added["content_hash"])).max_rank == RANK
    assert "is named 'style'" in one_line(home.run("register", "style", demo_model_path(), check=False))
    home.run("variant", "rm", "style")
    wait_until(lambda: not tensor_files(store), "the content is removed")
    assert home.json("variant", "ls") == []
