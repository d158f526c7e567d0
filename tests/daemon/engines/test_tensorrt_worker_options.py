"""A fingerprint is started with the options of a deployment: two lists that cannot share code, held together."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from daemon.engines.external import PROFILING_PATH
from daemon.engines.tensorrt_llm.options import llm_options
from fingerprint.config import DeploymentConfig, KvFormat
from fingerprint.families import read_spec
from tests.daemon.engines.tensorrt_environment import CONFIG, make_spec

LLMAPI = Path(__file__).parent / "tensorrt_stand_in" / "library" / "llmapi.py"
# One limit of the cache is enough where nothing else is on it, and no statistics are asked for.
NOT_NEEDED = {"enable_iter_perf_stats"}
NOT_NEEDED_OF_CACHE = {"max_gpu_total_bytes"}


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The worker's module, with the settings of the stand-in in place of the engine's."""
    found = importlib.util.spec_from_file_location("tensorrt_llm.llmapi", LLMAPI)
    assert found is not None
    assert found.loader is not None
    llmapi = importlib.util.module_from_spec(found)
    found.loader.exec_module(llmapi)
    monkeypatch.syspath_prepend(PROFILING_PATH)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", ModuleType("tensorrt_llm"))
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", llmapi)
    for name in [name for name in sys.modules if name.startswith("iserve_profiling")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("iserve_profiling.tensorrt_llm")


def values(given: object) -> Any:
    return {name: str(value) if isinstance(value, StrEnum) else value for name, value in vars(given).items()}


@pytest.mark.parametrize("kv", [KvFormat.BITS16, KvFormat.FP8])
@pytest.mark.parametrize("step_tokens", [64, 640])
def test_a_fingerprint_is_started_as_a_deployment(hosted, tmp_path, kv, step_tokens) -> None:
    config = DeploymentConfig(kv=kv, engine="tensorrt-llm")
    spec = make_spec(tmp_path, config=config)
    limits = {"max_batched_tokens": step_tokens}
    spec = replace(spec, limits=replace(spec.limits, max_batched_tokens=step_tokens))
    deployed = llm_options(spec, read_spec(CONFIG))
    worker = hosted.TensorRtLlmProfilingEngine({"config": {"tp": 1, "pp": 1}, "limits": limits}, "x")
    order = {
        "checkpoint": str(tmp_path),
        "kv": str(kv),
        "max_batch": spec.limits.max_batch,
        "max_context_tokens": spec.limits.max_context_tokens,
    }
    started = worker._arguments(order, spec.limits.kv_tokens)
    cache, scheduler, graphs = (
        started.pop(name) for name in ("kv_cache_config", "scheduler_config", "cuda_graph_config")
    )
    of_cache = deployed.pop("kv_cache_config")
    assert values(scheduler) | deployed.pop("scheduler_config") == values(scheduler)
    assert values(graphs) | deployed.pop("cuda_graph_config") == values(graphs)
    assert deployed.pop("load_format") == started["load_format"] == "dummy"
    assert {n: v for n, v in deployed.items() if n not in NOT_NEEDED}.items() <= started.items()
    assert started.keys() - deployed.keys() == {"model", "load_format", "skip_tokenizer_init"}
    # As much room or more: that of its dry run, for one.
    assert cache.max_tokens >= max(of_cache.pop("max_tokens"), step_tokens)
    assert {n: v for n, v in of_cache.items() if n not in NOT_NEEDED_OF_CACHE}.items() <= values(cache).items()
    assert cache.enable_block_reuse is False  # bursts repeat their prompts
