"""AMD GPUs: estimated as GPUs, with an interval that holds what was measured on them; planned on vLLM alone."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.capability import PLANNED_ONLY, EngineCapabilities
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.estimators.roofline import CALIBRATED, RooflineEstimator, all_reduce_s
from fingerprint.families import read_spec
from fingerprint.gpu_spec import GpuSpec, Vendor
from fingerprint.gpus import gpu_spec
from planner.space import formats
from tests.fingerprint.test_roofline import CPU, LLAMA_2_7B
from tests.golden_words import Golden

MI300X, H200 = gpu_spec("mi300x"), gpu_spec("h200")
LLAMA_405B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def table_of(engine: str) -> EngineCapabilities:
    (table,) = (table for table in capabilities_for("auto") if table.engine == engine)
    return table


def test_vendors() -> None:
    assert (MI300X.vendor, H200.vendor, CPU.vendor) == (Vendor.AMD, Vendor.NVIDIA, Vendor.CPU)
    assert (MI300X.is_cpu, H200.is_cpu, CPU.is_cpu) == (False, False, True)


def test_a_recorded_device_of_before_is_read_as_what_it_was() -> None:
    """Profiles of earlier releases have neither ``gfx`` nor ``link_mesh``."""
    for spec in (H200, CPU):
        fields = to_json(spec).decode().replace(',"gfx":null,"link_mesh":false', "")
        assert "gfx" not in fields
        assert from_json(fields, GpuSpec) == spec


def test_memory_is_counted_as_on_a_gpu() -> None:
    config, work = DeploymentConfig(tp=2, engine="vllm"), Workload()
    on_amd = RooflineEstimator(LLAMA_2_7B, MI300X).estimate(config, work).memory
    on_nvidia = RooflineEstimator(LLAMA_2_7B, H200).estimate(config, work).memory
    assert on_amd == on_nvidia  # neither a byte of it follows from the speed
    assert on_amd.runtime_bytes == CALIBRATED.context_bytes + CALIBRATED.collective_bytes


def test_intervals_are_wider_than_for_nvidia_by_the_stated_factor() -> None:
    config, work = DeploymentConfig(engine="vllm"), Workload()
    on_amd = RooflineEstimator(LLAMA_2_7B, MI300X).estimate(config, work).tpot_s
    same_peaks = replace(MI300X, gfx=None, compute_capability=(9, 0))
    as_nvidia = RooflineEstimator(LLAMA_2_7B, same_peaks).estimate(config, work).tpot_s
    assert on_amd.value == as_nvidia.value
    assert on_amd.low == pytest.approx(as_nvidia.low / 2)
    assert on_amd.high == pytest.approx(2 * as_nvidia.high)


def test_an_all_reduce_in_the_mesh_uses_all_its_links() -> None:
    large, ideal = 1e7, replace(CALIBRATED, link_efficiency=1.0, all_reduce_latency_s=0.0, all_reduce_hop_s=0.0)
    moved = large * 4096 * 2.0
    assert all_reduce_s(MI300X, 4096, 2, large, ideal) == pytest.approx(moved / 64e9)
    # two halves of the ring's law, of an eighth of the message to each of the other seven over its own link
    assert all_reduce_s(MI300X, 4096, 8, large, ideal) == pytest.approx(2 * moved / 8 / 64e9)


def test_fp8_is_in_the_space_of_those_that_have_it() -> None:
    weights = {weights for weights, _, _ in formats(LLAMA_2_7B, MI300X)}
    assert WeightFormat.FP8 in weights
    without = replace(MI300X, flops_fp8_per_s=None, gfx="gfx90a")
    assert WeightFormat.FP8 not in {weights for weights, _, _ in formats(LLAMA_2_7B, without)}


@pytest.mark.parametrize("weights", [WeightFormat.BITS16, WeightFormat.FP8])
@pytest.mark.parametrize("kv", [KvFormat.BITS16, KvFormat.FP8])
def test_vllm_is_planned_in_16_bits_and_fp8(weights: WeightFormat, kv: KvFormat) -> None:
    config = DeploymentConfig(tp=8, weights=weights, kv=kv, engine="vllm")
    assert table_of("vllm").refusal(LLAMA_2_7B, config, MI300X) is None
    assert PLANNED_ONLY[Vendor.AMD] in table_of("vllm").conditions(LLAMA_2_7B, config, MI300X)
    assert PLANNED_ONLY[Vendor.AMD] not in table_of("vllm").conditions(LLAMA_2_7B, config, H200)


@pytest.mark.parametrize("weights", [WeightFormat.INT4, WeightFormat.GPTQ4])
def test_vllm_is_not_planned_in_formats_documented_for_nvidia_alone(weights: WeightFormat) -> None:
    config = DeploymentConfig(weights=weights, engine="vllm")
    assert "AMD" in str(table_of("vllm").refusal(LLAMA_2_7B, config, MI300X))
    assert table_of("vllm").refusal(LLAMA_2_7B, config, H200) is None


@pytest.mark.parametrize("engine", ["torch", "tensorrt-llm"])
def test_other_engines_are_not_planned(engine: str, golden: Golden) -> None:
    config = DeploymentConfig(engine=engine)
    golden("fingerprint", str(table_of(engine).refusal(LLAMA_2_7B, config, MI300X)))


@pytest.mark.skipif("ISERVE_REFERENCE_DATA" not in os.environ, reason="ISERVE_REFERENCE_DATA is not set")
def test_what_was_measured_on_mi300x_is_inside_the_interval() -> None:
    """Llama-3.1-405B in fp8 on 4 and 8 MI300X, vLLM 0.6.3 (dstack): the checkpoint that was made for AMD.

    Left out are rows whose weights and KV fill more than 90% of the memory, which run in waves.
    """
    path = Path(os.environ["ISERVE_REFERENCE_DATA"]) / "reference" / "measured_dstack_llama405b_latency.csv"
    spec, errors = read_spec(LLAMA_405B), []
    estimator = RooflineEstimator(spec, MI300X)
    for row in csv.DictReader(path.open()):
        if row["system"] not in ("4xMi300x 1FP8-amd", "8xMi300x 1FP8-amd"):
            continue
        tp, batch = int(row["system"][0]), int(row["batch"])
        work = Workload(batch=batch, input_tokens=int(row["isl"]), output_tokens=int(row["osl"]))
        config = DeploymentConfig(tp=tp, weights=WeightFormat.FP8, engine="vllm")
        found, measured_s = estimator.estimate(config, work), float(row["e2e_latency_s"])
        if found.memory.per_gpu_bytes((126,)) > 0.9 * MI300X.memory_bytes:
            continue
        assert found.e2e_s.low <= measured_s <= found.e2e_s.high, row
        errors.append(math.log(measured_s / found.e2e_s.value))
    assert len(errors) >= 25
    assert 0.1 < sorted(errors)[len(errors) // 2] < 0.3  # slower than the constants of NVIDIA GPUs say, as a rule
