"""Checkpoints that are saved anew while a delta is made of them: refused by tensor, unless they are the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from daemon.variants.compress import compress_delta
from daemon.variants.compress.compressor import Prepared, compress_prepared, prepare
from daemon.variants.compress.judgement import JudgedTokens, judge
from fingerprint.delta.reader import open_delta
from fingerprint.errors import CheckpointError
from tests.daemon.variants.tiny_pairs import DOWN1, NORM, Q0, only, order, write_pair
from tests.fingerprint.small_fine_tunes import TEXTS, Arrays, read_bytes, tiny_tensors, tuned, write_model

UP0 = "model.layers.0.mlp.up_proj.weight"


def silent(what: str, done: int, total: int) -> None:
    pass


def save_over(checkpoint: Path, tensors: Arrays) -> None:
    """Have a file of ``tensors`` in the place of a checkpoint's."""
    write_model(checkpoint.with_name("new"), tensors)
    os.replace(checkpoint.with_name("new") / "model.safetensors", checkpoint / "model.safetensors")
    shutil.rmtree(checkpoint.with_name("new"))


def again(*names: str) -> Callable[[Arrays], Arrays]:
    """Return a fine-tuning of ``DOWN1`` and ``NORM``, and then of ``names``."""

    def change(tensors: Arrays) -> Arrays:
        first, second = only(DOWN1, NORM)(tensors), tuned(tensors, seed=2)
        return {name: second[name] if name in names else values for name, values in first.items()}

    return change


@pytest.mark.parametrize("is_compensated", [True, False], ids=["compensated", "rounded"])
@pytest.mark.parametrize("name", [DOWN1, NORM])
def test_a_changed_tensor_of_the_delta_is_named(tmp_path: Path, name: str, is_compensated: bool) -> None:
    tensors = write_pair(tmp_path, change=only(DOWN1, NORM))
    asked = order(tmp_path, is_compensated=is_compensated)
    prepared = prepare(asked, silent)
    save_over(tmp_path / "tuned", again(name)(tensors))
    with pytest.raises(CheckpointError, match=f"{name}.*changed while"):
        compress_prepared(asked, prepared, silent)
    assert not (tmp_path / "delta").exists()
    whole = compress_delta(order(tmp_path, target=tmp_path / "whole", is_compensated=is_compensated))
    found = compress_delta(asked)
    assert (found.units_found_done, found.manifest) == (0, whole.manifest)


def test_a_changed_base_is_named(tmp_path: Path) -> None:
    tensors = write_pair(tmp_path, change=only(DOWN1))
    prepared = prepare(order(tmp_path), silent)
    save_over(tmp_path / "base", again(DOWN1)(tensors))
    with pytest.raises(CheckpointError, match=f"{DOWN1}.*/base changed while"):
        compress_prepared(order(tmp_path), prepared, silent)


@pytest.fixture
def judged(tmp_path: Path) -> tuple[Prepared, Callable[[], object]]:
    """A pair with its delta, and what judges the delta."""
    write_pair(tmp_path, change=only(DOWN1, NORM))
    compress_delta(order(tmp_path))
    prepared = prepare(order(tmp_path), silent)
    tokens = JudgedTokens((list(TEXTS[0].encode()),), (1,))
    cpu, delta = torch.device("cpu"), open_delta(tmp_path / "delta")
    return prepared, lambda: judge(prepared, delta, tokens, cpu, lambda done, total: None)


@pytest.mark.parametrize("name", [Q0, UP0])
def test_a_changed_tensor_that_only_computes_is_named(
    tmp_path: Path, name: str, judged: tuple[Prepared, Callable[[], object]]
) -> None:
    """The delta has no such tensor, but its layer's outputs are what the next one is compressed, or judged, by."""
    prepared, judge_it = judged
    save_over(tmp_path / "tuned", again(name)(tiny_tensors()))
    with pytest.raises(CheckpointError, match=f"{name}.*changed while"):
        compress_prepared(order(tmp_path, target=tmp_path / "new"), prepared, silent)
    with pytest.raises(CheckpointError, match=f"{name}.*changed while"):
        judge_it()


def test_the_same_tensors_in_new_files_are_the_same(
    tmp_path: Path, judged: tuple[Prepared, Callable[[], object]]
) -> None:
    prepared, judge_it = judged
    expected = judge_it()
    for folder in (tmp_path / "base", tmp_path / "tuned"):
        shutil.copyfile(folder / "model.safetensors", folder / "copy")
        os.replace(folder / "copy", folder / "model.safetensors")
    compress_prepared(order(tmp_path, target=tmp_path / "again"), prepared, silent)
    assert read_bytes(tmp_path / "again") == read_bytes(tmp_path / "delta")
    assert judge_it() == expected
