"""A tiny model, its config.json alone or its checkpoint, and a hub that can serve it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fingerprint.truncate import generate_dummy
from tests.iserve.models.fake_hub import Hub, serving_hub

TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A directory with only a config.json."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def checkpoint(config_only: Path, tmp_path: Path) -> Path:
    """A directory with weights."""
    generate_dummy(config_only, tmp_path / "tiny", 2)
    return tmp_path / "tiny"


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    with serving_hub() as served:
        yield served
