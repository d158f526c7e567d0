"""Contexts of models, scaled ones too, against vLLM 0.33.0's ``_get_and_verify_max_len``.

Its answers were recorded by running that function of its source on transformers 5's configs of these fields.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fingerprint.errors import ConfigError
from fingerprint.families import load_spec, read_blueprint, read_spec
from tests.fingerprint.conftest import SMALL_CONFIGS
from tests.fingerprint.test_description import CONFIG, GROUPED, MLP, NORMS, model
from tests.fingerprint.test_general_families import SMALL as WITHOUT_A_ROW

LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BY_LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# What config.json gives, and vLLM's max_model_len where max_position_embeddings is 4096.
RECORDED: list[tuple[dict[str, Any], int]] = [
    ({}, 4096),
    ({"max_sequence_length": 2048}, 2048),
    ({"max_sequence_length": 8192}, 4096),
    ({"seq_length": 2048, "max_seq_len": 1024}, 1024),
    ({"max_seq_length": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
    ({"model_max_length": 131072}, 131072),
    ({"model_max_length": 2048, "seq_length": 1024}, 2048),
    ({"rope_scaling": None}, 4096),
    ({"rope_scaling": {}}, 4096),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, 10240),
    ({"rope_scaling": {"type": "linear", "factor": 1.0001}}, 4096),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, 2048),
    ({"rope_scaling": {"type": "linear", "factor": None}}, 4096),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 8192),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, 8192),
    ({"rope_scaling": {"factor": 8.0}}, 32768),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12], "factor": 2.0}}, 8192),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 4096),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
    ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}}, 4096),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}}, 12288),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": LINEAR}, 8192),
    ({"rope_parameters": LINEAR, "rope_scaling": {}}, 8192),
]


def small(name: str, **fields: Any) -> dict[str, Any]:
    return {**SMALL_CONFIGS[name], "max_position_embeddings": 4096, **fields}


@pytest.mark.parametrize(("fields", "context"), RECORDED)
def test_the_context_of_a_llama_is_vllms(fields: dict[str, Any], context: int) -> None:
    assert read_spec(small("llama", **fields)).max_context_tokens == context


@pytest.mark.parametrize(
    ("name", "fields", "context"),
    [
        pytest.param("gemma2", {"rope_scaling": LINEAR | {"factor": 8.0}}, 32768, id="gemma2"),
        pytest.param("gemma3", {"rope_scaling": LINEAR | {"factor": 8.0}}, 4096, id="gemma3"),
        pytest.param("gemma3", {"rope_parameters": BY_LAYERS}, 4096, id="gemma3 by layers"),
        pytest.param("falcon-40b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192, id="falcon"),
        pytest.param("gpt-neox", {"rope_scaling": LINEAR}, 8192, id="gpt_neox"),
    ],
)
def test_the_context_of_a_family_is_vllms(name: str, fields: dict[str, Any], context: int) -> None:
    assert read_spec(small(name, **fields)).max_context_tokens == context


def test_a_family_without_a_row_is_scaled_once() -> None:
    """Described by transformers' class, and as it is cut."""
    config = WITHOUT_A_ROW["stablelm"] | {"max_position_embeddings": 4096, "rope_scaling": LINEAR}
    assert read_spec(config).max_context_tokens == 8192
    assert read_blueprint(config).spec.max_context_tokens == 8192


@pytest.mark.parametrize("left_out", [(), ("max_position_embeddings",)])
def test_the_text_of_a_multimodal_model_is_scaled_once(left_out: tuple[str, ...], tmp_path: Path) -> None:
    """Given or left to its class, of which 2,048 tokens are the default."""
    text = CONFIG | {"model_type": "llama", "num_hidden_layers": 2, "n_routed_experts": 0, "rope_scaling": LINEAR}
    text = {key: value for key, value in text.items() if key not in (*left_out, "architectures")}
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
        )
    )
    spec = load_spec(tmp_path, model(*[GROUPED | NORMS | MLP] * 2))
    assert spec.max_context_tokens == (4096 if left_out else 8192)


@pytest.mark.parametrize("factor", ["4", True, [2.0], -1.0, 0, 1e300, 10**400, math.inf, math.nan])
def test_a_factor_out_of_bounds_is_one_line(factor: object) -> None:
    with pytest.raises(ConfigError, match=r"^the factor of [^\n]{1,250}$"):
        read_spec(small("llama", rope_scaling={"type": "linear", "factor": factor}))


@pytest.mark.parametrize("kind", [[], {}, None, 4, True])
def test_a_type_that_is_no_name_is_one_that_vllm_does_not_know(kind: object) -> None:
    scaling = {"rope_type": kind, "factor": 2.0}
    assert read_spec(small("llama", rope_scaling=scaling)).max_context_tokens == 8192


@pytest.mark.parametrize("scaling", ["linear", [], 4.0, {"full_attention": None}])
def test_a_scaling_that_is_no_table_scales_nothing(scaling: object) -> None:
    assert read_spec(small("llama", rope_scaling=scaling)).max_context_tokens == 4096
