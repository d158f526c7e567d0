"""The datasheet estimator: hand-computed parts, laws over the whole space, and the calibration behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload, even_split
from fingerprint.errors import ConfigError
from fingerprint.estimates import Source
from fingerprint.estimators import roofline
from fingerprint.estimators.physical_floor import NOTHING_LOST
from fingerprint.estimators.roofline import CALIBRATED, RooflineConstants, RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from tests.fingerprint.estimator_conformance import EstimatorConformance, assert_interval
from tests.golden_words import Golden

GIB = 2**30
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
LLAMA_2_7B = read_spec(
    LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
)
LLAMA_2_70B = read_spec(
    LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
)
TINY = read_spec(
    LLAMA
    | {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
)
QWEN_HALF_B = read_spec(
    {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    }
)
FALCON_7B = read_spec(
    {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "vocab_size": 65024,
    }
)
GPT_J = read_spec(
    {
        "model_type": "gptj",
        "architectures": ["GPTJForCausalLM"],
        "n_embd": 4096,
        "n_head": 16,
        "n_layer": 28,
        "n_positions": 2048,
        "rotary_dim": 64,
        "vocab_size": 50400,
        "tie_word_embeddings": False,
    }
)
MIXTRAL = read_spec(
    {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }
)
MODELS = [LLAMA_2_7B, LLAMA_2_70B, TINY, QWEN_HALF_B, FALCON_7B, GPT_J, MIXTRAL]
A6000, H200 = gpu_spec("a6000"), gpu_spec("h200")
CPU = GpuSpec(
    name="cpu",
    memory_bytes=4 * GIB,
    memory_bytes_per_s=10e9,
    flops_16bit_per_s=50e9,
    flops_8bit_per_s=None,
    flops_fp8_per_s=None,
    compute_capability=None,
    link_bytes_per_s=5e9,
    link_group_size=8,
    pcie_bytes_per_s=5e9,
)
# Full peaks and no fixed time at all, so that expectations can be worked out by hand.
IDEAL = NOTHING_LOST

models = st.sampled_from(MODELS)
gpus = st.sampled_from([A6000, H200, gpu_spec("a100"), gpu_spec("l40s"), gpu_spec("mi300x"), CPU])
configs = st.builds(
    DeploymentConfig,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.integers(1, 8),
    weights=st.sampled_from(list(WeightFormat)),
    kv=st.sampled_from(list(KvFormat)),
    pruning=st.sampled_from(list(Pruning)),
)
workloads = st.builds(
    Workload, batch=st.integers(1, 256), input_tokens=st.integers(1, 32_000), output_tokens=st.integers(1, 4000)
)


class TestRooflineOnGpu(EstimatorConformance):
    @pytest.fixture
    def estimator(self) -> RooflineEstimator:
        return RooflineEstimator(LLAMA_2_7B, A6000)


class TestRooflineOnCpu(EstimatorConformance):
    @pytest.fixture
    def estimator(self) -> RooflineEstimator:
        return RooflineEstimator(TINY, CPU)


def test_an_estimate_is_the_same_asked_again_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_MOST_KEPT", 3)
    asked, kept = [Workload(batch=batch) for batch in range(1, 9)], RooflineEstimator(LLAMA_2_7B, A6000)
    for workload in (*asked, *reversed(asked)):
        found = kept.estimate(DeploymentConfig(), workload)
        assert found == RooflineEstimator(LLAMA_2_7B, A6000).estimate(DeploymentConfig(), workload)
        assert len(kept._estimates) <= 3


def per_gpu_bytes(estimator: RooflineEstimator, config: DeploymentConfig, workload: Workload) -> int:
    memory = estimator.estimate(config, workload).memory
    return memory.per_gpu_bytes(even_split(memory.num_layers, memory.pp))


def test_weights_and_kv_of_llama_2_7b_by_hand() -> None:
    workload = Workload(batch=2, input_tokens=900, output_tokens=100)
    memory = RooflineEstimator(LLAMA_2_7B, H200).estimate(DeploymentConfig(), workload).memory
    (stage,) = memory.stages((32,))
    assert stage.weights_bytes == 2 * 6_738_415_616
    assert stage.kv_bytes == 524_288 * 2 * 1000
    assert memory.source is Source.ROOFLINE


def test_kv_heads_are_never_split() -> None:
    eight, sixteen = (
        RooflineEstimator(LLAMA_2_70B, H200).estimate(DeploymentConfig(tp=tp), Workload()).memory.layer_kv_bytes
        for tp in (8, 16)
    )
    assert eight == sixteen == 2 * 128 * 2 * 640  # K and V of one head


def test_a_tied_embedding_is_held_twice_only_across_stages() -> None:
    estimator = RooflineEstimator(TINY, A6000)
    embedding, norm = 512 * 256 * 2, 256 * 2
    alone = estimator.estimate(DeploymentConfig(), Workload()).memory
    split = estimator.estimate(DeploymentConfig(pp=2), Workload()).memory
    assert (alone.first_stage_bytes, alone.last_stage_bytes) == (embedding, norm)
    assert (split.first_stage_bytes, split.last_stage_bytes) == (embedding, embedding + norm)


def test_activations_are_those_of_the_largest_chunk() -> None:
    estimator = RooflineEstimator(LLAMA_2_7B, A6000, max_batched_tokens=1000)
    one_chunk = estimator.estimate(DeploymentConfig(), Workload(1, 1000, 10)).memory.activation_bytes
    many_chunks = estimator.estimate(DeploymentConfig(), Workload(1, 9000, 10)).memory.activation_bytes
    # residual and normed states, gate, up and product, at 2 bytes; logits of one row at 2 and 4
    assert one_chunk == many_chunks == 1000 * (2 * 4096 + 3 * 11008) * 2 + 32000 * 6


def test_a_decode_step_reads_weights_and_cache_once() -> None:
    step_s = RooflineEstimator(LLAMA_2_7B, A6000, constants=IDEAL).tpot_s(
        DeploymentConfig(), Workload(1, 900, 200)
    )
    weights = 2 * (32 * 202_383_360 + 32000 * 4096)  # layers and head; of the embedding one row is read
    assert step_s == pytest.approx((weights + 1000 * 524_288) / 768e9)


def test_a_long_prefill_is_bound_by_arithmetic() -> None:
    tokens = 4096
    prefill_s = RooflineEstimator(LLAMA_2_7B, A6000, constants=IDEAL).ttft_s(
        DeploymentConfig(), Workload(1, tokens, 1)
    )
    linear = 2 * 32 * 202_375_168 * tokens + 2 * 32000 * 4096  # the head for the last token only
    attention = 32 * 4 * 4096 * tokens * (tokens + 1) / 2
    assert prefill_s == pytest.approx((linear + attention) / 154.8e12)


def test_an_all_reduce_waits_for_the_slowest_link() -> None:
    constants = replace(IDEAL, all_reduce_latency_s=1e-5, all_reduce_hop_s=1e-6)
    slow = RooflineEstimator(LLAMA_2_7B, A6000, constants=constants)
    without = RooflineEstimator(LLAMA_2_7B, replace(A6000, pcie_bytes_per_s=1e30), constants=replace(IDEAL))
    config, workload = DeploymentConfig(tp=4), Workload(16, 512, 128)
    # 64 all-reduces of 16 x 4096 states of 2 bytes: four ranks send 2 x 3/4 of them, two hops beyond a pair
    expected = 64 * (1e-5 + 2 * 1e-6 + 1.5 * 16 * 4096 * 2 / 32e9)
    assert slow.tpot_s(config, workload) - without.tpot_s(config, workload) == pytest.approx(expected)


def test_launches_host_and_activations_come_on_top() -> None:
    constants = replace(
        IDEAL, launch_per_layer_s=1e-5, host_per_step_s=1e-3, host_per_sequence_s=1e-4, activation_passes=1.0
    )
    config, workload = DeploymentConfig(pp=4), Workload(4, 512, 128)
    with_them, without = (
        RooflineEstimator(LLAMA_2_7B, A6000, constants=each).tpot_s(config, workload)
        for each in (constants, IDEAL)
    )
    # 32 layers; the host once, not once a stage; hidden state, Q, K, V, gate and up of 4 tokens through memory
    activations = 32 * 4 * (4096 + 3 * 4096 + 2 * 11008) * 2 / 768e9
    assert with_them - without == pytest.approx(32e-5 + 1e-3 + 4e-4 + activations)


def test_few_tokens_read_few_experts() -> None:
    estimator = RooflineEstimator(MIXTRAL, H200, constants=IDEAL)
    layer, experts = MIXTRAL.layer_params, MIXTRAL.layer_expert_params
    # two of eight for one token; 1 - (3/4)^2 of them for two
    for batch, share in ((1, 2 / 8), (2, 7 / 16)):
        read = 2 * (32 * (layer - experts * (1 - share)) + 32000 * 4096)
        kv = batch * 576 * 32 * 2 * 8 * 128 * 2
        assert estimator.tpot_s(DeploymentConfig(), Workload(batch)) == pytest.approx((read + kv) / 4.8e12)


def test_a_sliding_window_bounds_what_is_read() -> None:
    window = replace(LLAMA_2_7B, sliding_window=1024)
    estimator = RooflineEstimator(window, A6000)
    config = DeploymentConfig()
    assert estimator.tpot_s(config, Workload(1, 2000, 10)) == estimator.tpot_s(config, Workload(1, 30_000, 10))
    full = RooflineEstimator(LLAMA_2_7B, A6000)
    assert estimator.ttft_s(config, Workload(1, 8000, 10)) < full.ttft_s(config, Workload(1, 8000, 10))


def test_weight_only_formats_save_reading_but_no_arithmetic() -> None:
    estimator = RooflineEstimator(LLAMA_2_7B, A6000, constants=IDEAL)
    dense, int4 = DeploymentConfig(), DeploymentConfig(weights=WeightFormat.INT4)
    long, short = Workload(1, 4096, 1), Workload(1, 16, 16)
    assert estimator.ttft_s(int4, long) == pytest.approx(estimator.ttft_s(dense, long))
    assert estimator.tpot_s(int4, short) < 0.35 * estimator.tpot_s(dense, short)


def test_fp8_uses_its_own_peak_where_there_is_one() -> None:
    dense, fp8, long = DeploymentConfig(), DeploymentConfig(weights=WeightFormat.FP8), Workload(1, 8192, 1)
    with_units = RooflineEstimator(LLAMA_2_7B, H200, constants=IDEAL)
    without = RooflineEstimator(LLAMA_2_7B, A6000, constants=IDEAL)
    assert with_units.ttft_s(fp8, long) < 0.6 * with_units.ttft_s(dense, long)
    assert without.ttft_s(fp8, long) == pytest.approx(without.ttft_s(dense, long))
    emulated = RooflineEstimator(LLAMA_2_7B, A6000).estimate(fp8, long).tpot_s
    assert emulated.high / emulated.value > 3  # measured up to 7 times slower on an A100


def test_eight_gpus_over_pcie_are_not_the_fastest_for_a_small_model() -> None:
    estimator = RooflineEstimator(QWEN_HALF_B, A6000)
    e2e_s = {tp: estimator.estimate(DeploymentConfig(tp=tp), Workload()).e2e_s.value for tp in (1, 2, 4, 8)}
    assert min(e2e_s, key=e2e_s.__getitem__) <= 2
    large = RooflineEstimator(LLAMA_2_70B, A6000)
    assert large.tpot_s(DeploymentConfig(tp=8), Workload()) < large.tpot_s(DeploymentConfig(tp=2), Workload())


def test_stages_of_one_batch_are_serial() -> None:
    estimator = RooflineEstimator(LLAMA_2_70B, H200, constants=IDEAL)
    one, four = (estimator.tpot_s(DeploymentConfig(pp=pp), Workload()) for pp in (1, 4))
    assert one < four < 1.001 * one  # only the hand-over of one token's states is added


def test_power_is_the_datasheet_or_unknown() -> None:
    power = RooflineEstimator(TINY, A6000).estimate(DeploymentConfig(), Workload()).power_w_per_gpu
    assert power is not None
    assert (power.value, power.source) == (300, Source.ROOFLINE)
    assert RooflineEstimator(TINY, CPU).estimate(DeploymentConfig(), Workload()).power_w_per_gpu is None


def test_more_stages_than_layers_is_refused(golden: Golden) -> None:
    with golden.raises("fingerprint", ConfigError):
        RooflineEstimator(TINY, A6000).estimate(DeploymentConfig(pp=9), Workload())


@given(spec=models, gpu=gpus, config=configs, workload=workloads)
def test_every_point_has_a_finite_estimate(
    spec: ModelSpec, gpu: GpuSpec, config: DeploymentConfig, workload: Workload
) -> None:
    estimate = RooflineEstimator(spec, gpu).estimate(config, workload)
    for quantity in (estimate.ttft_s, estimate.tpot_s, estimate.e2e_s):
        assert_interval(quantity)
        assert quantity.source is Source.ROOFLINE
    assert 0 < estimate.memory.relative_error < 1
    assert estimate.memory.total_bytes(even_split(spec.num_layers, config.pp)) > 0


@given(spec=models, config=configs, workload=workloads)
def test_more_tensor_parallelism_never_raises_the_weights_of_a_gpu(
    spec: ModelSpec, config: DeploymentConfig, workload: Workload
) -> None:
    estimator = RooflineEstimator(spec, A6000)
    here = estimator.estimate(config, workload).memory
    twice = estimator.estimate(replace(config, tp=2 * config.tp), workload).memory
    assert twice.layer_weight_bytes <= here.layer_weight_bytes
    assert twice.layer_kv_bytes <= here.layer_kv_bytes
    assert twice.first_stage_bytes <= here.first_stage_bytes
    assert twice.last_stage_bytes <= here.last_stage_bytes


@given(spec=models, config=configs, workload=workloads, more=st.integers(1, 10_000))
def test_more_work_never_takes_less(
    spec: ModelSpec, config: DeploymentConfig, workload: Workload, more: int
) -> None:
    estimator = RooflineEstimator(spec, A6000)
    longer_input = replace(workload, input_tokens=workload.input_tokens + more)
    longer_output = replace(workload, output_tokens=workload.output_tokens + more)
    larger = replace(workload, batch=workload.batch + more)
    for heavier in (longer_input, longer_output, larger):
        assert per_gpu_bytes(estimator, config, heavier) >= per_gpu_bytes(estimator, config, workload)
        assert estimator.tpot_s(config, heavier) >= estimator.tpot_s(config, workload)
    for heavier in (longer_input, larger):
        assert estimator.ttft_s(config, heavier) >= estimator.ttft_s(config, workload) * (1 - 1e-12)


@given(spec=models, config=configs, workload=workloads)
def test_a_faster_memory_never_makes_a_step_slower(
    spec: ModelSpec, config: DeploymentConfig, workload: Workload
) -> None:
    fast = replace(A6000, memory_bytes_per_s=2 * A6000.memory_bytes_per_s)
    slow_estimator, fast_estimator = RooflineEstimator(spec, A6000), RooflineEstimator(spec, fast)
    assert fast_estimator.tpot_s(config, workload) <= slow_estimator.tpot_s(config, workload)
    assert fast_estimator.ttft_s(config, workload) <= slow_estimator.ttft_s(config, workload)


@pytest.mark.parametrize(
    ("spec", "gpu", "tp", "workload", "measured_s"),
    [
        pytest.param(LLAMA_2_7B, "h100", 1, Workload(1, 1024, 1024), 7.188260, id="7b-h100-tp1"),
        pytest.param(LLAMA_2_7B, "h100", 4, Workload(16, 1024, 1024), 5.511748, id="7b-h100-tp4-batch16"),
        pytest.param(LLAMA_2_7B, "a100-40gb", 1, Workload(1, 1024, 1024), 12.791291, id="7b-a100-tp1"),
        pytest.param(LLAMA_2_70B, "h100", 4, Workload(64, 1024, 1024), 32.015390, id="70b-h100-tp4-batch64"),
        pytest.param(GPT_J, "h100", 1, Workload(32, 1024, 1024), 18.116375, id="gptj-h100-batch32-vllm"),
    ],
)
def test_measured_runs_lie_in_the_interval(
    spec: ModelSpec, gpu: str, tp: int, workload: Workload, measured_s: float
) -> None:
    """Whole batches, LLM-Inference-Bench (commit 4211f5d): TensorRT-LLM of mid-2024, the last row vLLM 0.5.3."""
    e2e = RooflineEstimator(spec, gpu_spec(gpu)).estimate(DeploymentConfig(tp=tp), workload).e2e_s
    assert e2e.low <= measured_s <= e2e.high


@pytest.mark.long
@pytest.mark.skipif("ISERVE_REFERENCE_DATA" not in os.environ, reason="ISERVE_REFERENCE_DATA is not set")
def test_the_calibrated_constants_are_what_the_script_fits() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "tests/bench/calibrate_roofline.py")],
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    published = done.stdout.partition("Constants to publish")[2].splitlines()
    printed = dict(line.strip().split(": ", 1) for line in published if ": " in line)
    names = {field.name for field in fields(RooflineConstants)}
    assert len(printed) == 14
    for name, text in printed.items():
        assert name in names
        values = [float(part) for part in text.partition(" (slow")[0].strip("()").split(",")]
        here = getattr(CALIBRATED, name)
        assert values == pytest.approx(list(here) if isinstance(here, tuple) else [here], rel=0.02), name
