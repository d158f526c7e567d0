"""Families for other tasks than text are refused as what they are, without advice that cannot help."""

from __future__ import annotations

from pathlib import Path

import pytest

from fingerprint.errors import UnsupportedModelError
from fingerprint.families import load_spec, read_spec
from fingerprint.other_tasks import known_task, task_by_transformers
from tests.fingerprint.small_checkpoints import TEXT_CONFIG, text_shapes, write_checkpoint
from tests.golden_words import Golden

FAMILIES = ("clip", "siglip", "vit", "bert", "detr", "sam", "wav2vec2", "vits", "patchtst")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_well_known_family_has_its_task(family: str, golden: Golden) -> None:
    golden("fingerprint", known_task(family) or "")


def test_an_unknown_family_has_none() -> None:
    assert known_task("no-such-family") is None


@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "bert"), "no-such-family"])
def test_transformers_tables_agree_with_the_list(family: str) -> None:
    """BERT is left out: transformers has a class of it that generates text, which is not served."""
    pytest.importorskip("transformers")
    assert task_by_transformers(family) == known_task(family)


def test_no_family_that_transformers_has_no_class_for_is_asked_for_its_tensors() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    generating = {
        family
        for table in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
        for family in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES")
    }
    others = sorted(set(CONFIG_MAPPING_NAMES) - generating)
    assert {"clip", "vit", "siglip", "hubert", "depth_anything"} <= set(others)
    for family in others:
        with pytest.raises(UnsupportedModelError) as caught:
            read_spec({"model_type": family, "architectures": ["SomeModel"]})
        assert family in str(caught.value)
        assert "safetensors" not in str(caught.value)


@pytest.mark.parametrize("family", ["bert", "clip", "fnet", "groupvit"])
def test_its_tensors_do_not_make_it_a_model_of_text(family: str, tmp_path: Path) -> None:
    """Tensors alone would describe it: a stack of layers next to an embedding."""
    shapes = text_shapes() | {"lm_head.weight": (1000, 256)}
    described = {**TEXT_CONFIG, "model_type": "some-family", "architectures": ["SomeModel"]}
    assert load_spec(write_checkpoint(tmp_path / "text", described, shapes)).num_layers == 2
    with pytest.raises(UnsupportedModelError):
        load_spec(write_checkpoint(tmp_path / family, described | {"model_type": family}, shapes))
