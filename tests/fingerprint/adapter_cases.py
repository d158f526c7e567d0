"""Adapters whose merge by PEFT is recorded: ranks by module, and fields of their configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fingerprint.small_adapters import module_names

RECORD = Path(__file__).parent / "recorded" / "adapter_merges.json"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class AdapterCase:
    ranks: dict[str, int]
    config: dict[str, Any] = field(default_factory=dict)
    base_dtype: str = "F32"
    adapter_dtype: str = "F32"


CASES: dict[str, AdapterCase] = {
    "plain": AdapterCase(ranks=dict.fromkeys(module_names(["q_proj", "v_proj"]), 4)),
    "rank-stabilized": AdapterCase(
        ranks=dict.fromkeys(module_names(["down_proj"]), 3),
        config={"r": 3, "lora_alpha": 2, "use_rslora": True, "target_modules": ["down_proj"]},
    ),
    "patterns": AdapterCase(
        ranks={
            **dict.fromkeys(module_names(_ATTENTION, [0]), 2),
            **dict.fromkeys(module_names(["q_proj"], [1]), 6),
            **dict.fromkeys(module_names(["k_proj", "v_proj", "o_proj"], [1]), 4),
        },
        config={
            "rank_pattern": {r"layers\.0\..*_proj": 2, "q_proj": 6},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 1, r".*\.[kv]_proj": 20, "^o_proj": 99},
            "target_modules": list(_ATTENTION),
        },
    ),
    "one-layer": AdapterCase(
        ranks=dict.fromkeys(module_names(["gate_proj"], [1]), 4),
        config={"layers_to_transform": [1], "target_modules": ["gate_proj"]},
    ),
    "bfloat16": AdapterCase(
        ranks=dict.fromkeys(module_names(["q_proj", "v_proj"]), 4), base_dtype="BF16", adapter_dtype="BF16"
    ),
}
# Expressions and names for which PEFT's choice is recorded.
PATTERN_KEYS = [
    [],
    ["q_proj"],
    ["proj"],
    ["layers.1.self_attn.q_proj", "q_proj"],
    ["q_proj", "layers.1.self_attn.q_proj"],
    ["^model.layers.0.self_attn.q_proj"],
    ["^q_proj", "self_attn.(q|v)_proj"],
    [r"layers\.\d+\..*_proj"],
    [r".*\.1\..*", "v_proj$"],
    ["q.proj"],
    ["model.layers.[0-1].mlp.down_proj", "down_proj|q_proj"],
]
PATTERN_NAMES = [*module_names(["q_proj", "v_proj", "down_proj"]), "q_proj", "xq_proj", "a.q-proj", "lm_head"]


def recorded() -> dict[str, Any]:
    """Return what ``record_adapter_merges`` wrote."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found
