"""Loads of adapters next to vLLM's steps: the setting, launches with it, and the plug-in in vLLM's own code."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.registry import get_engine
from daemon.engines.vllm import launch
from daemon.engines.vllm.variant_plug_in import ADAPTER_KERNELS, BACKGROUND_LOADS, PLUG_IN_PATH
from daemon.worker_spec import WorkerSpec
from fingerprint.config import SlotFormat
from fingerprint.errors import EngineError
from iserve.settings import load_settings
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_delta_names import PLUGIN, recorded
from tests.daemon.engines.vllm_worker_spec import DEVICES, LLAMA_8B, profile_load, worker
from tests.daemon.variant_kernels import variant_module

settings = variant_module("settings")
CASES = re.findall(
    r"^@case\ndef (\w+)", (Path(__file__).parent / "vllm_adapter_loads_on_cpu.py").read_text(), re.MULTILINE
)
SITE = os.environ.get("ISERVE_VLLM_SITE", "")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., WorkerSpec]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"dtype": "bfloat16"}))
    return lambda **config: replace(worker(tmp_path, **config), dummy_weights=True)


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADAPTER_KERNELS, raising=False)
    monkeypatch.setenv(BACKGROUND_LOADS, "1")


def additional(spec: WorkerSpec) -> dict[str, object]:
    words = launch.arguments(spec, launch.read_model(spec), DEVICES)
    given = [word.partition("=")[2] for word in words if word.startswith("--additional-config=")]
    found: dict[str, object] = json.loads(given[0]) if given else {}
    return found


def test_slots_of_adapters_on_one_gpu_have_the_setting(
    make: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = settings.adapter_loads_config()
    slots = {"adapter_slots": 8, "adapter_rank": 16}
    assert settings.wants_background_adapters(ours)
    assert additional(make(**slots)) == ours
    assert additional(make()) == {}
    assert additional(make(adapter_slots=8, delta_format=SlotFormat.INT2)).keys() == {settings.KEY}
    assert additional(make(**slots, delta_format=SlotFormat.INT2)).keys() == {settings.KEY, *ours}
    assert additional(make(**slots, tp=2)) == {}
    monkeypatch.setenv(ADAPTER_KERNELS, "1")
    assert additional(make(**slots)) == settings.adapters_config() | ours
    monkeypatch.delenv(ADAPTER_KERNELS)
    monkeypatch.delenv(BACKGROUND_LOADS)
    assert additional(make(**slots)) == {}


def test_a_profile_times_loads_that_are_waited_for(make: Callable[..., WorkerSpec]) -> None:
    spec = make()
    order = profile_load(spec, adapter_slots=8, adapter_rank=16)
    assert not get_engine("vllm").profile_order(spec, order).additional_config


def test_other_releases_are_refused_with_the_setting(
    make: Callable[..., WorkerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make(adapter_slots=8, adapter_rank=16)
    for version, is_refused in (("0.33.0", False), ("0.26.0", True)):
        monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / version, version)))
        vllm = get_engine("vllm")
        reasons = [one.reason for one in vllm.capabilities().exclusions if one.has_slots]
        assert any(BACKGROUND_LOADS in one for one in reasons) == is_refused
        assert vllm.capabilities().adapters_aside != is_refused
        if is_refused:
            with pytest.raises(EngineError, match=BACKGROUND_LOADS):
                vllm.command(spec, tmp_path, DEVICES)
        else:
            argv = vllm.command(spec, tmp_path, DEVICES).argv
            assert PLUG_IN_PATH in argv[argv.index("--python-path") + 1]


def test_the_setting_is_one_of_iserves() -> None:
    assert load_settings({BACKGROUND_LOADS: "1"}).vllm_background_loads
    with pytest.raises(ValueError, match="iserve_adapter_loads"):
        settings.wants_background_adapters({"iserve_adapter_loads": {"background": 2}})


def test_without_the_setting_loads_stop_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_engine("vllm").capabilities().adapters_aside
    monkeypatch.delenv(BACKGROUND_LOADS)
    assert not get_engine("vllm").capabilities().adapters_aside


def test_the_plug_in_uses_names_that_are_recorded() -> None:
    """The contract with vLLM's sources has each private name of its managers that the plug-in calls."""
    source = ast.parse((PLUGIN / "vllm_aside.py").read_text())
    names = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    theirs: set[str] = set()
    for name, found in recorded()["classes"].items():
        if name.startswith("lora/") and "Manager" in name:
            theirs |= {*found["methods"], *found["attributes"]}
    assert {
        *("_active_adapters", "_add_adapter", "_apply_adapters", "_create_merged_loras_inplace"),
        *("_deactivate_adapter", "_get_lora_layer_weights", "_load_adapter", "_lora_model_cls"),
        *("_registered_adapters", "deactivate_adapter", "is_pooling_model", "lora_index_to_id", "modules"),
    } <= names & theirs


@pytest.mark.long
@pytest.mark.skipif(
    not SITE, reason="ISERVE_VLLM_SITE names no folder with vLLM 0.33.0 and the Python of its dependencies"
)
class TestInVllmsOwnCode:
    @pytest.fixture(scope="class")
    @classmethod
    def errors(cls) -> dict[str, str]:
        """Return what failed in each case; empty: nothing did."""
        command = (sys.executable, "-m", "tests.daemon.engines.vllm_adapter_loads_on_cpu", SITE)
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        assert done.returncode == 0, done.stderr[-2000:]
        return {line["case"]: line["error"] for line in lines}

    def test_there_are_cases(self) -> None:
        assert len(CASES) >= 6

    @pytest.mark.parametrize("name", CASES)
    def test_a_case(self, errors: dict[str, str], name: str) -> None:
        assert errors[name] == ""
