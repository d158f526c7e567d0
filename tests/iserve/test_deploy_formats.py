"""A deploy chooses only formats that its engine has for the checkpoint as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.engines.registry import get_engine
from daemon.status import DeviceStatus, NodeStatus
from fingerprint.config import Pruning, WeightFormat
from fingerprint.gpus import gpu_spec
from iserve.controller import deployer as module
from iserve.controller.deployer import Deployer
from iserve.model_source import ModelSource
from iserve.planning.estimator_factory import estimator_for
from iserve.planning.pipeline import PlanOptions
from iserve.settings import Settings
from planner.intent import Intent, Quality
from tests.fingerprint.synthetic_machine import SyntheticMachine, llama, take_profile

GIB = 2**30


@pytest.mark.parametrize("engine", ["tensorrt-llm", "vllm"])
def test_what_needs_a_prepared_checkpoint_is_listed_and_not_chosen(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines take fp8 or 4 bits from checkpoints that hold them; a deploy has the 16-bit one."""
    machine = SyntheticMachine(llama())
    measured = take_profile(machine)
    measured = replace(measured, engine=engine, machine=replace(measured.machine, device=gpu_spec("h200-sxm")))
    device = DeviceStatus(
        device_id="GPU-a",
        index=0,
        kind="cuda",
        name="NVIDIA H200",
        total_bytes=141 * GIB,
        free_bytes=140 * GIB,
        load_fraction=0.0,
    )
    node = NodeStatus(node_id="n", observed_at=0.0, devices=(device,), workers=())
    monkeypatch.setattr(module, "ask_daemon", lambda *_arguments: node)
    nothing: Any = None
    profiler: Any = SimpleNamespace(estimator=lambda profile, _engine, _node: estimator_for(profile))
    deployer = Deployer(Settings(home=tmp_path), nothing, profiler, nothing, nothing, nothing)
    source = ModelSource(name="m", directory=tmp_path, has_weights=True, spec=machine.spec)
    planned = deployer.plan(source, get_engine(engine), measured, PlanOptions(intent=Intent(quality=Quality.ANY)))
    needing = {WeightFormat.INT4, WeightFormat.GPTQ4} | (
        {WeightFormat.INT8, WeightFormat.FP8} if engine == "tensorrt-llm" else set()
    )
    listed = [c for c in planned.document.candidates if c.config.weights in needing]
    assert {c.config.weights for c in listed} == needing
    assert not any(c.feasible for c in listed)
    assert planned.best is not None
    assert planned.best.config.weights not in needing
    if engine == "tensorrt-llm":
        assert planned.best.config.pruning is Pruning.NONE
        assert any("quantized beforehand" in (c.reason or "") for c in listed)
