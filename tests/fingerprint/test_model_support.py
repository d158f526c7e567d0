"""The record behind docs/models.md is what the code, transformers and vLLM's list say today."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import transformers

from daemon.engines.vllm.architectures import recorded_registry as listed_by_vllm
from tests.fingerprint.record_model_support import RECORD, support_of

# Of each outcome: a row of its own, layers of several kinds, no order, towers, speech, two stacks, no class.
SOME = (
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Zamba2ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration",
    "VibeVoiceAsrForConditionalGeneration",
    "HrmTextForCausalLM",
    "OrionForCausalLM",
)


@cache
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def support(recorded: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recorded.items() if key not in ("multimodal", "by_transformers")}


def needs_the_recorded_transformers() -> None:
    if transformers.__version__ != record()["transformers"]:
        pytest.skip(f"recorded with transformers {record()['transformers']}, {transformers.__version__} is here")


def test_every_architecture_that_vllm_lists_is_recorded() -> None:
    registry = listed_by_vllm()
    assert record()["vllm"] == registry.version
    assert {
        name: (one["multimodal"], one["by_transformers"]) for name, one in record()["architectures"].items()
    } == {name: (one.multimodal, one.by_transformers) for name, one in registry.text.items()}


@pytest.mark.parametrize("architecture", SOME)
def test_some_are_supported_as_recorded(architecture: str) -> None:
    needs_the_recorded_transformers()
    assert support_of(architecture) == support(record()["architectures"][architecture])


@pytest.mark.long
def test_all_are_supported_as_recorded() -> None:
    needs_the_recorded_transformers()
    recorded = record()["architectures"]
    assert {name: support_of(name) for name in recorded} == {name: support(recorded[name]) for name in recorded}
