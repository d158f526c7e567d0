"""Adapters that are more than a plain LoRA: merged as PEFT merges them, or refused by what is wrong with them."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fingerprint.checkpoint
from fingerprint.errors import UnsupportedAdapterError
from fingerprint.lora import content_sha256, merge_adapter, read_adapter, require_supported
from tests.fingerprint.adapter_kinds import CASES, merged_by_peft, recorded, write_kind
from tests.fingerprint.small_adapters import (
    BIASED,
    HIDDEN,
    Q0,
    VOCAB,
    base_tensors,
    factors,
    ia3_vectors,
    module_names,
    token_rows,
    values,
    write_adapter,
    write_base,
    write_ia3,
)
from tests.fingerprint.test_adapter_merge import floats_of, load, logits, tensors_of
from tests.golden_words import Golden

Floats = npt.NDArray[np.float32]
PREFIX = "base_model.model."
EMBEDDINGS, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.mark.parametrize(("files", "chunk"), [(1, 4 * 2**20), (3, 40)])
@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_peft(
    case: str, files: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint.checkpoint, "CHUNK_BYTES", chunk)
    asked = CASES[case]
    base = write_base(tmp_path / "base", asked.dtype, files, **asked.base)
    adapter = read_adapter(write_kind(tmp_path / "adapter", case))
    assert {part.kind for part in adapter.merged_only} == set(asked.kinds)
    merge_adapter(base, adapter, tmp_path / "out")
    merged, before = floats_of(tmp_path / "out"), floats_of(base)
    expected = merged_by_peft(case)
    if not asked.base.get("has_head", True):
        assert np.array_equal(expected.pop(HEAD), expected[EMBEDDINGS])
    # PEFT computes with BF16 in steps that are rounded each.
    bounds = {"rtol": 2**-6, "atol": 2**-8} if asked.dtype == "BF16" else {"rtol": 2e-6, "atol": 1e-6}
    for name, values_ in expected.items():
        np.testing.assert_allclose(merged.pop(name).reshape(-1), values_, err_msg=name, **bounds)
        assert not np.allclose(before.pop(name).reshape(-1), values_, atol=1e-3)
    assert all(np.array_equal(array, before[name]) for name, array in merged.items())


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed; what it made is recorded")
def test_the_record_is_what_the_installed_peft_makes(tmp_path: Path) -> None:
    code = "from tests.fingerprint import adapter_kinds, record_adapter_kinds as record; from pathlib import Path;"
    code += f"adapter_kinds.RECORD = Path({str(tmp_path / 'record')!r}); record.main()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    made = json.loads(lzma.decompress((tmp_path / "record").read_bytes()))["cases"]
    for case in CASES:
        assert made[case]["adapter"] == recorded(case)["adapter"]
        assert made[case]["merged"].keys() == recorded(case)["merged"].keys()


@pytest.mark.parametrize("case", ["combined", "dora-vocabulary", "ia3-biases-and-saved", "tokens-tied"])
def test_the_result_is_a_model_that_answers_otherwise(case: str, tmp_path: Path) -> None:
    import torch

    base = write_base(tmp_path / "base", **CASES[case].base)
    merge_adapter(base, read_adapter(write_kind(tmp_path / "adapter", case)), tmp_path / "out")
    assert not torch.allclose(logits(load(tmp_path / "out")), logits(load(base)), atol=1e-2)


def merged(
    tmp_path: Path, tensors: dict[str, Floats], *, base: dict[str, Any] | None = None, **config: Any
) -> Path:
    """Write a base and an adapter, and return the merged checkpoint's folder."""
    adapter = write_adapter(tmp_path / "adapter", tensors, **config)
    merge_adapter(write_base(tmp_path / "base", **(base or {})), read_adapter(adapter), tmp_path / "out")
    return tmp_path / "out"


