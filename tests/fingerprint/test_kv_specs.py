"""Planned sizes of what each layer keeps, against those of vLLM's own classes (``record_kv_specs``)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fingerprint.families import load_spec

RECORDED = Path(__file__).parent / "recorded"
MODELS: dict[str, Any] = json.loads((RECORDED / "public_models.json").read_text())["models"]
SPECS: dict[str, Any] = json.loads((RECORDED / "kv_specs.json").read_text())


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_layer_keeps_what_vllm_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    spec = load_spec(tmp_path)
    planned: Counter[tuple[float, int, int | None]] = Counter()
    for kind in spec.kinds:
        token_bytes = 2 * kind.kv_share * spec.kv_elements
        state_bytes = kind.shape.state_bytes if kind.shape else 0
        if token_bytes or state_bytes:
            planned[token_bytes, state_bytes, kind.window] += kind.count
    said: Counter[tuple[float, int, int | None]] = Counter()
    for kind in SPECS[name]["kinds"]:
        said[kind["token_bytes"], kind["state_bytes"], kind["window"]] += kind["layers"]
    assert planned == said


def test_most_public_models_are_compared() -> None:
    assert len(SPECS) >= 45
    assert {one["vllm"] for one in SPECS.values()} == {"0.33.0"}
