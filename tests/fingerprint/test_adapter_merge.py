"""Merged checkpoints: the base's files with W + scale * B @ A, as PEFT and a model with two paths compute it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fingerprint.checkpoint
from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import CheckpointError, ConflictError, UnsupportedAdapterError
from fingerprint.float_bytes import decode_floats, encode_floats
from fingerprint.lora import LoraAdapter, MergeResult, merge_adapter, read_adapter
from fingerprint.safetensors_writer import scratch_directory, write_safetensors
from tests.fingerprint.adapter_cases import CASES, recorded
from tests.fingerprint.small_adapters import (
    Q0,
    SHAPES,
    factors,
    module_names,
    write_adapter,
    write_base,
)
from tests.golden_words import Golden

Floats = npt.NDArray[np.float32]


def tensors_of(folder: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def floats_of(folder: Path) -> dict[str, Floats]:
    checkpoint = Checkpoint.open(folder)
    return {
        name: decode_floats(checkpoint.read(name), entry.dtype).reshape(entry.shape)
        for name, entry in checkpoint.tensors.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_peft(case: str, tmp_path: Path) -> None:
    asked, found = CASES[case], recorded()["cases"][case]["float32"]
    base = write_base(tmp_path / "base", asked.base_dtype)
    adapter = write_adapter(tmp_path / "adapter", factors(asked.ranks), asked.adapter_dtype, **asked.config)
    merge_adapter(base, read_adapter(adapter), tmp_path / "out")
    merged, before = floats_of(tmp_path / "out"), floats_of(base)
    # PEFT rounds the update to the base's type before it adds: two roundings of eight bits, where here is one.
    bounds = {"rtol": 2**-7, "atol": 2**-9} if asked.base_dtype == "BF16" else {"rtol": 1e-6, "atol": 1e-6}
    for name, encoded in found.items():
        weight = f"{name}.weight"
        expected = np.frombuffer(base64.b64decode(encoded), "<f4").reshape(SHAPES[weight])
        np.testing.assert_allclose(merged.pop(weight), expected, **bounds)
        assert not np.allclose(before[weight], expected, atol=1e-2)
    assert all(np.array_equal(array, before[name]) for name, array in merged.items())


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12) * 7 % 32, use_cache=False).logits


def load(folder: Path) -> Any:
    """The model that transformers loads in float32, nothing missing and nothing left over."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, dtype=torch.float32
    )
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval()


def with_second_path(model: Any, adapter: LoraAdapter, tensors: dict[str, Floats]) -> Any:
    """``model`` whose adapted modules return W x + scale B (A x): no weight is changed."""
    import torch

    def hook(down: Any, up: Any, scale: float) -> Callable[[Any, Any, Any], Any]:
        return lambda _module, given, out: out + scale * (given[0] @ down.T @ up.T)

    for module in adapter.modules:
        down, up = (torch.tensor(tensors[name]) for name in module.factors)
        model.get_submodule(module.name).register_forward_hook(hook(down, up, module.scale))
    return model


