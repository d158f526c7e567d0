"""The recorded truths agree with themselves: sums, checkpoints, and one law of what grows with a sequence."""

from __future__ import annotations

import math

import pytest

from tests.fingerprint import family_truths

RECORDED = family_truths.recorded()
MULTIMODAL = family_truths.multimodal()


def test_every_text_architecture_of_vllm_is_recorded_or_has_a_reason() -> None:
    listed = [record["listed"] for record in family_truths.document()["architectures"].values()]
    assert listed.count("vLLM's own") == 124
    assert listed.count("transformers backend") == 20
    assert len(RECORDED) == 103
    assert all("no class" in reason for reason in family_truths.missing().values())
    assert len(family_truths.document()["multimodal"]) == 127 + 3


def test_deepseek_v3_has_the_published_count() -> None:
    assert family_truths.default("DeepseekV3ForCausalLM").parameters == 671_026_419_200


@pytest.mark.parametrize("architecture", RECORDED + MULTIMODAL)
def test_layers_and_the_rest_are_the_whole(architecture: str) -> None:
    for held in (family_truths.default(architecture), family_truths.small(architecture)):
        assert sum(held.layer_parameters) + sum(held.other_parameters.values()) == held.parameters


@pytest.mark.parametrize("architecture", RECORDED + MULTIMODAL)
def test_checkpoints_hold_what_the_class_holds(architecture: str) -> None:
    small = family_truths.small(architecture)
    assert sum(math.prod(shape) for _, shape in small.tensors.values()) == small.parameters


@pytest.mark.parametrize("architecture", RECORDED + MULTIMODAL)
def test_every_sequence_is_kept_somewhere(architecture: str) -> None:
    kept = family_truths.small(architecture).kept
    assert any(layer.kv_elements or layer.state_bytes for layer in kept)
    assert all(layer.window in (None, 16) for layer in kept)


def test_forty_public_models_of_25_families_have_sources() -> None:
    models = family_truths.public_models().values()
    assert len(models) >= 40
    assert len({entry["config"]["model_type"] for entry in models}) >= 25
    assert all(entry["config_source"] and entry["published_source"] for entry in models)


@pytest.mark.parametrize("model", family_truths.public_models())
def test_published_counts_are_those_of_the_class(model: str) -> None:
    held = family_truths.public(model)
    assert family_truths.published_parameters(model) == held.parameters
    assert held.config == family_truths.public_models()[model]["config"]


def test_draft_layers_are_a_last_layer_and_what_joins_it() -> None:
    """Explain the difference to the published count: a copy of the last layer, 2 x hidden^2 and 3 norms."""
    models = family_truths.public_models()
    for model, entry in models.items():
        draft = [size for name, size in entry.get("published_beyond_the_model", {}).items() if "draft" in name]
        hidden, last = entry["config"]["hidden_size"], family_truths.public(model).layer_parameters[-1]
        assert draft in ([], [last + 2 * hidden**2 + 3 * hidden])
