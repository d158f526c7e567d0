"""Arguments of ``vllm.LLM`` in the profiling worker, made from the worker's spec as the daemon writes it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.engine_options import EngineOptions
from daemon.engines.external import PROFILING_PATH
from daemon.engines.vllm.cache import in_blocks
from daemon.profile_messages import ProfileLoad
from fingerprint.codec import to_json
from fingerprint.config import KvFormat, WeightFormat
from fingerprint.model_use import ModelUse
from tests.daemon.engines.vllm_worker_spec import LLAMA_8B, worker


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as vLLM's interpreter imports it."""
    monkeypatch.syspath_prepend(PROFILING_PATH)
    yield importlib.import_module("iserve_profiling.vllm")
    for name in [name for name in sys.modules if name.startswith("iserve_profiling")]:
        del sys.modules[name]


TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
IN_A_PART = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **TOWER},
}
FLAT = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    **TEXT,
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
    },
}


@pytest.mark.parametrize(
    ("config", "use", "added"),
    [
        pytest.param(LLAMA_8B, ModelUse(), {}, id="text"),
        pytest.param(LLAMA_8B, ModelUse(trust_remote_code=True), {"trust_remote_code": True}, id="own-code"),
        pytest.param(IN_A_PART, ModelUse(), {"language_model_only": True}, id="text-in-a-part"),
        pytest.param(FLAT, ModelUse(), {"language_model_only": True}, id="flat"),
    ],
)
def test_a_profile_is_of_text_alone_and_runs_code_with_permission_only(
    hosted: Any, tmp_path: Path, config: dict[str, Any], use: ModelUse, added: dict[str, bool]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = replace(worker(tmp_path), options=EngineOptions(use=use))
    order = in_blocks(
        spec,
        ProfileLoad(
            checkpoint=str(tmp_path),
            weights=WeightFormat.BITS16,
            kv=KvFormat.BITS16,
            layers_per_stage=tuple(stage.num_layers for stage in spec.stages),
            max_batch=1,
            max_context_tokens=640,
        ),
    )
    engine = hosted.VllmProfilingEngine(json.loads(to_json(spec)))
    engine._fraction = lambda memory_bytes: 0.5
    arguments = engine._arguments(json.loads(to_json(order)))
    names = ("language_model_only", "trust_remote_code")
    assert {name: arguments[name] for name in names if name in arguments} == added
    assert arguments["num_gpu_blocks_override"] > 640 // arguments["block_size"]
