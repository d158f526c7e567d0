"""Every format that an engine's table allows of a checkpoint, as it may be stored, is launched by its adapter."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.devices import Device
from daemon.engines.registry import ENGINES
from daemon.engines.tensorrt_llm import adapter as tensorrt_llm
from daemon.engines.tensorrt_llm.options import llm_options
from daemon.engines.vllm import launch
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat
from fingerprint.errors import CheckpointError, ConfigError, IserveError, UnsupportedModelError
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec

GIB = 2**30
GPUS = {
    f"GPU-{i}": Device(device_id=f"GPU-{i}", index=i, kind="cuda", name="NVIDIA H200", total_bytes=140 * GIB)
    for i in range(4)
}
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
GPT_OSS = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **SIZES, "sliding_window": 128}
GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 2}

groups = st.sampled_from([32, 64, 128, -1])
compressed = st.builds(
    lambda form, bits, number, strategy, group: {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": bits, "type": number, "strategy": strategy, "group_size": group},
            }
        },
    },
    st.sampled_from(["pack-quantized", "float-quantized", "int-quantized", "naive-quantized"]),
    st.sampled_from([4, 8]),
    st.sampled_from(["int", "float"]),
    st.sampled_from(["group", "channel", "tensor"]),
    groups,
)
fp8 = st.builds(
    lambda block, scheme: {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block},
    st.sampled_from([None, [128, 128], [64, 128], [128, 64]]),
    st.sampled_from(["dynamic", "static"]),
)
four_bits = st.builds(
    lambda method, bits, group: {"quant_method": method, "bits": bits, "group_size": group},
    st.sampled_from(["gptq", "awq"]),
    st.sampled_from([4, 8]),
    groups,
)
stored = st.one_of(st.none(), compressed, fp8, four_bits, st.just({"quant_method": "mxfp4"}))
configs = st.builds(
    DeploymentConfig,
    tp=st.sampled_from([1, 2, 4]),
    weights=st.sampled_from(WeightFormat),
    kv=st.sampled_from(KvFormat),
    pruning=st.sampled_from(Pruning),
)


def worker(folder: Path, config: DeploymentConfig) -> WorkerSpec:
    return WorkerSpec(
        worker_id="w",
        served_model="m",
        checkpoint=str(folder),
        config=config,
        stages=(StageAssignment(device_ids=tuple(GPUS)[: config.tp], num_layers=SIZES["num_hidden_layers"]),),
        limits=WorkerLimits(
            max_batch=2,
            max_batched_tokens=2048,
            max_context_tokens=256,
            kv_tokens=512,
            memory_bytes_per_device=35 * GIB,
        ),
        port=8001,
        dummy_weights=True,
    )


def launched(spec: WorkerSpec) -> None:
    """Build the launch, as far as the adapter goes before a process starts; raises as it does."""
    used = {device_id: GPUS[device_id] for device_id in spec.stages[0].device_ids}
    if spec.config.engine == "vllm":
        launch.arguments(spec, launch.read_model(spec), used)
    else:
        llm_options(spec, tensorrt_llm._read_model(spec, used))


def table_of(engine: str) -> EngineCapabilities:
    """Return the table of a checkpoint as it is; none of it was prepared for the test."""
    return ENGINES[engine].capabilities().unprepared()


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
@settings(max_examples=150, deadline=None)
@given(quantization=stored, config=configs)
def test_what_the_table_allows_the_adapter_launches(
    engine: str, quantization: dict[str, Any] | None, config: DeploymentConfig
) -> None:
    experts = quantization is not None and quantization["quant_method"] == "mxfp4"
    model = (GPT_OSS if experts else LLAMA) | ({"quantization_config": quantization} if quantization else {})
    try:
        spec = read_spec(model)
    except (ConfigError, UnsupportedModelError):
        return  # nothing is planned of it
    if spec.stored is not None:  # else hardly one example is allowed anywhere
        config = replace(config, weights=WeightFormat.STORED, pruning=Pruning.NONE)
    config = replace(config, engine=engine)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(model))
        if table_of(engine).refusal(spec, config, gpu_spec("h200")) is None:
            launched(worker(Path(name), config))
        elif spec.stored is not None and engine == "tensorrt-llm" and config.kv is KvFormat.BITS16:
            with pytest.raises(IserveError):  # and what it refuses is not read as something else
                launched(worker(Path(name), config))


@pytest.mark.parametrize(
    ("engine", "quantization"),
    [
        ("tensorrt-llm", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("vllm", {"quant_method": "fp8", "activation_scheme": "static"}),
        ("vllm", {"quant_method": "gptq", "bits": 4, "group_size": 128}),
        ("vllm", {"quant_method": "awq", "bits": 4, "group_size": 128}),
    ],
)
def test_some_of_what_is_stored_is_allowed(engine: str, quantization: dict[str, Any], tmp_path: Path) -> None:
    """Else the property would hold of nothing."""
    model = LLAMA | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = DeploymentConfig(engine=engine, weights=WeightFormat.STORED)
    assert table_of(engine).refusal(read_spec(model), config, gpu_spec("h200")) is None
    launched(worker(tmp_path, config))
    with pytest.raises((CheckpointError, ConfigError)):
        launched(worker(tmp_path, replace(config, weights=WeightFormat.BITS16)))


@pytest.mark.slow
def test_every_no_of_a_table_has_its_reason() -> None:
    """Whatever the architecture, format, degree or GPU: a bare "does not run" leaves nothing to go by."""
    llama = read_spec(LLAMA)
    bare = set()
    tables = [engine.capabilities().architectures for engine in ENGINES.values()]
    names = sorted({"OfTomorrow"}.union(*(table.listed | table.reasons for table in tables)))
    for name, engine in ENGINES.items():
        table = engine.capabilities()
        for spec, gpu in product((replace(llama, architecture=n) for n in names), ("a6000", "h200")):
            of_formats = [DeploymentConfig(weights=w, engine=name) for w in WeightFormat]
            of_formats += [DeploymentConfig(kv=k, engine=name) for k in KvFormat]
            of_formats += [DeploymentConfig(pruning=p, engine=name) for p in Pruning]
            of_degrees = [
                DeploymentConfig(tp=tp, pp=pp, engine=name) for tp, pp in ((2, 1), (1, 2), (16, 1), (1, 16))
            ]
            for config in (*of_formats, *of_degrees):
                bare.add(table.refusal(spec, config, gpu_spec(gpu)))
            bare.add(table.lora_refusal(spec, DeploymentConfig(engine=name), gpu_spec(gpu)))
    told = {said for said in bare if said is not None and ": " not in said}
    (of_stored,) = told  # weights=stored of one that is not quantized
    assert of_stored.endswith("in 16 bits")


@given(quantization=st.one_of(compressed, fp8, four_bits))
def test_the_embedded_engine_is_offered_nothing_quantized(quantization: dict[str, Any]) -> None:
    """The engine's own reader refuses every such checkpoint."""
    try:
        spec = read_spec(LLAMA | {"quantization_config": quantization})
    except (ConfigError, UnsupportedModelError):
        return
    for weights in WeightFormat:
        assert table_of("torch").refusal(spec, DeploymentConfig(weights=weights), gpu_spec("h200")) is not None
