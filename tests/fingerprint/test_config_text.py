"""Configurations as text: what cannot be read is refused with what could."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, parse_config
from fingerprint.errors import ConfigError
from tests.golden_words import Golden


def test_what_is_left_out_takes_its_default() -> None:
    assert parse_config("", engine="vllm") == DeploymentConfig(engine="vllm")
    asked = DeploymentConfig(2, 3, WeightFormat.INT4, KvFormat.FP8, Pruning.WANDA_2_4, "vllm")
    assert parse_config(str(asked), engine="vllm") == asked


def test_experts_that_are_divided_as_wholes_have_a_name() -> None:
    asked = DeploymentConfig(tp=2, engine="vllm", expert_parallel=True)
    assert str(asked).endswith(",experts=parallel")
    assert parse_config(str(asked), engine="vllm") == asked
    split = asked.without_expert_parallel
    assert "experts" not in str(split)
    assert parse_config(f"{split},experts=tensor", engine="vllm") == split == parse_config("tp=2", engine="vllm")


def test_a_configuration_of_before_has_its_matrices_divided() -> None:
    """A configuration without it is written and read as before there was such a field."""
    plain = DeploymentConfig(tp=2, engine="vllm")
    written = to_json(plain)
    assert b"expert" not in written
    assert from_json(written, DeploymentConfig) == plain
    asked = replace(plain, expert_parallel=True)
    assert from_json(to_json(asked), DeploymentConfig) == asked


@pytest.mark.parametrize("text", [',"expert_parallel":false', '\\,"expert_parallel":false,', "expert_parallel"])
def test_no_text_is_taken_for_the_field(text: str) -> None:
    asked = DeploymentConfig(engine=text)
    assert from_json(to_json(asked), DeploymentConfig) == asked
    assert from_json(to_json([text, text]), list[str]) == [text, text]


def test_one_gpu_has_no_experts_to_divide(golden: Golden) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config("experts=parallel", engine="vllm")
    golden("fingerprint", str(refused.value))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "tp=2,weights=fp4",
            "weights='fp4' is not one of 16bit, int8, int4, gptq4, fp8, stored; did you mean fp8?",
        ),
        ("kv=potato", "kv='potato' is not one of 16bit, int8, fp8"),
        ("pruning=wanda2:4", "llm-pruner-25; did you mean wanda-2:4?"),
        ("pp=two", "pp must be a whole number, got 'two'"),
        ("tp=2,experts=paralel", "experts='paralel' is not one of tensor, parallel; did you mean parallel?"),
        ("tp", "'tp' is not one of tp=, pp="),
    ],
)
def test_an_unknown_value_is_refused_with_the_choices(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(said)}"):
        parse_config(text, engine="torch")
