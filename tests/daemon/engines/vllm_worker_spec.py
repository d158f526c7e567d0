"""A worker of Llama-3.1-8B on up to four H200s, as vLLM's adapter is given it."""

from __future__ import annotations

from pathlib import Path

from daemon.devices import Device
from daemon.profile_messages import ProfileLoad
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat

GIB = 2**30
# Llama-3.1-8B: 8 KV heads of 128, 32 layers
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
DEVICES = {
    f"GPU-{index}": Device(
        device_id=f"GPU-{index}", index=index, kind="cuda", name="NVIDIA H200", total_bytes=140 * GIB
    )
    for index in range(4)
}


def worker(folder: Path, *, layers=(32,), tp=1, limits=None, **config: object) -> WorkerSpec:
    ids = iter(DEVICES)
    return WorkerSpec(
        worker_id="w1",
        served_model="chat",
        checkpoint=str(folder),
        config=DeploymentConfig(engine="vllm", tp=tp, pp=len(layers), **config),
        stages=tuple(
            StageAssignment(device_ids=tuple(next(ids) for _ in range(tp)), num_layers=count) for count in layers
        ),
        limits=limits
        or WorkerLimits(
            max_batch=8,
            max_batched_tokens=8192,
            max_context_tokens=640,
            kv_tokens=8 * 640,
            memory_bytes_per_device=35 * GIB,
        ),
        port=8001,
    )


def profile_load(spec: WorkerSpec, **slots: object) -> ProfileLoad:
    """Return the order to load what ``spec`` has for one sequence, with so many slots for variants."""
    return ProfileLoad(
        checkpoint=spec.checkpoint,
        weights=WeightFormat.BITS16,
        kv=KvFormat.BITS16,
        layers_per_stage=tuple(stage.num_layers for stage in spec.stages),
        max_batch=1,
        max_context_tokens=640,
        **slots,
    )