@pytest.mark.parametrize("files", [1, 3])
def test_logits_are_those_of_a_model_with_two_paths(files: int, tmp_path: Path) -> None:
    import torch

    ranks = {name: 1 + number % 5 for number, name in enumerate([*module_names(["_proj"]), "lm_head"])}
    tensors = factors(ranks)
    base = write_base(tmp_path / "base", files=files)
    adapter = read_adapter(
        write_adapter(
            tmp_path / "adapter", tensors, target_modules="all-linear", rank_pattern=ranks, lora_alpha=0.5
        )
    )
    merge_adapter(base, adapter, tmp_path / "out")
    found = logits(load(tmp_path / "out"))
    torch.testing.assert_close(found, logits(with_second_path(load(base), adapter, tensors)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, logits(load(base)), atol=1e-2)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_result_has_the_files_of_the_base(dtype: str, files: int, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype, files)
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_own.py", "old.bin", "README.md"):
        (base / name).write_text(name)
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    seen: list[tuple[int, int]] = []
    adapter = read_adapter(write_adapter(tmp_path / "adapter"))
    result = merge_adapter(base, adapter, tmp_path / "deep" / "out", progress=lambda *at: seen.append(at))
    out = tmp_path / "deep" / "out"
    assert {file.name for file in out.iterdir()} == before.keys() - {"modeling_own.py", "old.bin", "README.md"}
    assert (out / "config.json").read_bytes() == before["config.json"]
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    total = sum(map(len, tensors_of(base).values()))
    assert result == MergeResult(
        directory=out, num_merged=4, num_tensors=len(SHAPES), num_files=files, bytes_written=total
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    stored = {
        name: (entry.file.name, entry.dtype, entry.shape) for name, entry in Checkpoint.open(base).tensors.items()
    }
    assert stored == {
        name: (entry.file.name, entry.dtype, entry.shape) for name, entry in Checkpoint.open(out).tensors.items()
    }
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before


def test_code_of_the_model_is_copied_where_its_config_names_it(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (base / "modeling_own.py").write_text("raise SystemExit('run')")
    merge_adapter(base, read_adapter(write_adapter(tmp_path / "adapter")), tmp_path / "out")
    assert (tmp_path / "out" / "modeling_own.py").read_text() == "raise SystemExit('run')"


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_an_update_of_zero_changes_no_bit(dtype: str, tmp_path: Path) -> None:
    tensors = {name: array * ("lora_A" in name) for name, array in factors({Q0: 4}).items()}
    base = write_base(tmp_path / "base", dtype)
    merge_adapter(base, read_adapter(write_adapter(tmp_path / "adapter", tensors)), tmp_path / "out")
    assert tensors_of(tmp_path / "out") == tensors_of(base)


@settings(max_examples=40)
@given(
    rank=st.integers(1, 9),
    alpha=st.floats(-4, 4),
    dtype=st.sampled_from(["F32", "F16", "BF16"]),
    chunk=st.integers(1, 40).map(lambda number: 4 * number),
    seed=st.integers(0, 1000),
)
def test_every_value_is_the_sum_rounded_once_wherever_pieces_end(
    rank: int, alpha: float, dtype: str, chunk: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    tensors = factors({Q0: rank}, seed)
    base = write_base(folder / "base", dtype)
    adapter = read_adapter(write_adapter(folder / "adapter", tensors, r=rank, lora_alpha=alpha))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint.checkpoint, "CHUNK_BYTES", chunk)
        merge_adapter(base, adapter, folder / "out")
    down, up = (tensors[name].astype(np.float64) for name in adapter.modules[0].factors)
    exact = floats_of(base)[f"{Q0}.weight"] + alpha / rank * (up @ down)
    found = floats_of(folder / "out")[f"{Q0}.weight"]
    # Half a unit in the last place of the type, and what float32 sums of so few terms lose.
    bits = {"F32": 24, "F16": 11, "BF16": 8}[dtype]
    np.testing.assert_allclose(found, exact, rtol=2.0**-bits, atol=1e-5)


@given(number=st.floats(allow_nan=False, width=32), dtype=st.sampled_from(["F32", "F16", "BF16"]))
def test_floats_are_stored_as_torch_stores_them(number: float, dtype: str) -> None:
    import torch

    kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    expected = torch.tensor([number], dtype=torch.float32).to(kind)
    raw = encode_floats(np.array([number], np.float32), dtype)
    assert raw == expected.view(torch.uint8).numpy().tobytes()
    assert decode_floats(raw, dtype)[0] == expected.float().item()


def _too_large(tmp_path: Path) -> LoraAdapter:
    tensors = {name: array * 1000 for name, array in factors({Q0: 4}).items()}
    return read_adapter(write_adapter(tmp_path / "adapter", tensors))


def test_a_sum_beyond_the_bases_type_is_refused_and_nothing_is_left(tmp_path: Path, golden: Golden) -> None:
    base = write_base(tmp_path / "base", "F16")
    with pytest.raises(CheckpointError) as refusal:
        merge_adapter(base, _too_large(tmp_path), tmp_path / "out")
    golden("adapter-errors", str(refusal.value))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter", "base"]
    merge_adapter(
        write_base(tmp_path / "wide"), read_adapter(tmp_path / "adapter"), tmp_path / "out"
    )  # F32 holds it


def test_an_adapter_that_is_not_applied_writes_nothing(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "adapter", use_dora=True))
    with pytest.raises(UnsupportedAdapterError):
        merge_adapter(write_base(tmp_path / "base"), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_values_that_are_not_finite_write_nothing(tmp_path: Path) -> None:
    tensors = {name: array + np.float32(np.nan) for name, array in factors({Q0: 4}).items()}
    adapter = read_adapter(write_adapter(tmp_path / "adapter", tensors))
    with pytest.raises(CheckpointError, match="NaN"):
        merge_adapter(write_base(tmp_path / "base"), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_changes_meanwhile_is_an_error(tmp_path: Path, golden: Golden) -> None:
    base = write_base(tmp_path / "base")
    adapter = read_adapter(write_adapter(tmp_path / "adapter"))
    shutil.rmtree(tmp_path / "adapter")
    write_adapter(tmp_path / "adapter", factors({Q0: 7}))
    with golden.raises("fingerprint", CheckpointError):
        merge_adapter(base, adapter, tmp_path / "out")


def test_a_full_disk_is_an_error_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    def full(file: Path, *arguments: Any, **more: Any) -> int:
        write_safetensors(file, *arguments, **more)
        raise OSError(28, "No space left on device")

    base = write_base(tmp_path / "base", files=3)
    adapter = read_adapter(write_adapter(tmp_path / "adapter"))
    monkeypatch.setattr("fingerprint.derived_checkpoint.write_safetensors", full)
    with golden.raises("fingerprint", CheckpointError):
        merge_adapter(base, adapter, tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter", "base"]


def test_what_is_there_stays_and_an_empty_folder_is_filled(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    adapter = read_adapter(write_adapter(tmp_path / "adapter"))
    out = tmp_path / "out"
    out.mkdir()
    merge_adapter(base, adapter, out)
    with pytest.raises(ConflictError, match="is there already"):
        merge_adapter(base, adapter, out)
    with pytest.raises(ConflictError, match="is there already"):
        merge_adapter(base, adapter, base)


def test_the_next_merge_removes_what_a_killed_one_left_and_not_what_one_writes(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    adapter = read_adapter(write_adapter(tmp_path / "adapter"))
    names = (".out.01234567.part", ".out.89abcdef.part", ".other.01234567.part", ".out.mine.part")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("x")
    handle = os.open(tmp_path / names[1], os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        merge_adapter(base, adapter, tmp_path / "out")
    finally:
        os.close(handle)
    assert {name for name in names if (tmp_path / name).exists()} == set(names[1:])


def test_a_scratch_folder_is_gone_however_its_block_ends(tmp_path: Path) -> None:
    left = tmp_path / "deep" / ".out.01234567.part"
    left.mkdir(parents=True)
    with scratch_directory(tmp_path / "deep" / "out") as scratch:
        assert [entry.name for entry in (tmp_path / "deep").iterdir()] == [scratch.name]
        with scratch_directory(tmp_path / "deep" / "out"):  # of another process, which removes none that is in use
            assert scratch.exists()
    with pytest.raises(FileExistsError), scratch_directory(tmp_path / "deep" / "out") as scratch:
        scratch.mkdir()
    assert list((tmp_path / "deep").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"), scratch_directory(tmp_path / "file" / "out"):
        pass


def test_an_index_names_what_its_files_hold(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", files=3)
    merge_adapter(base, read_adapter(write_adapter(tmp_path / "adapter")), tmp_path / "out")
    index, of_base = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (tmp_path / "out", base)
    )
    assert index["weight_map"] == of_base["weight_map"]
    assert index["metadata"]["total_size"] == sum(map(len, tensors_of(base).values()))
