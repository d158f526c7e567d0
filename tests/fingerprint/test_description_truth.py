"""Descriptions of each text architecture that vLLM lists, against what transformers' classes hold and keep."""

from __future__ import annotations

import pytest

from fingerprint.errors import BadInputError
from fingerprint.families import read_spec
from fingerprint.model_spec import LayerShape, ModelSpec
from tests.fingerprint import family_truths
from tests.fingerprint.family_truths import Held
from tests.golden_words import Golden

description = pytest.importorskip("fingerprint.description")
StoredTensor = pytest.importorskip("fingerprint.checkpoint").StoredTensor

ARCHITECTURES = family_truths.recorded()
ONE_STACK = [a for a in ARCHITECTURES if a != "HrmTextForCausalLM"]  # HRM: two, each run through eight times
REGULAR = [a for a in ONE_STACK if all(layer.regular for layer in family_truths.small(a).kept)]
# A checkpoint of Mistral says a window and not which layers have it; ``fingerprint.families`` has a row for it.
OWN_ROW = {"MistralForCausalLM"}
# transformers saves weights for the experts that do nothing, which its class does not build.
SAVED_OTHERWISE = {"LongcatFlashForCausalLM"}
MULTIMODAL = family_truths.multimodal()
STATE_KNOWN = [
    architecture
    for architecture, held in ((a, family_truths.small(a)) for a in REGULAR + MULTIMODAL)
    if held.vllm_state_bytes is not None or not any(layer.state_bytes for layer in held.kept)
]
# vLLM keeps one indexer key for each few tokens, and the last tokens' in a ring.
COMPRESSED_INDEXER = {
    "Glm5NextForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
}
PUBLIC = list(family_truths.public_models())


def described(architecture: str) -> tuple[ModelSpec, Held]:
    held = family_truths.small(architecture)
    tensors = {name: StoredTensor(dtype, shape) for name, (dtype, shape) in held.tensors.items()}
    return description.describe(held.config, tensors), held


def layers(spec: ModelSpec) -> list[LayerShape]:
    """Return each layer's shape, where all are alike too."""
    if spec.layer_shapes:
        return [spec.layer_shapes[index] for index in spec.layer_shape_indexes]
    alike = LayerShape(
        mixer="attention",
        params=spec.layer_params,
        linear_params=spec.layer_linear_params,
        expert_params=spec.layer_expert_params,
        kv_elements=spec.kv_elements,
    )
    return [alike] * spec.num_layers


@pytest.mark.parametrize("architecture", ONE_STACK)
def test_parameters_of_a_checkpoint_are_the_class_s(architecture: str) -> None:
    spec, held = described(architecture)
    assert spec.num_params == held.parameters


@pytest.mark.parametrize("architecture", ONE_STACK + MULTIMODAL)
def test_parameters_of_each_layer_are_the_class_s(architecture: str) -> None:
    spec, held = described(architecture)
    assert [layer.params for layer in layers(spec)] == list(held.layer_parameters)


@pytest.mark.parametrize("architecture", [a for a in REGULAR + MULTIMODAL if a not in COMPRESSED_INDEXER])
def test_kv_elements_of_each_layer_are_those_that_grow_in_a_forward(architecture: str) -> None:
    """Hold latents too, and indexer keys as vLLM keeps them (of MiniCPM3 it keeps K and V, not the latent)."""
    spec, held = described(architecture)
    caches = len(held.kept) // len(held.layer_parameters)  # LongCat: two attentions in a layer
    each = [layer.engine_elements for layer in held.kept]
    kept = [sum(each[i : i + caches]) for i in range(0, len(each), caches)]
    assert [layer.kv_elements for layer in layers(spec)] == kept


@pytest.mark.parametrize("architecture", [a for a in REGULAR + MULTIMODAL if a not in OWN_ROW])
def test_windows_are_those_that_a_forward_keeps(architecture: str) -> None:
    spec, held = described(architecture)
    kept = held.kept[:: len(held.kept) // len(held.layer_parameters)]
    own = [index for index, layer in enumerate(kept) if layer.kv_elements]
    assert [spec.windows[index] for index in own] == [kept[index].window for index in own]


@pytest.mark.parametrize("architecture", STATE_KNOWN)
def test_state_bytes_of_each_layer_are_vllm_s(architecture: str) -> None:
    """Hold against vLLM's figure: transformers keeps one input more of a convolution, and other types."""
    spec, held = described(architecture)
    assert [layer.state_bytes for layer in layers(spec)] == [
        held.vllm_state_bytes if layer.state_bytes else 0 for layer in held.kept[: spec.num_layers]
    ]


def test_two_stacks_are_refused_as_what_they_are(golden: Golden) -> None:
    with golden.raises("fingerprint", BadInputError):
        described("HrmTextForCausalLM")


@pytest.mark.parametrize("architecture", ONE_STACK)
def test_parameters_of_a_config_alone_are_the_class_s(architecture: str) -> None:
    held = family_truths.default(architecture)
    assert description.described_config(held.config).num_params == held.parameters


@pytest.mark.parametrize("architecture", [a for a in REGULAR if a not in OWN_ROW | SAVED_OTHERWISE])
def test_a_config_alone_and_its_checkpoint_are_described_alike(architecture: str) -> None:
    spec, held = described(architecture)
    alone = description.described_config(held.config)
    assert (layers(alone), alone.windows) == (layers(spec), spec.windows)


@pytest.mark.parametrize("model", PUBLIC)
def test_public_models_have_the_published_parameters(model: str) -> None:
    config = family_truths.public_models()[model]["config"]
    assert read_spec(config).num_params == family_truths.published_parameters(model)


@pytest.mark.parametrize("model", PUBLIC)
def test_public_models_keep_what_their_class_keeps(model: str) -> None:
    held = family_truths.public(model)
    spec = read_spec(held.config)
    assert [layer.kv_elements for layer in layers(spec)] == [layer.engine_elements for layer in held.kept]
    own = [index for index, layer in enumerate(held.kept) if layer.kv_elements]
    assert [spec.windows[index] for index in own] == [held.kept[index].window for index in own]
    state = [held.vllm_state_bytes if layer.state_bytes else 0 for layer in held.kept]
    assert [layer.state_bytes for layer in layers(spec)] == state
