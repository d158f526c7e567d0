"""Errors of adapters that are more than a plain LoRA: one line each, and nothing is left."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fingerprint.checkpoint
from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import CheckpointError, ConfigError, IserveError, UnsupportedAdapterError
from fingerprint.float_bytes import decode_floats
from fingerprint.lora import merge_adapter, read_adapter
from fingerprint.lora.adapter import WEIGHTS_FILE
from tests.fingerprint.adapter_kinds import write_kind
from tests.fingerprint.small_adapters import (
    BIASED,
    HIDDEN,
    KV_WIDTH,
    Q0,
    VOCAB,
    base_tensors,
    factors,
    ia3_vectors,
    token_rows,
    values,
    write_adapter,
    write_base,
    write_ia3,
    write_tensors,
)
from tests.golden_words import Golden

Floats = npt.NDArray[np.float32]
PREFIX = "base_model.model."
EMBEDDINGS, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

_MAGNITUDE = f"{PREFIX}{Q0}.lora_magnitude_vector"
_DORA = factors({Q0: 4}) | {_MAGNITUDE: values((HIDDEN,), 1)}
_LORA_BIAS = factors({Q0: 4}) | {f"{PREFIX}{Q0}.lora_B.bias": values((HIDDEN,), 1)}
_EMBEDDING = factors({Q0: 4}) | {
    f"{PREFIX}model.embed_tokens.lora_embedding_A": values((4, VOCAB), 1),
    f"{PREFIX}model.embed_tokens.lora_embedding_B": values((HIDDEN, 4), 2),
}
_ALL = {"target_modules": None}
_SAVED_HEAD = {f"{PREFIX}{HEAD}": values((VOCAB, HIDDEN), 1)}
_SAVED_INPUTS = {f"{PREFIX}{EMBEDDINGS}": values((VOCAB, HIDDEN), 2)}
_TIED = {"tie_word_embeddings": True}


def without(tensors: dict[str, Floats], name: str) -> dict[str, Floats]:
    return {key: value for key, value in tensors.items() if key != name}


def cut(tensors: dict[str, Floats], name: str) -> dict[str, Floats]:
    return tensors | {name: np.ascontiguousarray(tensors[name][:-1])}


def with_nan(tensors: dict[str, Floats], name: str) -> dict[str, Floats]:
    array = tensors[name].copy()
    array.reshape(-1)[-1] = math.nan
    return tensors | {name: array}


BAD: dict[str, tuple[type[IserveError], dict[str, Floats], dict[str, Any], dict[str, Any]]] = {
    "magnitude-missing": (UnsupportedAdapterError, factors({Q0: 4}), {"use_dora": True}, {}),
    "magnitude-short": (CheckpointError, cut(_DORA, _MAGNITUDE), {"use_dora": True}, {}),
    "magnitude-nan": (CheckpointError, with_nan(_DORA, _MAGNITUDE), {"use_dora": True}, {}),
    "magnitude-alone": (
        UnsupportedAdapterError,
        _DORA | {f"{PREFIX}model.layers.1.mlp.up_proj.lora_magnitude_vector": values((24,), 1)},
        {"use_dora": True},
        {},
    ),
    "magnitude-not-said": (UnsupportedAdapterError, _DORA, {}, {}),
    "dora-and-bias": (UnsupportedAdapterError, _DORA | _LORA_BIAS, {"use_dora": True, "lora_bias": True}, BIASED),
    "row-of-zeros": (
        CheckpointError,
        {name: each * 0 for name, each in _DORA.items()},
        {"use_dora": True},
        {"zeros": f"{Q0}.weight"},
    ),
    "lora-bias-missing": (UnsupportedAdapterError, factors({Q0: 4}), {"lora_bias": True}, BIASED),
    "lora-bias-short": (
        CheckpointError,
        cut(_LORA_BIAS, f"{PREFIX}{Q0}.lora_B.bias"),
        {"lora_bias": True},
        BIASED,
    ),
    "lora-bias-of-no-bias": (UnsupportedAdapterError, _LORA_BIAS, {"lora_bias": True}, {}),
    "bias-not-saved": (CheckpointError, factors({Q0: 4}), {"bias": "lora_only"}, BIASED),
    "biases-not-saved": (
        CheckpointError,
        factors({Q0: 4}) | {f"{PREFIX}{Q0}.base_layer.bias": values((HIDDEN,), 1)},
        {"bias": "all"},
        BIASED,
    ),
    "bias-twice": (
        CheckpointError,
        factors({Q0: 4}) | {f"{PREFIX}{Q0}.{name}": values((HIDDEN,), 1) for name in ("bias", "base_layer.bias")},
        {"bias": "all"},
        BIASED,
    ),
    "bias-of-another-module": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | {f"{PREFIX}model.layers.0.self_attn.k_proj.bias": values((KV_WIDTH,), 1)},
        {"bias": "lora_only"},
        BIASED,
    ),
    "bias-unknown": (UnsupportedAdapterError, factors({Q0: 4}), {"bias": "some"}, {}),
    "saved-missing": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | _SAVED_HEAD,
        {"modules_to_save": ["lm_head", "norm"]},
        {},
    ),
    "saved-not-said": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | {f"{PREFIX}{NORM}": values((HIDDEN,), 1)},
        {"modules_to_save": []},
        {},
    ),
    "saved-of-another-shape": (
        CheckpointError,
        factors({Q0: 4}) | {f"{PREFIX}{HEAD}": values((VOCAB + 2, HIDDEN), 1)},
        {"modules_to_save": ["lm_head"]},
        {},
    ),
    "saved-nan": (
        CheckpointError,
        with_nan(factors({Q0: 4}) | _SAVED_HEAD, f"{PREFIX}{HEAD}"),
        {"modules_to_save": ["lm_head"]},
        {},
    ),
    "saved-no-such-tensor": (
        CheckpointError,
        factors({Q0: 4}) | {f"{PREFIX}score.weight": values((2, HIDDEN), 1)},
        {"modules_to_save": ["score"]},
        {},
    ),
    "saved-and-updated": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | {f"{PREFIX}{Q0}.weight": values((HIDDEN, HIDDEN), 1)},
        {"modules_to_save": ["q_proj"]},
        {},
    ),
    "saved-beneath-a-linear": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | {f"{PREFIX}{Q0}.base_layer.weight": values((HIDDEN, HIDDEN), 1)},
        {},
        {},
    ),
    "saved-beneath-of-another-shape": (
        CheckpointError,
        _EMBEDDING | {f"{PREFIX}model.embed_tokens.base_layer.weight": values((VOCAB + 1, HIDDEN), 1)},
        _ALL,
        {},
    ),
    "tied-saved-inputs": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | _SAVED_INPUTS,
        {"modules_to_save": ["embed_tokens"]},
        _TIED,
    ),
    "tied-saved-head": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | _SAVED_HEAD,
        {"modules_to_save": ["lm_head"]},
        _TIED | {"has_head": False},
    ),
    "tied-saved-otherwise": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | _SAVED_HEAD | _SAVED_INPUTS,
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        _TIED,
    ),
    "tied-by-its-tensors": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | _SAVED_INPUTS,
        {"modules_to_save": ["embed_tokens"]},
        {"has_head": False},
    ),
    "rows-of-two-for-one-list": (
        CheckpointError,
        token_rows(values((1, HIDDEN), 1)) | token_rows(values((1, HIDDEN), 1), "lm_head"),
        {"trainable_token_indices": [1]},
        {},
    ),
    "rows-and-update": (
        UnsupportedAdapterError,
        _EMBEDDING | token_rows(values((1, HIDDEN), 1)),
        _ALL | {"trainable_token_indices": [1]},
        {},
    ),
    "rows-of-many-modules": (
        ConfigError,
        token_rows(values((1, HIDDEN), 1)),
        {"trainable_token_indices": {f"module-{number}": [1] for number in range(300)}},
        {},
    ),
    "saved-many": (
        ConfigError,
        factors({Q0: 4}) | _SAVED_HEAD,
        {"modules_to_save": [f"module-{number}" for number in range(300)]},
        {},
    ),
    "bias-beneath-no-update": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | {f"{PREFIX}model.layers.0.self_attn.k_proj.base_layer.bias": values((KV_WIDTH,), 1)},
        {"bias": "all"},
        BIASED,
    ),
    "name-without-end": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | {f"{PREFIX}{'norm.' * 200}weight": values((HIDDEN,), 1)},
        {"modules_to_save": ["norm"]},
        {},
    ),
    "two-kinds-of-update": (
        UnsupportedAdapterError,
        _EMBEDDING
        | {
            f"{PREFIX}model.embed_tokens.lora_A.weight": values((4, HIDDEN), 1),
            f"{PREFIX}model.embed_tokens.lora_B.weight": values((VOCAB, 4), 1),
        },
        _ALL,
        {},
    ),
    "tied-update": (UnsupportedAdapterError, _EMBEDDING, _ALL, _TIED | {"has_head": False}),
    "tied-rows-of-the-head": (
        UnsupportedAdapterError,
        token_rows(values((1, HIDDEN), 1), "lm_head"),
        {"trainable_token_indices": {"lm_head": [1]}},
        _TIED,
    ),
    "rows-for-both-of-an-untied-base": (
        CheckpointError,
        token_rows(values((1, HIDDEN), 1)),
        {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [1]}},
        {},
    ),
    "rows-missing": (UnsupportedAdapterError, factors({Q0: 4}), {"trainable_token_indices": [1]}, {}),
    "rows-of-one-missing": (
        CheckpointError,
        token_rows(values((1, HIDDEN), 1)),
        {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}},
        {},
    ),
    "rows-short": (CheckpointError, token_rows(values((1, HIDDEN), 1)), {"trainable_token_indices": [1, 2]}, {}),
    "rows-narrow": (CheckpointError, token_rows(values((1, HIDDEN - 1), 1)), {"trainable_token_indices": [1]}, {}),
    "rows-beyond": (CheckpointError, token_rows(values((1, HIDDEN), 1)), {"trainable_token_indices": [VOCAB]}, {}),
    "rows-twice": (ConfigError, token_rows(values((2, HIDDEN), 1)), {"trainable_token_indices": [3, 3]}, {}),
    "rows-negative": (ConfigError, token_rows(values((1, HIDDEN), 1)), {"trainable_token_indices": [-1]}, {}),
    "rows-of-text": (ConfigError, token_rows(values((1, HIDDEN), 1)), {"trainable_token_indices": "1"}, {}),
    "rows-and-whole": (
        UnsupportedAdapterError,
        token_rows(values((1, HIDDEN), 1)) | _SAVED_INPUTS,
        {"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]},
        {},
    ),
    "embedding-unpaired": (
        UnsupportedAdapterError,
        without(_EMBEDDING, f"{PREFIX}model.embed_tokens.lora_embedding_B"),
        _ALL,
        {},
    ),
    "embedding-short": (
        CheckpointError,
        cut(_EMBEDDING, f"{PREFIX}model.embed_tokens.lora_embedding_A"),
        _ALL,
        {},
    ),
    "embedding-other-rank": (CheckpointError, _EMBEDDING, _ALL | {"rank_pattern": {"embed_tokens": 8}}, {}),
    "embedding-not-targeted": (CheckpointError, _EMBEDDING, {"target_modules": ["q_proj"]}, {}),
    "embedding-of-another-base": (
        CheckpointError,
        _EMBEDDING | {f"{PREFIX}model.embed_tokens.lora_embedding_A": values((4, VOCAB + 1), 1)},
        _ALL,
        {},
    ),
    "vectors-of-ia3": (
        UnsupportedAdapterError,
        factors({Q0: 4}) | {f"{PREFIX}{Q0}.ia3_l": values((HIDDEN, 1), 1)},
        {},
        {},
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_line_and_nothing_is_left(case: str, tmp_path: Path, golden: Golden) -> None:
    kind, tensors, fields, base = BAD[case]
    fields = {"target_modules": ["q_proj"]} | fields
    zeros = base.get("zeros")
    written = write_base(tmp_path / "base", **{name: value for name, value in base.items() if name != "zeros"})
    if zeros is not None:
        every = base_tensors()
        write_tensors(written / "model.safetensors", every | {zeros: every[zeros] * 0})
    write_adapter(tmp_path / "adapter", tensors, **fields)
    _refused(tmp_path, kind, golden)


def test_what_is_saved_for_both_of_tied_embeddings_is_compared_to_the_last_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint.checkpoint, "CHUNK_BYTES", 64)
    whole = values((VOCAB, HIDDEN), 9)
    other = whole.copy()
    other[-1, -1] += 1
    tensors = factors({Q0: 4}) | {f"{PREFIX}{EMBEDDINGS}": whole, f"{PREFIX}{HEAD}": other}
    adapter = write_adapter(tmp_path / "adapter", tensors, modules_to_save=["embed_tokens", "lm_head"])
    base = write_base(tmp_path / "base", tie_word_embeddings=True)
    with pytest.raises(UnsupportedAdapterError):
        merge_adapter(base, read_adapter(adapter), tmp_path / "out")


@pytest.mark.parametrize("kind", ["saved", "tokens", "ia3", "dora"])
def test_one_that_changes_meanwhile_is_an_error(kind: str, tmp_path: Path) -> None:
    """Tensors of other shapes than those that were compared with the base."""
    base = write_base(tmp_path / "base")
    adapter = read_adapter(write_kind(tmp_path / "adapter", kind))
    file = tmp_path / "adapter" / WEIGHTS_FILE
    checkpoint = Checkpoint.of_file(file)
    end = {"saved": HEAD, "tokens": "trainable_tokens_delta", "ia3": "ia3_l", "dora": "magnitude_vector"}[kind]
    every = {
        name: decode_floats(checkpoint.read(name), entry.dtype).reshape(entry.shape)
        for name, entry in checkpoint.tensors.items()
    }
    write_tensors(file, {name: each[..., None] if name.endswith(end) else each for name, each in every.items()})
    with pytest.raises(CheckpointError, match="changed while"):
        merge_adapter(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _refused(tmp_path: Path, kind: type[IserveError], golden: Golden) -> None:
    with pytest.raises(IserveError) as refusal:
        merge_adapter(tmp_path / "base", read_adapter(tmp_path / "adapter"), tmp_path / "out")
    assert type(refusal.value) is kind
    assert "\n" not in str(refusal.value)
    golden("adapter-errors", str(refusal.value))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter", "base"]


_K0, _D0 = f"{PREFIX}model.layers.0.self_attn.k_proj.ia3_l", f"{PREFIX}model.layers.0.mlp.down_proj.ia3_l"
BAD_IA3: dict[str, tuple[type[IserveError], dict[str, Floats], dict[str, Any]]] = {
    "vector-flat": (CheckpointError, ia3_vectors() | {_K0: values((KV_WIDTH,), 1)}, {}),
    "vector-short": (CheckpointError, cut(ia3_vectors(), _K0), {}),
    "vector-nan": (CheckpointError, with_nan(ia3_vectors(), _D0), {}),
    "inputs-for-outputs": (CheckpointError, ia3_vectors() | {_K0: values((1, HIDDEN), 1)}, {}),
    "not-targeted": (CheckpointError, ia3_vectors(), {"target_modules": ["down_proj"]}),
    "conv1d": (UnsupportedAdapterError, ia3_vectors(), {"fan_in_fan_out": True}),
    "unknown-field": (UnsupportedAdapterError, ia3_vectors(), {"ia3_groups": 2}),
    "other-task": (UnsupportedAdapterError, ia3_vectors(), {"task_type": "SEQ_CLS"}),
    "factors-of-a-lora": (UnsupportedAdapterError, ia3_vectors() | factors({Q0: 4}), {}),
    "no-tensor": (UnsupportedAdapterError, {}, {}),
}


@pytest.mark.parametrize("case", BAD_IA3)
def test_ia3_that_is_wrong_is_one_line_and_nothing_is_left(case: str, tmp_path: Path, golden: Golden) -> None:
    kind, tensors, fields = BAD_IA3[case]
    write_base(tmp_path / "base")
    write_ia3(tmp_path / "adapter", tensors, **fields)
    _refused(tmp_path, kind, golden)


@given(
    name=st.from_regex(
        r"[a-z_.]{1,30}(lora_A|lora_B|ia3_l|base_layer|weight|bias|embed_tokens|lm_head)", fullmatch=True
    ),
    is_ia3=st.booleans(),
)
def test_no_tensor_is_left_out_in_silence(
    name: str, is_ia3: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A tensor more is in the changes of the base, or a reason to refuse the adapter."""
    folder = tmp_path_factory.mktemp("more") / "adapter"
    tensors = (ia3_vectors() if is_ia3 else factors({Q0: 4})) | {f"{PREFIX}{name}": values((4,), 1)}
    write = write_ia3 if is_ia3 else write_adapter
    try:
        adapter = read_adapter(write(folder, tensors))
    except CheckpointError:
        return
    used = {change.saved for change in adapter.changes}
    assert adapter.unsupported or f"{PREFIX}{name}" in used


def test_the_type_of_each_tensor_is_looked_at(tmp_path: Path) -> None:
    folder = write_kind(tmp_path / "adapter", "saved")
    raw = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(raw.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(CheckpointError, match="is of I32"):
        read_adapter(folder)
