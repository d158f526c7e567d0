"""The recorded truths agree with themselves: sums, checkpoints, and one law of what grows with a sequence."""

from __future__ import annotations

import math

import pytest

from tests.fingerprint import family_truths

RECORDED = family_truths.recorded()


def test_every_text_architecture_of_vllm_is_recorded_or_has_a_reason() -> None:
    listed = [record["listed"] for record in family_truths.document()["architectures"].values()]
    assert listed.count("vLLM's own") == 124
    assert listed.count("transformers backend") == 20
    assert len(RECORDED) == 102
    assert all("no class" in reason for reason in family_truths.missing().values())


def test_deepseek_v3_has_the_published_count() -> None:
    assert family_truths.default("DeepseekV3ForCausalLM").parameters == 671_026_419_200


@pytest.mark.parametrize("architecture", RECORDED)
def test_layers_and_the_rest_are_the_whole(architecture: str) -> None:
    for held in (family_truths.default(architecture), family_truths.small(architecture)):
        assert sum(held.layer_parameters) + sum(held.other_parameters.values()) == held.parameters


@pytest.mark.parametrize("architecture", RECORDED)
def test_checkpoints_hold_what_the_class_holds(architecture: str) -> None:
    small = family_truths.small(architecture)
    assert sum(math.prod(shape) for _, shape in small.tensors.values()) == small.parameters


@pytest.mark.parametrize("architecture", RECORDED)
def test_every_sequence_is_kept_somewhere(architecture: str) -> None:
    kept = family_truths.small(architecture).kept
    assert any(layer.kv_elements or layer.state_bytes for layer in kept)
    assert all(layer.window in (None, 16) for layer in kept)
