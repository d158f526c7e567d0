"""transformers' classes as they are read in its sources, held against the classes themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from daemon.sources.transformers_classes import MAPPINGS_FILE, read_transformers
from daemon.torch_engine.model import capabilities
from daemon.torch_engine.model.architectures import architectures_of
from fingerprint.errors import EngineError

PACKAGE = Path(transformers.__file__).parent
READ = read_transformers(PACKAGE, transformers.__version__)
AUTO = transformers.models.auto.modeling_auto


def test_every_class_that_generates_text_is_read():
    tables = (
        AUTO.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        AUTO.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        AUTO.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    mapped = {
        (family, name)
        for table in tables
        for family, names in table.items()
        for name in ([names] if isinstance(names, str) else names)
    }
    assert {(family, name) for name, found in READ.classes.items() for family in found.families} == mapped
    only_text = set(AUTO.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - {
        name for table in tables[1:] for name in table.values()
    }
    assert {name for name, found in READ.classes.items() if not found.multimodal} == only_text


@pytest.mark.slow
def test_each_class_says_of_itself_what_was_read():
    for name, found in READ.classes.items():
        real = getattr(transformers, name)
        assert found.takes_attention == bool(real.is_backend_compatible()), name
        assert found.sets_attention == real._can_set_attn_implementation(), name
        assert found.stateful == bool(real._is_stateful), name
        if not found.multimodal:  # the plans of parts are merged when a model is made
            plan = getattr(real.config_class, "base_model_tp_plan", None) or {}
            assert found.tp_plan == any(".*." in module for module in plan), name


def test_the_embedded_engine_has_the_classes_of_its_families_and_a_reason_for_each_other():
    table = architectures_of(READ)
    for name, found in READ.classes.items():
        assert (name in table.listed) == bool(capabilities.FAMILIES & set(found.families)), name
        assert (table.refusal(name) is None) == (name in table.listed), name
    served = {family for name in table.listed for family in READ.classes[name].families}
    assert served >= capabilities.FAMILIES
    for family in capabilities.REFUSED:
        (name,) = (one for one, found in READ.classes.items() if family in found.families)
        assert table.refusal(name) == capabilities.REFUSED[family]


@pytest.mark.parametrize(
    "text", [None, "", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = 1\n", "not python(", "\0"], ids=repr
)
def test_a_package_without_its_tables_is_an_error_of_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / MAPPINGS_FILE).parent.mkdir(parents=True)
        (tmp_path / MAPPINGS_FILE).write_text(text)
    with pytest.raises(EngineError, match="modeling_auto") as caught:
        read_transformers(tmp_path, "1")
    assert "\n" not in str(caught.value)
