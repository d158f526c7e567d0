"""An environment that TensorRT-LLM seems to be installed in, checkpoints for it, and GPUs that are not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml

from daemon.devices import Device
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig
from tests.daemon.engines.standin import make_environment, set_version

HERE = Path(__file__).parent
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
}
VARIABLE = "ISERVE_TENSORRT_LLM_PYTHON"
GPUS = ("GPU-aaaa", "GPU-bbbb")  # those of the fake NVML
_SCRIPT = """\
import sys
sys.path.insert(0, {here!r})
from tensorrt_stand_in.__main__ import main
sys.exit(main())
"""


def make_tensorrt_llm(folder: Path, version: str = "1.2.1") -> Path:
    """A virtual environment with the metadata of such an installation; ``trtllm-serve`` and the package stand in.

    Returns:
        Its Python.
    """
    modules = {
        "pynvml": HERE.parent / "fake_nvml.py",
        "torch": HERE / "vllm_stand_in" / "torch_on_paper.py",
        "tensorrt_llm.costs": HERE / "vllm_stand_in" / "costs.py",
    }
    python = make_environment(folder, modules, distribution="tensorrt-llm", version=version)
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(HERE / "tensorrt_stand_in" / "library", packages / "tensorrt_llm", dirs_exist_ok=True)
    set_version(packages, "torch", "2.9.1")
    set_version(packages, "transformers", "4.57.3")
    (packages / "stand_in.pth").write_text(f"{Path(yaml.__file__).parents[1]}\n")  # PyYAML, for the stand-in
    (folder / "bin" / "trtllm-serve").write_text(_SCRIPT.format(here=str(HERE)))
    return python


def make_checkpoint(folder: Path, *, modelopt: dict[str, object] | None = None, **config: object) -> Path:
    """A checkpoint without weights; ``modelopt``: the quantization of its hf_quant_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer_config.json").write_text("{}")
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": modelopt}))
    return folder


def make_spec(checkpoint: Path, *, layers: tuple[int, ...] = (6,), **changes: object) -> WorkerSpec:
    """A worker of 8 sequences of 100 tokens; ``layers`` per stage, stages on the GPUs in order."""
    config = changes.pop("config", DeploymentConfig(pp=len(layers), engine="tensorrt-llm"))
    assert isinstance(config, DeploymentConfig)
    stages = tuple(
        StageAssignment(device_ids=GPUS[stage * config.tp : (stage + 1) * config.tp], num_layers=number)
        for stage, number in enumerate(layers)
    )
    limits = WorkerLimits(
        max_batch=8,
        max_batched_tokens=640,
        max_context_tokens=100,
        kv_tokens=800,
        memory_bytes_per_device=1 << 30,
    )
    values = {
        "worker_id": "w1",
        "served_model": "m",
        "checkpoint": str(checkpoint),
        "config": config,
        "stages": stages,
        "limits": limits,
        "dummy_weights": True,
    }
    return WorkerSpec(**(values | changes))


def devices(name: str = "NVIDIA RTX A6000") -> dict[str, Device]:
    return {
        gpu: Device(device_id=gpu, index=index, kind="cuda", name=name, total_bytes=48 << 30)
        for index, gpu in enumerate(GPUS)
    }


def config(**changes: object) -> DeploymentConfig:
    return DeploymentConfig(engine="tensorrt-llm", **changes)
