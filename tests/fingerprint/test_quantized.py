"""Already quantized checkpoints: recognised by config.json, sized as their header says, cut, and planned as they
are.

The checkpoints are written here, tensor by tensor, as each format's writer does: random bytes in the right places.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.engines import registry
from daemon.engines.tensorrt_llm.capabilities import TABLE as TENSORRT_LLM
from daemon.engines.vllm.capabilities import TABLE as VLLM
from fingerprint.checkpoint import Checkpoint, stored_tensors
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.description import describe
from fingerprint.errors import CheckpointError, ConfigError, IserveError, UnsupportedModelError
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import load_spec, read_blueprint, read_config, read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from fingerprint.quantized import BY_HEADERS, METHODS
from fingerprint.truncate import generate, generate_dummy, generate_shape
from fingerprint.weight_bytes import embedding_bytes, head_bytes, layer_weight_bytes, layer_weight_bytes_per_gpu
from planner.intent import Quality, quality_needed
from planner.space import configuration_space
from tests.golden_words import Golden

STORED = DeploymentConfig(weights=WeightFormat.STORED, engine="vllm")
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}
LLAMA = {"model_type": "llama", **SIZES}
QWEN_MOE = {"model_type": "qwen3_moe", **SIZES, "num_experts": 3, "num_experts_per_tok": 2}
QWEN_MOE |= {"moe_intermediate_size": 128}
GPT_OSS = {
    "model_type": "gpt_oss",
    **SIZES,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 32,
}

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


def fp8_blocks(name: str, out: int, wide: int) -> Tensors:
    """DeepSeek's."""
    return {
        f"{name}.weight": ("F8_E4M3", (out, wide)),
        f"{name}.weight_scale_inv": ("F32", (-(-out // 128), -(-wide // 128))),
    }


def fp8_whole(name: str, out: int, wide: int) -> Tensors:
    parts = {f"{name}.weight_scale": ("F32", ()), f"{name}.input_scale": ("F32", ())}
    return {f"{name}.weight": ("F8_E4M3", (out, wide)), **parts}


def float_channels(name: str, out: int, wide: int) -> Tensors:
    return {f"{name}.weight": ("F8_E4M3", (out, wide)), f"{name}.weight_scale": ("BF16", (out, 1))}


def int_channels(name: str, out: int, wide: int) -> Tensors:
    return {f"{name}.weight": ("I8", (out, wide)), f"{name}.weight_scale": ("BF16", (out, 1))}


def packed(name: str, out: int, wide: int) -> Tensors:
    return {
        f"{name}.weight_packed": ("I32", (out, wide // 8)),
        f"{name}.weight_scale": ("BF16", (out, wide // 128)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


def gptq(name: str, out: int, wide: int) -> Tensors:
    return {
        f"{name}.qweight": ("I32", (wide // 8, out)),
        f"{name}.qzeros": ("I32", (wide // 128, out // 8)),
        f"{name}.scales": ("F16", (wide // 128, out)),
        f"{name}.g_idx": ("I32", (wide,)),
    }


def awq(name: str, out: int, wide: int) -> Tensors:
    return {
        f"{name}.qweight": ("I32", (wide, out // 8)),
        f"{name}.qzeros": ("I32", (wide // 128, out // 8)),
        f"{name}.scales": ("F16", (wide // 128, out)),
    }


def mxfp4(name: str, experts: int, wide: int, out: int) -> Tensors:
    return {
        f"{name}_blocks": ("U8", (experts, out, wide // 32, 16)),
        f"{name}_scales": ("U8", (experts, out, wide // 32)),
    }


def compressed(form: str, **weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "actorder": None, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


# model, quantization_config, how a matrix is stored
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Tensors]]] = {
    "deepseek-fp8": (
        LLAMA,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8_blocks,
    ),
    "qwen-moe-fp8": (
        QWEN_MOE,
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
        | {"activation_scheme": "dynamic"},
        fp8_blocks,
    ),
    "static-fp8": (LLAMA, {"quant_method": "fp8", "activation_scheme": "static"}, fp8_whole),
    "compressed-fp8": (
        LLAMA,
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        float_channels,
    ),
    "compressed-int8": (
        LLAMA,
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        int_channels,
    ),
    "compressed-w4a16": (
        LLAMA,
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
        packed,
    ),
    "gptq": (LLAMA, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}, gptq),
    "awq": (
        LLAMA,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gpt-oss-mxfp4": (
        GPT_OSS,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
        mxfp4,
    ),
}
_ELEMENT = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}


def tensors_of(
    config: dict[str, Any], store: Callable[..., Tensors], kept: frozenset[str] = frozenset()
) -> Tensors:
    """Return the tensors of the whole checkpoint; ``kept``: matrices in 16 bits."""
    blueprint = read_blueprint({k: v for k, v in config.items() if k != "quantization_config"})
    found: Tensors = {t.name: ("BF16", t.shape) for t in blueprint.rest}
    for index in range(blueprint.spec.num_layers):
        for tensor in blueprint.layer:
            name = f"model.layers.{index}.{tensor.name}"
            matrix = tensor.role in (("expert",) if store is mxfp4 else ("linear", "expert"))
            if matrix and name.removesuffix(".weight") not in kept:
                found |= store(name.removesuffix(".weight"), *tensor.shape)
            else:
                found[name] = ("BF16", tensor.shape)
    return found


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Random bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    random, header, offset = np.random.default_rng(0), {}, 0
    for name, (dtype, shape) in tensors.items():
        size = _ELEMENT[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    data = random.integers(0, 256, offset, dtype=np.uint8).tobytes()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return folder


@pytest.fixture(scope="module", params=CASES)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, quantization, store = CASES[request.param]
    config = model | {"quantization_config": quantization}
    return write(tmp_path_factory.mktemp("stored") / request.param, config, tensors_of(config, store))


def header_bytes(folder: Path) -> int:
    return sum(entry.num_bytes for entry in Checkpoint.open(folder).tensors.values())


def spec_bytes(spec: ModelSpec) -> float:
    head = 0.0 if spec.tied_embeddings else head_bytes(spec)
    ends = embedding_bytes(spec) + head + 2.0 * spec.final_norm_params
    return spec.num_layers * layer_weight_bytes(spec, STORED) + ends


def test_weights_are_as_large_as_the_header_says(stored: Path) -> None:
    assert spec_bytes(load_spec(stored)) == pytest.approx(header_bytes(stored), rel=1e-3)


def test_headers_alone_tell_the_same(stored: Path) -> None:
    """Without a row of the family, or a rule of the method: to the byte."""
    by_rule = load_spec(stored)
    spec = describe(read_config(stored) | {"architectures": [by_rule.architecture]}, stored_tensors(stored))
    assert spec.stored is not None
    assert by_rule.stored is not None
    alike: dict[str, Any] = {"stored": None, "gated_mlp": True, "layer_windows": (), "sliding_window": None}
    assert replace(spec, **alike) == replace(by_rule, **alike)
    assert spec_bytes(spec) == pytest.approx(header_bytes(stored), rel=1e-9)
    told = ("method", "form", "bits", "group_inputs", "group_outputs")
    assert [getattr(spec.stored, name) for name in told] == [getattr(by_rule.stored, name) for name in told]


@pytest.mark.parametrize(
    ("case", "changes", "is_refused"),
    [
        ("gptq", {}, False),
        ("gptq", {"desc_act": True}, True),
        ("gptq", {"desc_act": True, "group_size": -1}, False),
        ("gptq", {"sym": False}, True),
        ("gptq", {"sym": False, "desc_act": True}, True),
        ("compressed-w4a16", {"actorder": "group"}, True),
        ("compressed-w4a16", {"actorder": "static"}, False),
        ("compressed-w4a16", {"symmetric": False}, False),
    ],
)
def test_a_plan_says_what_vllm_refuses_by_now(
    case: str, changes: dict[str, Any], is_refused: bool, golden: Golden
) -> None:
    """0.33: ``normalize_and_validate_gptq_desc_act``, ``AutoGPTQConfig.TYPE_MAP``, ``CompressedTensorsConfig``."""
    model, quantization, _ = CASES[case]
    if case == "gptq":
        quantization = {**quantization, **changes}
    else:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **changes}
        quantization = compressed("pack-quantized", **weights)
    spec = read_spec({**model, "quantization_config": quantization})
    assert spec.stored is not None
    golden("fingerprint", spec.stored.form)
    said = [note for note in VLLM.conditions(spec, STORED, gpu_spec("h200")) if "vllm 0.33 refuses" in note]
    assert bool(said) == is_refused


def nvfp4(name: str, out: int, wide: int) -> Tensors:
    return {
        f"{name}.weight": ("U8", (out, wide // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (out, wide // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
        f"{name}.input_scale": ("F32", ()),
    }


def test_a_method_without_a_rule_is_told_by_its_files(tmp_path: Path) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    config = LLAMA | {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    folder = write(tmp_path / "nvfp4", config, tensors_of(config, nvfp4))
    spec = load_spec(folder)
    assert (spec.num_params, spec.stored and spec.stored.method) == (read_spec(LLAMA).num_params, "modelopt")
    assert spec_bytes(spec) == header_bytes(folder)
    assert VLLM.refusal(spec, STORED, gpu_spec("b200")) is None
    generate_shape(folder, tmp_path / "cut", 2)
    cut = read_config(tmp_path / "cut")
    assert (cut["num_hidden_layers"], cut["quantization_config"]) == (2, quantization)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="quantized by 'modelopt'"):
        load_spec(folder)


def test_the_shape_is_the_16_bit_models_but_for_how_it_is_stored(stored: Path) -> None:
    spec, config = load_spec(stored), read_config(stored)
    whole = read_spec({key: value for key, value in config.items() if key != "quantization_config"})
    assert spec.stored is not None
    assert replace(spec, stored=None) == whole
    assert spec.shape_hash != whole.shape_hash
    assert spec.num_params == whole.num_params
    assert from_json(to_json(spec), ModelSpec) == spec


def test_a_cut_is_the_layers_bytes_and_still_of_that_format(stored: Path, tmp_path: Path) -> None:
    generate(stored, tmp_path / "cut", (1, 3))
    whole, cut = Checkpoint.open(stored), Checkpoint.open(tmp_path / "cut")
    for name, entry in cut.tensors.items():
        old = name.replace("layers.1.", "layers.3.").replace("layers.0.", "layers.1.")
        assert (entry.dtype, entry.shape) == (whole.tensors[old].dtype, whole.tensors[old].shape)
        assert cut.read(name) == whole.read(old)
    spec = load_spec(tmp_path / "cut")
    assert spec.stored == load_spec(stored).stored
    assert spec_bytes(spec) == pytest.approx(header_bytes(tmp_path / "cut"), rel=1e-3)


def test_one_format_is_planned_for_and_changes_no_answers(stored: Path, golden: Golden) -> None:
    spec, gpu = load_spec(stored), gpu_spec("h200")
    space = configuration_space(spec, gpu, 2, lambda config: "vllm")
    assert {config.weights for config in space} == {WeightFormat.STORED}
    assert quality_needed(STORED) is Quality.EXACT
    assert VLLM.unprepared().refusal(spec, STORED, gpu) is None
    assert not any("beforehand" in said for said in VLLM.conditions(spec, STORED, gpu))
    for weights in sorted(set(WeightFormat) - {WeightFormat.STORED}):
        golden("fingerprint", VLLM.refusal(spec, replace(STORED, weights=weights), gpu) or "", weights)
    estimate = RooflineEstimator(spec, gpu).estimate(STORED, Workload())
    whole = replace(spec, stored=None)
    dense = RooflineEstimator(whole, gpu).estimate(replace(STORED, weights=WeightFormat.BITS16), Workload())
    assert estimate.memory.layer_weight_bytes < 0.6 * dense.memory.layer_weight_bytes
    golden("fingerprint", VLLM.refusal(whole, STORED, gpu))


def test_shards_add_up(stored: Path) -> None:
    """But for what every rank holds whole."""
    spec = load_spec(stored)
    alone, half = (layer_weight_bytes_per_gpu(spec, replace(STORED, tp=tp)) for tp in (1, 2))
    whole = 2.0 * (spec.layer_params - spec.layer_linear_params)
    assert alone == pytest.approx(layer_weight_bytes(spec, STORED))
    assert 2 * (half - whole) == pytest.approx(alone - whole, rel=1e-6)


def test_engines_say_why_not(stored: Path, golden: Golden) -> None:
    spec, gpu = load_spec(stored), gpu_spec("h200")
    assert spec.stored is not None
    torch_table = registry.ENGINES["torch"].capabilities()
    refused = torch_table.refusal(spec, replace(STORED, engine="torch"), gpu) or ""
    assert spec.stored.method in refused
    assert "16-bit model" in refused
    reason = TENSORRT_LLM.unprepared().refusal(spec, replace(STORED, engine="tensorrt-llm"), gpu)
    golden("fingerprint", [spec.stored.form, reason or "read"])


@pytest.mark.parametrize(
    ("case", "intermediate", "tp", "cut"),
    [
        ("gptq", 512, 2, False),
        ("gptq", 384, 2, True),  # 192 inputs a rank, groups of 128
        ("awq", 384, 2, True),
        ("compressed-w4a16", 384, 2, True),
        ("gptq", 384, 1, False),
        ("deepseek-fp8", 512, 2, False),
        ("deepseek-fp8", 384, 2, True),
        ("deepseek-fp8", 384, 1, False),
        ("static-fp8", 384, 2, False),  # one scale of the whole matrix
        ("compressed-fp8", 384, 2, False),
        ("gpt-oss-mxfp4", 384, 2, False),  # filled up
    ],
)
def test_vllm_gives_each_rank_whole_groups(
    case: str, intermediate: int, tp: int, cut: bool, golden: Golden
) -> None:
    model, quantization, _ = CASES[case]
    wide = {"intermediate_size": intermediate, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    spec, gpu = read_spec(model | wide | {"quantization_config": quantization}), gpu_spec("h200")
    reason = VLLM.unprepared().refusal(spec, replace(STORED, tp=tp), gpu)
    assert (reason is not None) == cut
    if cut:
        golden("fingerprint", reason)


def test_what_stays_in_16_bits_is_counted_so(tmp_path: Path) -> None:
    """Named whole, by an end, by a pattern, and one layer's alone."""
    _, quantization, store = CASES["compressed-w4a16"]
    ignored = ["lm_head", "re:.*o_proj$", "model.layers.2.mlp.down_proj", "model.layers.3.self_attn"]
    config = LLAMA | {"quantization_config": quantization | {"ignore": ignored}}
    kept = {f"model.layers.{i}.self_attn.o_proj" for i in range(4)} | {"model.layers.2.mlp.down_proj"}
    kept |= {f"model.layers.3.self_attn.{name}_proj" for name in "qkv"}
    folder = write(tmp_path / "model", config, tensors_of(config, store, frozenset(kept)))
    assert spec_bytes(load_spec(folder)) == pytest.approx(header_bytes(folder), rel=1e-3)
    generate(folder, tmp_path / "cut", (1, 2))
    assert read_config(tmp_path / "cut")["quantization_config"]["ignore"] == [  # type: ignore[index]
        "lm_head",
        "re:.*o_proj$",
        "model.layers.1.mlp.down_proj",
    ]
    assert spec_bytes(load_spec(tmp_path / "cut")) == pytest.approx(header_bytes(tmp_path / "cut"), rel=1e-3)


def test_a_layer_that_lacks_a_matrix_is_found(tmp_path: Path) -> None:
    model, quantization, store = CASES["gptq"]
    config = model | {"quantization_config": quantization}
    tensors = tensors_of(config, store)
    lacking = {name: value for name, value in tensors.items() if "layers.1.mlp.up_proj" not in name}
    folder = write(tmp_path / "model", config, lacking)
    with pytest.raises(CheckpointError, match=r"layer 1 .* has no mlp\.up_proj"):
        generate(folder, tmp_path / "cut", (0, 1))


def test_no_dummy_is_made_and_a_shape_is(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": CASES["gptq"][1]}))
    with golden.raises("fingerprint", UnsupportedModelError):
        generate_dummy(tmp_path, tmp_path / "dummy", 1)
    generate_shape(tmp_path, tmp_path / "shape", 1)
    assert load_spec(tmp_path / "shape").stored == load_spec(tmp_path).stored


@pytest.mark.parametrize(
    "quantization",
    [
        "gptq",
        {"quant_method": "bitsandbytes"},
        {"quant_method": ["gptq"]},
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
        {"quant_method": "gptq", "bits": True, "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:x": {}}},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "modules_to_not_convert": "lm_head"},
        {"quant_method": "fp8", "ignore": ["re:(a+)+$"]},
        {"quant_method": "fp8", "ignore": ["re:(((("]},
        {"quant_method": "fp8", "ignore": [r"re:model\.layers\.0.*"]},
        pytest.param({"quant_method": "fp8", "ignore": [f"m{i}" for i in range(300)]}, id="300 names"),
        {"quant_method": "mxfp4"},
        compressed("nvfp4-pack-quantized", num_bits=4),
        compressed("float-quantized", num_bits=8, type="float", strategy="block"),
        compressed("float-quantized", num_bits=8, type="int", strategy="channel"),
        compressed("naive-quantized", num_bits=8, type=["x"], strategy="channel"),
        compressed("pack-quantized", num_bits=4, strategy="group"),
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_name(quantization: object, golden: Golden) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError)) as refused:
        read_spec(LLAMA | {"quantization_config": quantization})
    golden("fingerprint", str(refused.value))
    assert isinstance(refused.value, IserveError)


def test_every_method_is_told_of_by_every_engine() -> None:
    for name, engine in registry.ENGINES.items():
        assert set(engine.capabilities().stored) == {*METHODS, *BY_HEADERS}, name
    assert KvFormat.FP8 in {c.kv for c in configuration_space(replace_stored(), gpu_spec("h200"), 1, lambda _: "")}


def replace_stored() -> ModelSpec:
    return read_spec(LLAMA | {"quantization_config": CASES["awq"][1]})
