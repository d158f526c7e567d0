"""From config.json to counts: against the transformers classes, recorded facts, and hostile values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import KvFormat
from fingerprint.errors import BadInputError, ConfigError, NotFoundError, UnsupportedModelError
from fingerprint.families import FAMILIES, family_of, load_spec, read_blueprint, read_spec
from tests.fingerprint.conftest import SMALL_CONFIGS
from tests.golden_words import Golden

# GPT-OSS is published in mxfp4; what is counted is the model in 16 bits.
NOT_CONFIG_KEYS = ("planner", "source", "unconfirmed", "quantization_config")
PUBLISHED = [
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-2-13b-hf",
    "meta-llama/Llama-2-70b-hf",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-32B",
    "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "google/gemma-2-9b",
    "openai/gpt-oss-20b",
    "tiiuae/falcon-7b",
    "tiiuae/falcon-40b",
    "EleutherAI/gpt-j-6b",
]
LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def on_meta(config: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_count_as_recorded_and_as_transformers_builds_them(
    name: str, published_configs: dict[str, dict[str, Any]]
) -> None:
    entry = published_configs[name]
    config = {key: value for key, value in entry.items() if key not in NOT_CONFIG_KEYS}
    spec = read_spec(config)
    recorded = entry["planner"]
    assert spec.num_params == recorded["parameters_computed"]
    assert spec.num_params == sum(parameter.numel() for parameter in on_meta(config).parameters())
    assert (
        spec.num_layers * spec.kv_bytes_per_token_per_layer(KvFormat.BITS16)
        == recorded["kv_bytes_per_token_16bit"]
    )
    assert spec.num_kv_heads == recorded["num_key_value_heads"]
    assert spec.head_dim == recorded["head_dim"]
    assert spec.intermediate_size == (recorded.get("moe_intermediate_size") or recorded["intermediate_size"])
    assert spec.max_context_tokens == recorded["max_position_embeddings"]
    assert spec.tied_embeddings == recorded["tie_word_embeddings"]
    assert spec.gated_mlp == recorded["gated_mlp"]
    windows = spec.windows
    sliding = recorded.get("sliding_layers", spec.num_layers if recorded["sliding_window"] else 0)
    assert sum(window is not None for window in windows) == sliding
    assert {window for window in windows if window is not None} == {recorded["sliding_window"]} - {None}
    assert spec.sliding_window == (recorded["sliding_window"] if sliding == spec.num_layers else None)


@pytest.mark.parametrize("name", ["mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"])
def test_active_parameters_of_experts(name: str, published_configs: dict[str, dict[str, Any]]) -> None:
    """Two of eight experts work on a token, or eight of 128."""
    entry = published_configs[name]
    spec = read_spec({key: value for key, value in entry.items() if key not in NOT_CONFIG_KEYS})
    idle = spec.num_layers * spec.layer_expert_params * (spec.num_experts - spec.experts_per_token)
    assert spec.num_params - idle // spec.num_experts == entry["planner"]["active_parameters_computed"]


def test_every_row_of_the_table_is_tried() -> None:
    """Each has a small config of its own, which every test of ``small_config`` and ``saved_model`` takes."""
    assert {config["model_type"] for config in SMALL_CONFIGS.values()} == set(FAMILIES)


def test_every_variant_counts_as_transformers_builds_it(small_config: dict[str, Any]) -> None:
    assert read_spec(small_config).num_params == sum(p.numel() for p in on_meta(small_config).parameters())


def test_linear_parameters_are_those_of_the_layers_linear_modules(small_config: dict[str, Any]) -> None:
    import torch

    spec = read_spec(small_config)
    layer = on_meta(small_config).get_submodule(FAMILIES[spec.family].layout.layers)[0]
    linear = sum(m.weight.numel() for m in layer.modules() if isinstance(m, torch.nn.Linear))
    experts = sum(
        p.numel() for name, p in layer.named_parameters() if ".experts." in name and not name.endswith("_bias")
    )
    assert spec.layer_linear_params == linear + experts
    assert spec.layer_expert_params == experts
    assert spec.layer_params == sum(p.numel() for p in layer.parameters())


def test_layout_names_modules_of_the_class(small_config: dict[str, Any]) -> None:
    model = on_meta(small_config)
    layout = FAMILIES[small_config["model_type"]].layout
    assert len(model.get_submodule(layout.layers)) == read_spec(small_config).num_layers
    assert model.get_submodule(layout.embedding[0]) is model.get_input_embeddings()
    assert model.get_submodule(layout.head) is model.get_output_embeddings()
    assert [name for name, _ in model.named_parameters() if name.startswith(layout.final_norm[0])]


def test_tensors_are_those_that_transformers_saves(saved_model: Any) -> None:
    """Names and shapes, tied heads left out as save_pretrained leaves them out."""
    from safetensors import safe_open

    blueprint = read_blueprint(json.loads((saved_model.single / "config.json").read_text()))
    layers = FAMILIES[blueprint.spec.family].layout.layers
    described = {t.name: t.shape for t in blueprint.rest} | {
        f"{layers}.{index}.{t.name}": t.shape
        for index in range(blueprint.spec.num_layers)
        for t in blueprint.layer
    }
    with safe_open(saved_model.single / "model.safetensors", framework="np") as saved:
        assert described == {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118


def test_a_config_saved_by_transformers_reads_as_the_one_it_came_from(saved_model: Any) -> None:
    from transformers import AutoConfig

    config = json.loads((saved_model.single / "config.json").read_text())
    assert read_spec(config).num_layers == AutoConfig.from_pretrained(saved_model.single).num_hidden_layers == 4


def test_llama_2_7b_by_hand() -> None:
    spec = read_spec(LLAMA_7B)
    assert spec.head_dim == 128
    assert spec.layer_linear_params == 202_375_168  # 4 * 4096^2 + 3 * 4096 * 11008
    assert spec.layer_params == 202_383_360  # and two norms of 4096
    assert spec.embedding_params == spec.head_params == 131_072_000
    assert spec.final_norm_params == 4096
    assert spec.num_params == 6_738_415_616


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        pytest.param({"use_sliding_window": False, "sliding_window": 512}, None, id="switched-off"),
        pytest.param({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}, 512, id="all"),
        pytest.param({"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 4}, None, id="some"),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 32},
            9,
            id="types",
        ),
    ],
)
def test_a_window_counts_only_when_every_layer_slides(windows: dict[str, Any], expected: int | None) -> None:
    """The KV cache must be sized as if all layers were full when some are."""
    assert (
        read_spec(LLAMA_7B | {"model_type": "qwen2", "architectures": None} | windows).sliding_window == expected
    )


def test_the_old_and_the_new_name_of_the_dtype_change_nothing() -> None:
    assert read_spec(LLAMA_7B | {"dtype": "bfloat16"}) == read_spec(LLAMA_7B | {"torch_dtype": "float16"})


def test_code_that_a_config_brings_is_ignored() -> None:
    assert read_spec(LLAMA_7B | {"auto_map": {"AutoConfig": "evil.Config"}}) == read_spec(LLAMA_7B)


def test_no_model_code_is_imported() -> None:
    code = (
        "import sys; import fingerprint.families, fingerprint.checkpoint, fingerprint.truncate;"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- what is refused ---


@pytest.mark.parametrize(
    "value", [0, -1, True, "32", 3.5, 4096.0, float("nan"), 2**70, [], {}, pytest.param(10**5000, id="digits")]
)
@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "max_position_embeddings",
        "head_dim",
    ],
)
def test_an_absurd_size_is_named(field: str, value: object, golden: Golden) -> None:
    with golden.raises("fingerprint", ConfigError):
        read_spec(LLAMA_7B | {field: value})


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 5},
        {"num_attention_heads": 33, "num_key_value_heads": 33},
        {"head_dim": 7},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": 1},
        {"hidden_size": None},
        {"architectures": "LlamaForCausalLM"},
        {"model_type": None},
        {"model_type": ["llama"]},
    ],
    ids=repr,
)
def test_a_contradiction_is_named(change: dict[str, Any], golden: Golden) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(LLAMA_7B | change)
    golden("fingerprint", str(caught.value))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "falcon", "multi_query": True, "num_ln_in_parallel_attn": 2},
        {"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False},
        {"model_type": "falcon", "n_embed": 64, "hidden_size": 32},
        {"model_type": "falcon", "num_attention_heads": 3},
        {"model_type": "gptj", "n_embd": 32, "n_head": 4, "n_layer": 1, "rotary_dim": 64},
        {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
    ],
    ids=repr,
)
def test_a_contradiction_of_a_family_is_named(config: dict[str, Any], golden: Golden) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 8}
    more = (
        {} if config["model_type"] in ("falcon", "gptj") else {"intermediate_size": 64, "num_key_value_heads": 4}
    )
    with pytest.raises(ConfigError) as caught:
        read_spec(sizes | more | config if config["model_type"] != "gptj" else {"vocab_size": 8} | config)
    golden("fingerprint", str(caught.value))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5"},
        {"model_type": "bart", "is_encoder_decoder": True},
        {"model_type": "whisper"},
        LLAMA_7B | {"is_encoder_decoder": True},
        {"model_type": "bert"},
        LLAMA_7B | {"architectures": ["LlamaForSequenceClassification"]},
        LLAMA_7B | {"quantization_config": {"quant_method": "hqq"}},
        {"model_type": "gemma2", "use_bidirectional_attention": True},
        LLAMA_7B | {"model_type": "opt", "architectures": None, "word_embed_proj_dim": 512},
        LLAMA_7B | {"model_type": "opt", "architectures": None, "do_layer_norm_before": False},
        LLAMA_7B | {"model_type": "qwen3_moe", "architectures": None, "decoder_sparse_step": 2},
        LLAMA_7B | {"model_type": "qwen2_moe", "architectures": None, "mlp_only_layers": [0]},
    ],
)
def test_another_kind_of_model_is_named_as_unsupported(config: dict[str, Any], golden: Golden) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(config)
    message = str(caught.value)
    golden("fingerprint", message)
    assert "\n" not in message


def test_a_refusal_lists_what_is_supported(golden: Golden) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        family_of({"model_type": "mamba"})
    golden("fingerprint", str(caught.value))
    for multimodal in ({"model_type": "llava", "vision_config": {"a": 1}}, {"model_type": "qwen2_vl"}):
        with pytest.raises(UnsupportedModelError, match="multimodal"):
            family_of(multimodal)  # planned by what it is made of, neither cut nor run by a table


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(1, 64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KEYS = sorted(
    {
        *LLAMA_7B,
        *(
            "is_encoder_decoder",
            "quantization_config",
            "num_local_experts",
            "num_experts_per_tok",
            "sliding_window",
        ),
        *(
            "head_dim",
            "use_sliding_window",
            "max_window_layers",
            "layer_types",
            "n_embd",
            "n_head",
            "n_layer",
            "bias",
        ),
        *(
            "num_experts",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "decoder_sparse_step",
            "mlp_only_layers",
            "qkv_bias",
            "sliding_window_pattern",
            "ffn_dim",
            "word_embed_proj_dim",
        ),
        *(
            "new_decoder_architecture",
            "multi_query",
            "parallel_attn",
            "num_kv_heads",
            "alibi",
            "rotary_dim",
            "n_embed",
        ),
    }
)


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    config=st.dictionaries(st.sampled_from(KEYS), json_values),
)
def test_any_config_gives_a_spec_or_one_line(family: str, config: dict[str, Any]) -> None:
    message = ""
    try:
        spec = read_spec(LLAMA_7B | {"architectures": None} | config | {"model_type": family})
        assert spec.num_params > 0
        assert 0 < spec.layer_linear_params <= spec.layer_params
    except BadInputError as error:
        message = str(error)
    assert "\n" not in message


# --- the file ---


def test_a_spec_loads_from_the_directory_and_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    assert load_spec(tmp_path) == load_spec(tmp_path / "config.json") == read_spec(LLAMA_7B)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"{", id="cut-off"),
        pytest.param(b"[1]", id="list"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"a": ' * 100_000, id="deep-objects"),
        pytest.param(b'{"hidden_size": ' + b"9" * 5000 + b"}", id="digits"),
        pytest.param(b"\xff\xfe\x00\x01", id="binary"),
        pytest.param(b" " * (4 * 2**20 + 1), id="large"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: bytes, golden: Golden) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with golden.raises("fingerprint", ConfigError):
        load_spec(tmp_path)


@pytest.mark.parametrize("levels", [63, 64, 499, 10_000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_without_end_is_refused(tmp_path: Path, levels: int, opening: str, closing: str) -> None:
    """Python's recursion ends at 1,000 calls (``sys.getrecursionlimit``); no published config has over 5 levels.

    olmo2 has no row in the table: transformers' class is made of its fields, unknown ones too.
    """
    known = json.dumps({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"})
    inner = (opening * levels).removesuffix(":") + (": 0" if opening.endswith(":") else "") + closing * levels
    (tmp_path / "config.json").write_text(f'{known[:-1]}, "unknown": {inner}}}')
    if levels < 64:
        assert load_spec(tmp_path).family == "olmo2"
        return
    with pytest.raises(ConfigError) as caught:
        load_spec(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path, golden: Golden) -> None:
    with golden.raises("fingerprint", NotFoundError):
        load_spec(tmp_path)
    with golden.raises("fingerprint", NotFoundError):
        load_spec(tmp_path / "absent")
