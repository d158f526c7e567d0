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

import daemon
from daemon.engines.options import EngineOptions
from fingerprint.codec import to_json
from fingerprint.model_use import ModelUse
from tests.daemon.engines.vllm_worker_spec import LLAMA_8B, worker


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as vLLM's interpreter imports it."""
    for folder in ("hosted_worker", "vllm_worker"):
        monkeypatch.syspath_prepend(str(Path(daemon.__file__).parent / folder))
    yield importlib.import_module("hosted")
    for name in ("hosted", "iserve_hosted"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("config", "use", "added"),
    [
        (LLAMA_8B, ModelUse(), {}),
        (LLAMA_8B, ModelUse(trust_remote_code=True), {"trust_remote_code": True}),
        ({"model_type": "llava", "text_config": LLAMA_8B}, ModelUse(), {"language_model_only": True}),
    ],
)
def test_a_profile_is_of_text_alone_and_runs_code_with_permission_only(
    hosted: Any, tmp_path: Path, config: dict[str, Any], use: ModelUse, added: dict[str, bool]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = json.loads(to_json(replace(worker(tmp_path), options=EngineOptions(use=use))))
    engine = hosted.HostedVllm(spec)
    engine._fraction = lambda memory_bytes: 0.5
    order = {
        "max_batch": 1,
        "max_context_tokens": 640,
        "checkpoint": str(tmp_path),
        "kv": "16bit",
        "weights": "16bit",
        "kv_blocks": 41,
        "kv_block_tokens": 16,
    }
    arguments = engine._arguments(order)
    names = ("language_model_only", "trust_remote_code")
    assert {name: arguments[name] for name in names if name in arguments} == added
