"""Configurations as text: what cannot be read is refused with what could."""

from __future__ import annotations

import re

import pytest

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, parse_config
from fingerprint.errors import ConfigError


def test_what_is_left_out_takes_its_default() -> None:
    assert parse_config("", engine="vllm") == DeploymentConfig(engine="vllm")
    asked = DeploymentConfig(2, 3, WeightFormat.INT4, KvFormat.FP8, Pruning.WANDA_2_4, "vllm")
    assert parse_config(str(asked), engine="vllm") == asked


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
        ("tp", "'tp' is not one of tp=, pp="),
    ],
)
def test_an_unknown_value_is_refused_with_the_choices(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(said)}"):
        parse_config(text, engine="torch")
