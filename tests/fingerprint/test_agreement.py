"""Agreement of config.json and headers, of a family that has a row: an error of the two names both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fingerprint.checkpoint import StoredTensor
from fingerprint.errors import CheckpointError
from fingerprint.families import load_spec
from tests.fingerprint.small_checkpoints import HEAD, HIDDEN, TEXT_CONFIG, Shapes, text_shapes, write_checkpoint
from tests.golden_words import Golden

CONFIG = {**TEXT_CONFIG, "architectures": ["LlamaForCausalLM"]}
ALL = {**text_shapes(), **HEAD}


def of_layer(index: int) -> Shapes:
    return {name.replace("layers.0.", f"layers.{index}."): t for name, t in ALL.items() if ".layers.0." in name}


@pytest.mark.parametrize(
    ("changes", "tensors"),
    [
        ({"num_hidden_layers": 3}, ALL),
        ({"num_hidden_layers": 1}, ALL),
        ({}, {**ALL, **of_layer(9)}),
        ({"hidden_size": 512}, ALL),
        ({"vocab_size": 1001}, ALL),
        ({"intermediate_size": 999}, ALL),
        ({"num_key_value_heads": 2}, ALL),
        ({}, {**ALL, "model.layers.1.mlp.up_proj.weight": (7, HIDDEN)}),
    ],
)
def test_what_differs_is_named_with_both(
    tmp_path: Path, changes: dict[str, Any], tensors: Shapes, golden: Golden
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_spec(write_checkpoint(tmp_path / "model", CONFIG | changes, tensors))
    golden("fingerprint", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tensors",
    [
        ALL,
        text_shapes(),  # the head is tied, whatever config.json says
        {**ALL, "model.layers.0.self_attn.rotary_emb.inv_freq": (32,), "score.weight": (2, HIDDEN)},
        {f"inner.{name}": shape for name, shape in of_layer(7).items()},  # named otherwise
    ],
)
def test_what_agrees_or_is_named_otherwise_is_described(tmp_path: Path, tensors: Shapes) -> None:
    assert load_spec(write_checkpoint(tmp_path / "model", CONFIG, tensors)).num_layers == 2


def test_files_that_cannot_be_read_are_for_the_deployment_to_judge(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", CONFIG, ALL)
    (folder / "model.safetensors").write_bytes(b"half a file")
    assert load_spec(folder).num_layers == 2


def test_packed_weights_that_config_json_does_not_tell_of_are_not_compared(tmp_path: Path) -> None:
    """ModelOpt's 4-bit checkpoints say so in hf_quant_config.json alone."""
    packed = {f"model.layers.{i}.mlp.up_proj.weight": ("U8", (7, HIDDEN)) for i in range(2)}
    whole = {name: ("BF16", shape) for name, shape in ALL.items()}
    write_checkpoint(tmp_path / "model", CONFIG, ALL)
    tensors = {name: StoredTensor(dtype, shape) for name, (dtype, shape) in (whole | packed).items()}
    assert load_spec(tmp_path / "model", tensors).num_layers == 2
