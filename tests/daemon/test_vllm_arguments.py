"""Arguments of ``vllm.LLM`` in the profiling worker, made from the worker's spec as the daemon writes it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from daemon.engine_options import EngineOptions
from daemon.engines.external import PROFILING_PATH
from daemon.engines.registry import get_engine
from daemon.engines.vllm.cache import in_blocks
from daemon.engines.vllm.variant_plug_in import additional_config
from daemon.profile_client import WorkerProfileTarget
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, KvFormat, SlotFormat
from fingerprint.engines import graph_sizes
from fingerprint.errors import EngineError
from fingerprint.model_use import ModelUse
from tests.daemon.engines.vllm_worker_spec import LLAMA_8B, profile_load, worker


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as vLLM's interpreter imports it."""
    monkeypatch.syspath_prepend(PROFILING_PATH)
    yield importlib.import_module("iserve_profiling.vllm")
    for name in [name for name in sys.modules if name.startswith("iserve_profiling")]:
        del sys.modules[name]


_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP8_AND_ITS_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _FP8}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}
LARGEST_GRAPH = {"max_cudagraph_capture_size": 512}
MIXTURE = LLAMA_8B | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
MIXTURE |= {"num_local_experts": 8, "num_experts_per_tok": 2}
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
        pytest.param(MIXTURE, ModelUse(), {}, id="mixture"),
    ],
)
def test_a_profile_is_of_text_alone_and_runs_code_with_permission_only(
    hosted: Any, tmp_path: Path, config: dict[str, Any], use: ModelUse, added: dict[str, bool]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = replace(worker(tmp_path), options=EngineOptions(use=use))
    spec = replace(spec, limits=replace(spec.limits, graph_tokens=4096 if config is MIXTURE else 512))
    order = in_blocks(spec, profile_load(spec))
    engine = hosted.VllmProfilingEngine(json.loads(to_json(spec)))
    engine._fraction = lambda memory_bytes: 0.5
    arguments = engine._arguments(json.loads(to_json(order)))
    names = ("language_model_only", "trust_remote_code")
    assert {name: arguments[name] for name in names if name in arguments} == added
    assert arguments["num_gpu_blocks_override"] > 640 // arguments["block_size"]
    graphs = {"cudagraph_capture_sizes": [*graph_sizes(640)]} if config is MIXTURE else LARGEST_GRAPH
    assert arguments["compilation_config"] == graphs


@pytest.mark.parametrize("quantization", [None, FP8_AND_ITS_CACHE], ids=["plain", "fp8"])
@pytest.mark.parametrize(("kv", "dtype"), [("16bit", ""), ("fp8", "fp8"), ("int8", "int8_per_token_head")])
def test_a_profile_has_the_cache_that_it_is_of(
    hosted: Any, tmp_path: Path, quantization: dict[str, Any] | None, kv: str, dtype: str
) -> None:
    """Whatever cache the checkpoint asks for."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": quantization}))
    spec = worker(tmp_path)
    order = in_blocks(spec, replace(profile_load(spec), kv=KvFormat(kv)))
    engine = hosted.VllmProfilingEngine(json.loads(to_json(spec)))
    engine._fraction = lambda memory_bytes: 0.5
    found = engine._arguments(json.loads(to_json(order)))["kv_cache_dtype"]
    assert found == (dtype or ("auto" if quantization is None else "bfloat16"))


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_profile_divides_experts_as_a_deployment_does(
    hosted: Any, tmp_path: Path, expert_parallel: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    spec = worker(tmp_path, tp=2, expert_parallel=expert_parallel)
    order = in_blocks(spec, profile_load(spec))
    engine = hosted.VllmProfilingEngine(json.loads(to_json(spec)))
    engine._fraction = lambda memory_bytes: 0.5
    arguments = engine._arguments(json.loads(to_json(order)))
    assert arguments.get("enable_expert_parallel", False) is expert_parallel
    assert arguments["compilation_config"]["pass_config"] == {"fuse_allreduce_rms": False}


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_session_s_worker_is_launched_so(tmp_path: Path, expert_parallel: bool) -> None:
    launched: list[DeploymentConfig] = []

    def launch(spec: WorkerSpec) -> Any:
        launched.append(spec.config)
        raise EngineError("no machine here")

    target = WorkerProfileTarget(
        launch, checkpoint=tmp_path, device_ids=["GPU-0", "GPU-1"], limits=worker(tmp_path).limits, engine="vllm"
    )
    with pytest.raises(EngineError):
        target.open(tp=2, pp=1, expert_parallel=expert_parallel)
    assert launched == [DeploymentConfig(tp=2, engine="vllm", expert_parallel=expert_parallel)]


def order_with_slots(folder: Path, **slots: Any) -> tuple[Any, dict[str, Any]]:
    """Return a worker's spec, and the order of a load as the daemon's side sends it."""
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    spec = worker(folder)
    order = get_engine("vllm").profile_order(spec, profile_load(spec, **slots))
    return spec, json.loads(to_json(order))


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        pytest.param({}, {}, id="none"),
        pytest.param(
            {"adapter_slots": 8, "adapter_rank": 16}, {"max_loras": 8, "max_lora_rank": 16}, id="adapters"
        ),
        pytest.param(
            {"adapter_slots": 4, "delta_format": SlotFormat.INT2},
            {"max_loras": 4, "max_lora_rank": 1},
            id="deltas",
        ),
    ],
)
def test_slots_are_those_of_a_deployment(
    hosted: Any, tmp_path: Path, slots: dict[str, Any], expected: dict[str, Any]
) -> None:
    spec, order = order_with_slots(tmp_path, **slots)
    engine = hosted.VllmProfilingEngine(json.loads(to_json(spec)))
    engine._fraction = lambda memory_bytes: 0.5
    given = engine._arguments(order)
    names = {"enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "additional_config"}
    if slots:
        expected = expected | {"enable_lora": True, "max_cpu_loras": slots["adapter_slots"]}
    if "delta_format" in slots:
        served = DeploymentConfig(engine="vllm", adapter_slots=4, delta_format=SlotFormat.INT2)
        expected = expected | {"additional_config": additional_config(served)}
    assert {name: given[name] for name in names & set(given)} == expected


class AskedAgain:
    """Engine that reads a delta while it is asked for it."""

    def __init__(self, errors: list[Exception | None]) -> None:
        self.errors, self.asked = errors, list[int]()

    def add_lora(self, request: Any) -> bool:
        self.asked.append(request.lora_int_id)
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return True


@pytest.fixture
def loading(hosted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes a worker whose engine answers loads as given."""
    request = SimpleNamespace(LoRARequest=lambda name, number, folder: SimpleNamespace(lora_int_id=number))
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    monkeypatch.setattr(hosted, "_ASK_S", 0.0)
    spec, _ = order_with_slots(tmp_path)

    def made(errors: list[Exception | None]) -> Any:
        engine = hosted.VllmProfilingEngine(json.loads(to_json(spec)))
        engine._llm = SimpleNamespace(llm_engine=AskedAgain(errors))
        return engine

    return made


def test_a_delta_is_asked_for_until_it_is_read(loading: Any) -> None:
    being_read = Exception("Call to add_lora method failed: delta variant-1 is still being read: ask for it again")
    engine = loading([being_read, being_read, None, None])
    assert len(engine.load_variants({"folders": ["/a", "/b"]})) == 2
    assert engine._llm.llm_engine.asked == [1, 1, 1, 2]
    assert engine.num_variants == 2


def test_a_variant_that_cannot_be_loaded_ends_the_load(hosted: Any, loading: Any) -> None:
    engine = loading([None, Exception("Call to add_lora method failed: no such tensor")])
    base = importlib.import_module("iserve_profiling.base")
    with pytest.raises(base.WorkError, match="no such tensor"):
        engine.load_variants({"folders": ["/a", "/b"]})
    assert engine.num_variants == 1
