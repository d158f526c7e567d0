"""Configurations as text: what cannot be read is refused with what could."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, parse_config


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
    """A document that was written before there was such a field."""
    plain = DeploymentConfig(tp=2, engine="vllm")
    before = to_json(plain).replace(b',"expert_parallel":false', b"")
    assert b"expert" not in before
    assert from_json(before, DeploymentConfig) == plain
    asked = replace(plain, expert_parallel=True)
    assert from_json(to_json(asked), DeploymentConfig) == asked
