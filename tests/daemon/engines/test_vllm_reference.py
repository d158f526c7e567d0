"""vLLM's adapter against the notes taken from its sources: no flag, metric or text is of our own making."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.vllm import launch
from daemon.engines.vllm.capabilities import TABLE
from daemon.engines.vllm.error_patterns import ERROR_PATTERNS
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from tests.daemon.engines.test_vllm_parts import METRICS
from tests.daemon.engines.vllm_worker_spec import DEVICES, LLAMA_8B, worker
from tests.golden_words import Golden

pytestmark = pytest.mark.skipif(
    "ISERVE_REFERENCE_DATA" not in os.environ, reason="ISERVE_REFERENCE_DATA is not set"
)

# Not in the notes; read in engine/arg_utils.py and entrypoints/openai/cli_args.py of 0.24.0.
READ_IN_SOURCES = {"--block-size", "--generation-config", "--compilation-config", "--disable-uvicorn-access-log"}


@pytest.fixture(scope="module")
def notes() -> str:
    return (Path(os.environ["ISERVE_REFERENCE_DATA"]) / "reference" / "vllm.md").read_text()


def test_every_flag_is_one_that_it_has(notes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    spec = replace(worker(tmp_path, layers=(20, 12), tp=2, weights=WeightFormat.FP8), dummy_weights=True)
    words = launch.arguments(spec, launch.read_model(spec), DEVICES)
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    documented = set(re.findall(r"--[a-z][a-z-]+", notes))
    assert used - documented == READ_IN_SOURCES


def test_every_environment_variable_of_its_own_is_one_that_it_reads(notes):
    spec = worker(Path("/"), layers=(20, 12), tp=2)
    ours = {name for name, _ in launch.environment(spec, DEVICES) if name.startswith("VLLM_")}
    # envs.py of 0.24.0 and of 0.33.0
    read_in_sources = {"VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"}
    assert ours - set(re.findall(r"VLLM_[A-Z_]+", notes)) == read_in_sources


def test_every_metric_is_one_that_it_exports(notes):
    used = set(re.findall(r"^# TYPE (vllm:\w+)", METRICS.decode(), flags=re.MULTILINE))
    documented = {f"vllm:{name}" for name in re.findall(r"`vllm:(\w+)`", notes)}
    documented |= {f"{name}_total" for name in documented}  # counters appear so
    assert used - documented == {"vllm:cache_config_info"}  # log_metrics_info of v1/metrics/loggers.py, 0.24.0


@pytest.mark.parametrize(
    "text",
    [
        "Free memory on device cuda:0 on startup is less than desired GPU memory utilization",
        "No available memory for the cache blocks",
        "Invalid partition string",
        "EngineDeadError",
        "Sparse24 models are no longer supported by vLLM",
        "Sparsity support has been removed from compressed-tensors",
    ],
)
def test_every_documented_failure_has_a_meaning(notes, text):
    shown = text.replace(" cuda:0 ", " … ")
    assert shown in notes
    assert any(sign.pattern.search(text) for sign in ERROR_PATTERNS)


def test_one_sequence_and_head_texts_are_the_documented_ones(notes):
    assert "To serve at least one request with the model's max seq len (…), … GiB KV cache is needed" in notes
    assert "Total number of attention heads (71) must be divisible by tensor parallel size" in notes


def test_falcon_7b_is_split_by_no_degree_whatever_the_engine(golden: Golden):
    """71 heads: the model's own shape, refused by the planner before any engine is asked."""
    from planner.space import shape_refusal

    spec = ModelSpec(
        family="falcon",
        architecture="FalconForCausalLM",
        num_layers=32,
        hidden_size=4544,
        intermediate_size=18176,
        num_heads=71,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=65024,
        max_context_tokens=2048,
        tied_embeddings=True,
        layer_params=1,
        layer_linear_params=1,
        embedding_params=1,
        head_params=0,
        final_norm_params=1,
    )
    gpu = GpuSpec(
        name="h200",
        memory_bytes=2**37,
        memory_bytes_per_s=1e12,
        flops_16bit_per_s=1e14,
        flops_8bit_per_s=None,
        flops_fp8_per_s=None,
        compute_capability=(9, 0),
        link_bytes_per_s=1e10,
        link_group_size=8,
        pcie_bytes_per_s=1e10,
    )
    config = DeploymentConfig(tp=2, engine="vllm")
    assert TABLE.refusal(spec, config, gpu) is None
    golden("engines", shape_refusal(spec, config, 8) or "")
