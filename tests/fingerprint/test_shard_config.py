"""Config.json of one tensor-parallel rank: its parameters, and what cannot be written."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from fingerprint.errors import BadInputError, ConfigError, UnsupportedModelError
from fingerprint.families import FAMILIES, load_spec, read_blueprint, read_spec
from fingerprint.shard_config import refuses_shards, shard_config
from fingerprint.truncate import generate_shape
from tests.fingerprint.conftest import SMALL_CONFIGS
from tests.fingerprint.test_families import LLAMA_7B, NOT_CONFIG_KEYS, PUBLISHED, on_meta
from tests.golden_words import Golden

# Every family of the table, small: what its config has beyond the sizes; of a family that is not listed, what the
# config that the conftest tries has.
SMALL: dict[str, dict[str, Any]] = {
    **{config["model_type"]: config for config in reversed(SMALL_CONFIGS.values())},
    "llama": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 64},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True},
    "qwen2_moe": {"num_key_value_heads": 2},
    "qwen3_moe": {"num_key_value_heads": 4, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 32, "sliding_window": 64},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64},
    "gpt_oss": {"num_key_value_heads": 4, "head_dim": 32, "num_local_experts": 4},
    "phi3": {"pad_token_id": 1000, "eos_token_id": [7, 1000]},
    "gpt_neox": {},
    "opt": {},
    "falcon": {"multi_query": True},
    "gptj": {},
}
# The tensors of which every rank holds all: norms, the router, and the biases that are added once, after the sum.
REPLICATED = (
    "norm",
    "ln_",
    "block_sparse_moe.gate",
    "mlp.gate.",
    "mlp.router.",
    "down_proj_bias",
    "o_proj.bias",
    "down_proj.bias",
)
KV = ("k_proj", "v_proj")


def small(family: str) -> dict[str, Any]:
    sizes = {
        "model_type": family,
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "max_position_embeddings": 256,
    }
    if family == "gptj":
        names = ("model_type", "vocab_size")
        sizes = {name: sizes[name] for name in names} | {
            "n_embd": 256,
            "n_layer": 3,
            "n_head": 8,
            "rotary_dim": 16,
        }
    return SMALL[family] | sizes


def assert_shards_add_up(config: dict[str, Any], tp: int) -> None:
    """``tp`` ranks hold the model's tensors, and once more for every further rank what each holds whole."""
    whole, shard = read_blueprint(config), read_blueprint(shard_config(config, tp))
    kv_copies = max(1, tp // whole.spec.num_kv_heads)
    assert [t.name for t in shard.layer] == [t.name for t in whole.layer]
    for one, all_of_it in zip(shard.layer, whole.layer, strict=True):
        held = tp if any(part in one.name for part in REPLICATED) else 1
        if any(part in one.name for part in KV):
            held = kv_copies
        assert tp * prod(one.shape) == held * prod(all_of_it.shape), one.name
    rest = {t.name: prod(t.shape) for t in whole.rest}
    for one in shard.rest:
        held = tp if "norm" in one.name else 1
        padding = -whole.spec.vocab_size % tp * whole.spec.hidden_size
        assert tp * prod(one.shape) == held * rest[one.name] + (0 if held == tp else padding), one.name
    kept = ("hidden_size", "head_dim", "num_layers", "num_experts", "experts_per_token", "sliding_window")
    for name in kept:
        assert getattr(shard.spec, name) == getattr(whole.spec, name), name


def test_every_family_of_the_table_is_tried() -> None:
    assert set(SMALL) == set(FAMILIES)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", [family for family in FAMILIES if refuses_shards(family) is None])
def test_the_ranks_of_every_family_add_up_to_the_model(family: str, tp: int) -> None:
    assert_shards_add_up(small(family), tp)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_ranks_of_published_models_add_up(
    name: str, tp: int, published_configs: dict[str, dict[str, Any]], golden: Golden
) -> None:
    config = {key: value for key, value in published_configs[name].items() if key not in NOT_CONFIG_KEYS}
    if refuses_shards(config["model_type"]) is not None:
        with golden.raises("fingerprint", UnsupportedModelError):
            shard_config(config, tp)
        return
    assert_shards_add_up(config, tp)


def test_a_rank_of_llama_2_7b() -> None:
    """Worked out: q, k, v, o of 4096 x 2048, gate, up, down of 4096 x 5504, two norms of 4096."""
    spec = read_spec(shard_config(LLAMA_7B, 2))
    assert spec.layer_params == 4 * 4096 * 2048 + 3 * 4096 * 5504 + 2 * 4096
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (16, 16, 128, 16_000)
    assert spec.embedding_params == spec.head_params == 16_000 * 4096


@pytest.mark.parametrize("family", [family for family, row in FAMILIES.items() if row.explicit_head_dim])
def test_transformers_builds_what_is_counted(family: str) -> None:
    config = shard_config(small(family), 4)
    assert read_spec(config).num_params == sum(p.numel() for p in on_meta(config).parameters())


@pytest.mark.parametrize("family", [family for family, row in FAMILIES.items() if not row.explicit_head_dim])
def test_families_without_a_head_dim_of_their_own_are_refused(family: str, golden: Golden) -> None:
    with golden.raises("fingerprint", UnsupportedModelError):
        shard_config(small(family), 2)


@pytest.mark.parametrize(
    ("changes", "tp"),
    [
        ({}, 3),
        ({"intermediate_size": 11009}, 2),
        ({"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128}, 4),
        ({}, 0),
    ],
    ids=repr,
)
def test_what_does_not_divide_is_refused(changes: dict[str, Any], tp: int, golden: Golden) -> None:
    with golden.raises("fingerprint", ConfigError):
        shard_config(LLAMA_7B | changes, tp)


def test_special_tokens_beyond_a_rank_s_vocabulary_are_dropped() -> None:
    """Llama 3 ends with tokens 128001 and 128009 of 128256; engines index a rank's 64128 logits with them."""
    tokens = {"vocab_size": 128_256, "bos_token_id": 128_000, "eos_token_id": [2, 128_001], "pad_token_id": None}
    shard = shard_config(LLAMA_7B | tokens, 2)
    assert shard["vocab_size"] == 64_128
    assert "bos_token_id" not in shard
    assert shard["eos_token_id"] == [2]
    assert shard["pad_token_id"] is None


def test_the_config_that_is_given_stays_as_it_is() -> None:
    given = LLAMA_7B | {"eos_token_id": [2, 31_999]}
    before = json.dumps(given)
    shard_config(given, 4)
    assert json.dumps(given) == before


class TestOnDisk:
    def test_a_cut_shard_has_its_layers_and_no_tokenizer(self, tmp_path: Path) -> None:
        source = tmp_path / "model"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(LLAMA_7B))
        (source / "generation_config.json").write_text('{"eos_token_id": 31999}')
        generate_shape(source, tmp_path / "rank", 2, tp=4)
        assert [file.name for file in (tmp_path / "rank").iterdir()] == ["config.json"]
        spec = load_spec(tmp_path / "rank")
        assert (spec.num_layers, spec.num_heads, spec.intermediate_size) == (2, 8, 2752)

    def test_nothing_is_left_of_one_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
        with pytest.raises(BadInputError):
            generate_shape(tmp_path, tmp_path / "rank", 2, tp=5)
        assert not (tmp_path / "rank").exists()
