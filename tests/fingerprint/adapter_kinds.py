"""Adapters that are more than a plain LoRA, as PEFT saves and merges them: fields, bases, and the record."""

from __future__ import annotations

import base64
import json
import lzma
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fingerprint.float_bytes import decode_floats
from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from tests.fingerprint.small_adapters import BIASED

RECORD = Path(__file__).parent / "recorded" / "adapter_kinds.json.xz"
TIED: dict[str, Any] = {"tie_word_embeddings": True, "has_head": False}


@dataclass(frozen=True, kw_only=True)
class KindCase:
    config: dict[str, Any]  # of PEFT's LoraConfig or IA3Config
    base: dict[str, Any] = field(default_factory=dict)  # of ``write_base``
    dtype: str = "F32"  # of the base
    is_ia3: bool = False
    kinds: tuple[str, ...]  # that are named to the user


def _lora(**fields: Any) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | fields


_EVERY_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_IA3 = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
CASES: dict[str, KindCase] = {
    "dora": KindCase(config=_lora(use_dora=True), kinds=("DoRA",)),
    "dora-bfloat16": KindCase(config=_lora(use_dora=True), dtype="BF16", kinds=("DoRA",)),
    "dora-patterns": KindCase(
        config=_lora(
            use_dora=True,
            use_rslora=True,
            target_modules=_EVERY_LINEAR,
            rank_pattern={"down_proj": 2},
            alpha_pattern={"o_proj": 3},
        ),
        base=BIASED,
        kinds=("DoRA",),
    ),
    "dora-vocabulary": KindCase(
        config=_lora(use_dora=True, target_modules=["q_proj", "embed_tokens", "lm_head"]),
        kinds=("DoRA", "embeddings", "whole modules"),
    ),
    "vocabulary": KindCase(
        config=_lora(
            target_modules=["q_proj", "embed_tokens", "lm_head"],
            rank_pattern={"embed_tokens": 2},
            alpha_pattern={"embed_tokens": 3, "lm_head": 5},
        ),
        kinds=("embeddings", "whole modules"),
    ),
    "lora-bias": KindCase(config=_lora(lora_bias=True), base=BIASED, kinds=("biases of updates",)),
    "bias-all": KindCase(config=_lora(bias="all"), base=BIASED, kinds=("biases of the base",)),
    "bias-lora-only": KindCase(config=_lora(bias="lora_only"), base=BIASED, kinds=("biases of the base",)),
    "both-biases": KindCase(
        config=_lora(bias="all", lora_bias=True), base=BIASED, kinds=("biases of updates", "biases of the base")
    ),
    "saved": KindCase(config=_lora(modules_to_save=["embed_tokens", "lm_head", "norm"]), kinds=("whole modules",)),
    "saved-block": KindCase(config=_lora(modules_to_save=["layers.1.mlp"]), kinds=("whole modules",)),
    "tokens": KindCase(config=_lora(trainable_token_indices=[7, 30, 0]), kinds=("trained tokens",)),
    "tokens-tied": KindCase(
        config=_lora(trainable_token_indices=[7, 30, 0]), base=TIED, kinds=("trained tokens",)
    ),
    "tokens-named-tied": KindCase(
        config=_lora(trainable_token_indices={"embed_tokens": [5, 3], "lm_head": [5, 3]}),
        base=TIED,
        kinds=("trained tokens",),
    ),
    "tokens-of-both": KindCase(
        config=_lora(trainable_token_indices={"embed_tokens": [5, 3], "lm_head": [31]}), kinds=("trained tokens",)
    ),
    "ia3": KindCase(config=_IA3, is_ia3=True, kinds=("scaling",)),
    "ia3-bfloat16": KindCase(config=_IA3, is_ia3=True, dtype="BF16", kinds=("scaling",)),
    "ia3-biases-and-saved": KindCase(
        config=_IA3 | {"modules_to_save": ["lm_head"]},
        base=BIASED,
        is_ia3=True,
        kinds=("scaling", "whole modules"),
    ),
    "combined": KindCase(
        config=_lora(
            use_dora=True, bias="all", modules_to_save=["lm_head", "model.norm"], trainable_token_indices=[1, 2]
        ),
        base=BIASED,
        kinds=("whole modules", "trained tokens", "DoRA", "biases of the base"),
    ),
}


def encoded(values: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()


def write_record(found: dict[str, Any]) -> None:
    RECORD.write_bytes(lzma.compress(json.dumps(found, indent=1).encode(), preset=9))


def recorded(case: str) -> dict[str, Any]:
    """Return what ``record_adapter_kinds`` wrote of a case."""
    found: dict[str, Any] = json.loads(lzma.decompress(RECORD.read_bytes()))
    return dict(found["cases"][case])


def write_kind(folder: Path, case: str) -> Path:
    """Write the adapter that PEFT saved, in its bytes."""
    found = recorded(case)
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(found["config"]))
    outputs = []
    for name, (dtype, shape, text) in found["adapter"].items():
        raw = base64.b64decode(text)
        outputs.append(OutputTensor(name, dtype, tuple(shape), len(raw), lambda raw=raw: [raw]))  # type: ignore[misc]
    write_safetensors(folder / WEIGHTS_FILE, outputs)
    return folder


def merged_by_peft(case: str) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tensors that PEFT's merge changed, as it stored them, flat."""
    found = recorded(case)["merged"]
    return {name: decode_floats(base64.b64decode(text), "F32") for name, text in found.items()}