class TestLaws:
    @settings(max_examples=25)
    @given(
        rank=st.integers(1, 6),
        alpha=st.floats(-4, 4),
        chunk=st.integers(1, 60).map(lambda number: 4 * number),
        seed=st.integers(0, 1000),
    )
    def test_dora_whose_magnitudes_are_the_norms_is_the_lora_wherever_pieces_end(
        self, rank: int, alpha: float, chunk: int, seed: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("dora")
        lora = {"r": rank, "lora_alpha": alpha, "target_modules": None}
        vocabulary = {
            f"{PREFIX}model.embed_tokens.lora_embedding_A": values((rank, VOCAB), seed + 7),
            f"{PREFIX}model.embed_tokens.lora_embedding_B": values((HIDDEN, rank), seed + 8),
        }
        tensors = factors({Q0: rank}, seed) | vocabulary
        plain = floats_of(merged(folder / "lora", tensors, **lora))
        norms = {
            f"{PREFIX}{Q0}.lora_magnitude_vector": np.linalg.norm(plain[f"{Q0}.weight"], axis=1),
            f"{PREFIX}model.embed_tokens.lora_magnitude_vector": np.linalg.norm(plain[EMBEDDINGS], axis=0),
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fingerprint.checkpoint, "CHUNK_BYTES", chunk)
            found = floats_of(merged(folder / "dora", tensors | norms, use_dora=True, **lora))
        for name, expected in plain.items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-7)
        doubled = {name: 2 * each for name, each in norms.items()}
        twice = floats_of(merged(folder / "twice", tensors | doubled, use_dora=True, **lora))
        for name in (f"{Q0}.weight", EMBEDDINGS):
            np.testing.assert_allclose(twice[name], 2 * plain[name], rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
    def test_ia3_of_ones_is_the_base(self, dtype: str, tmp_path: Path) -> None:
        base = write_base(tmp_path / "base", dtype, **BIASED)
        merge_adapter(base, read_adapter(write_ia3(tmp_path / "adapter", ones=True)), tmp_path / "out")
        assert tensors_of(tmp_path / "out") == tensors_of(base)

    def test_ia3_scales_rows_of_outputs_and_columns_of_inputs(self, tmp_path: Path) -> None:
        base = write_base(tmp_path / "base", **BIASED)
        merge_adapter(base, read_adapter(write_ia3(tmp_path / "adapter")), tmp_path / "out")
        before, found, vectors = floats_of(base), floats_of(tmp_path / "out"), ia3_vectors()
        for name in module_names(["k_proj"]):
            vector = vectors[f"{PREFIX}{name}.ia3_l"]
            assert np.array_equal(found[f"{name}.weight"], before[f"{name}.weight"] * vector)
            assert np.array_equal(found[f"{name}.bias"], before[f"{name}.bias"] * vector[:, 0])
        for name in module_names(["down_proj"]):
            assert np.array_equal(
                found[f"{name}.weight"], before[f"{name}.weight"] * vectors[f"{PREFIX}{name}.ia3_l"]
            )
            assert np.array_equal(found[f"{name}.bias"], before[f"{name}.bias"])

    @pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
    def test_saved_modules_rows_and_biases_of_the_base_change_no_bit(self, dtype: str, tmp_path: Path) -> None:
        base = write_base(tmp_path / "base", dtype, **BIASED)
        own = floats_of(base)
        tensors = {name: each * 0 if "lora_B" in name else each for name, each in factors({Q0: 4}).items()}
        tensors |= {f"{PREFIX}{name}": own[name] for name in (HEAD, NORM)}
        tensors |= {f"{PREFIX}{name}": each for name, each in own.items() if name.endswith(".bias")}
        tensors[f"{PREFIX}{Q0}.base_layer.bias"] = tensors.pop(f"{PREFIX}{Q0}.bias")
        tensors[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = own[EMBEDDINGS][[9, 2]]
        config = {"bias": "all", "modules_to_save": ["lm_head", "model.norm"], "trainable_token_indices": [9, 2]}
        adapter = write_adapter(tmp_path / "adapter", tensors, dtype, target_modules=["q_proj"], **config)
        merge_adapter(base, read_adapter(adapter), tmp_path / "out")
        assert tensors_of(tmp_path / "out") == tensors_of(base)

    @given(data=st.data(), chunk=st.integers(1, 40).map(lambda number: 4 * number))
    @settings(max_examples=25)
    def test_each_named_row_is_replaced_and_no_other(
        self, data: st.DataObject, chunk: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        rows = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB, unique=True))
        folder = tmp_path_factory.mktemp("tokens")
        given_ = values((len(rows), HIDDEN), 77)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fingerprint.checkpoint, "CHUNK_BYTES", chunk)
            out = merged(folder, token_rows(given_), trainable_token_indices=rows)
        expected = base_tensors()[EMBEDDINGS].copy()
        expected[rows] = given_
        assert np.array_equal(floats_of(out)[EMBEDDINGS], expected)

    def test_a_stored_copy_of_tied_embeddings_changes_with_them(self, tmp_path: Path) -> None:
        out = merged(
            tmp_path,
            token_rows(values((1, HIDDEN), 3)),
            base={"tie_word_embeddings": True},
            trainable_token_indices=[4],
        )
        found, before = floats_of(out), base_tensors()
        for name in (EMBEDDINGS, HEAD):
            assert np.array_equal(found[name][4], values((1, HIDDEN), 3)[0])
            assert np.array_equal(np.delete(found[name], 4, 0), np.delete(before[name], 4, 0))

    def test_what_is_saved_for_both_of_tied_embeddings_alike_is_one_change(self, tmp_path: Path) -> None:
        whole = values((VOCAB, HIDDEN), 9)
        tensors = factors({Q0: 4}) | {f"{PREFIX}{name}": whole for name in (EMBEDDINGS, HEAD)}
        found = floats_of(
            merged(
                tmp_path,
                tensors,
                base={"tie_word_embeddings": True, "has_head": False},
                modules_to_save=["embed_tokens", "lm_head"],
            )
        )
        assert np.array_equal(found[EMBEDDINGS], whole)
        assert HEAD not in found


def test_feedforward_modules_of_an_expression_are_those_with_vectors_of_inputs(tmp_path: Path) -> None:
    adapter = write_ia3(tmp_path / "adapter", feedforward_modules=".*down_proj", target_modules="all-linear")
    merge_adapter(write_base(tmp_path / "base"), read_adapter(adapter), tmp_path / "out")
    assert tensors_of(tmp_path / "out") != tensors_of(tmp_path / "base")


def test_the_hash_is_of_all_that_an_adapter_computes(tmp_path: Path) -> None:
    made = {
        name: read_adapter(write_adapter(tmp_path / name, factors({Q0: 4}, seed), lora_alpha=alpha))
        for name, seed, alpha in (("one", 1, 8), ("same", 1, 8), ("values", 2, 8), ("scale", 1, 9))
    }
    hashes = {name: content_sha256(adapter) for name, adapter in made.items()}
    assert hashes["one"] == hashes["same"]
    assert len(set(hashes.values())) == 3


@pytest.mark.parametrize("case", CASES)
def test_none_of_them_is_served_as_an_adapter(case: str, tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(UnsupportedAdapterError) as refusal:
        require_supported(read_adapter(write_kind(tmp_path / "adapter", case)))
    golden("adapter-errors", str(refusal.value))
