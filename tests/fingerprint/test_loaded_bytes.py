"""Bytes of a quantized layer in vLLM's memory, against the parameters that vLLM's own classes made.

The record is of vLLM 0.33's classes on an H200 that is none (``record_format_parameters``), before weights are
re-packed. What re-packing does to sizes is read in the sources that ``fingerprint.loaded_bytes`` names.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.loaded_bytes import added_layer_bytes
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import layer_weight_bytes_per_gpu
from tests.bench.format_configs import FORMATS

RECORDED = Path(__file__).parent / "recorded"
LLAMA, GPT_OSS = "meta-llama/Llama-3.1-8B", "openai/gpt-oss-20b"
STORED = DeploymentConfig(weights=WeightFormat.STORED, engine="vllm")
ITEM_BYTES = {"int8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "int32": 4, "float32": 4, "int64": 8}
KERNELS = {
    "fp8-dynamic": "CutlassFP8ScaledMMLinearKernel",
    "w8a8": "CutlassInt8ScaledMMLinearKernel",
    "w4a16": "MacheteLinearKernel",
    "gptq": "MacheteLinearKernel",
    "awq": "MacheteLinearKernel",
}


@cache
def record() -> dict[str, Any]:
    return dict(json.loads((RECORDED / "format_parameters.json").read_text()))


def spec_of(name: str, model: str = LLAMA, **changes: object) -> ModelSpec:
    config = json.loads((RECORDED / "public_models.json").read_text())["models"][model]["config"]
    return read_spec({**config, **changes, "quantization_config": FORMATS[name].quantization})


def linears(name: str) -> dict[str, Any]:
    """Return the linear modules of the first layer."""
    modules = record()[LLAMA][name]["modules"]
    return {key: module for key, module in modules.items() if key.endswith("_proj")}


def held_bytes(module: dict[str, Any]) -> int:
    """Return the bytes after re-packing: Machete multiplies zero points out in 16 bits, AWQ's alone."""
    total = 0
    for name, (dtype, *shape) in module["parameters"].items():
        size = ITEM_BYTES[dtype] * prod(shape)
        total += 4 * size if name == "qzeros" and module["method"].startswith("AutoAWQ") else size
    return total


@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_is_as_large_as_vllms_own_parameters(name: str) -> None:
    spec, modules = spec_of(name), linears(name)
    assert {module["kernel"] for module in modules.values()} == {KERNELS[name]}
    norms = 2 * (spec.layer_params - spec.layer_linear_params)
    counted = layer_weight_bytes_per_gpu(spec, STORED) + added_layer_bytes(spec, STORED, gpu_spec("h200")) - norms
    # A shape of two integers is kept for a joined matrix instead of for each of its parts.
    assert counted == pytest.approx(sum(map(held_bytes, modules.values())), abs=16 * 3)


@pytest.mark.parametrize("name", [*KERNELS, "fp8"])
def test_the_documented_kernel_is_the_one_that_was_taken(name: str) -> None:
    (taken,) = {module["kernel"] for module in linears(name).values()}
    assert taken.startswith(FORMATS[name].kernel)


def test_experts_of_gpt_oss_are_as_large_as_vllms_own_parameters() -> None:
    """Scales of each expert are filled up to 256 outputs and 4 groups, biases are held in 32 bits."""
    (module,) = [
        m for m in record()[GPT_OSS]["mxfp4"]["modules"].values() if m["method"].startswith("GptOssMxfp4")
    ]
    assert module["kernel"] == FORMATS["mxfp4"].kernel
    spec = spec_of("mxfp4", GPT_OSS)
    assert spec.stored is not None
    biases = 2 * sum(prod(shape) for name, (_, *shape) in module["parameters"].items() if name.endswith("bias"))
    held = 0
    for name, (_, experts, outputs, *inputs) in module["parameters"].items():
        if name.endswith("scale"):
            held += experts * (-(-outputs // 256) * 256) * (-(-inputs[0] // 4) * 4)
        else:
            held += 4 * experts * outputs if name.endswith("bias") else experts * outputs * inputs[0]
    counted = spec.stored.layer_expert_bytes + biases + added_layer_bytes(spec, STORED, gpu_spec("h200"))
    assert counted == held


def test_without_machete_zero_points_stay_packed() -> None:
    spec = spec_of("awq")
    on_h200, on_a100 = (added_layer_bytes(spec, STORED, gpu_spec(gpu)) for gpu in ("h200", "a100-80gb-sxm"))
    assert spec.stored is not None
    assert (on_h200, on_a100) == (3 * spec.stored.layer_zero_bytes, 0.0)
    narrow = spec_of("awq", intermediate_size=14_336 - 32, hidden_size=4096)
    assert added_layer_bytes(narrow, STORED, gpu_spec("h200")) == 0


@pytest.mark.parametrize("name", KERNELS)
def test_ranks_share_what_is_added(name: str) -> None:
    spec, gpu = spec_of(name), gpu_spec("h200")
    alone, half = (added_layer_bytes(spec, replace(STORED, tp=tp), gpu) for tp in (1, 2))
    assert half == alone / 2


@pytest.mark.parametrize("name", KERNELS)
def test_other_engines_and_formats_hold_what_their_files_have(name: str) -> None:
    spec, gpu = spec_of(name), gpu_spec("h200")
    assert added_layer_bytes(spec, replace(STORED, engine="tensorrt-llm"), gpu) == 0
    assert added_layer_bytes(replace(spec, stored=None), replace(STORED, weights=WeightFormat.FP8), gpu) == 0
