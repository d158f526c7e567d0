"""`iserve deploy --engine tensorrt-llm`: profile, plan and deployment against stand-ins, nothing stored before.

Stand-ins are what cannot be here: a GPU of a strict NVML, trtllm-serve and the package tensorrt_llm. The step
timer, the profiling worker, proxy, wrapper, shim, daemon, controller, planner and gateway are the real ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engines.tensorrt_environment import make_tensorrt_llm
from tests.daemon.engines.vllm_stand_in import costs
from tests.iserve.test_e2e_variant_burst import write_adapters

pytestmark = pytest.mark.long

NVML = Path(__file__).parents[1] / "daemon" / "fake_nvml.py"
DEMO, LAYERS = "iserve-demo", 8
WORK = ("--input-tokens", "48", "--output-tokens", "16", "--batch", "2")
MARKS = ("iserve_profiling.tensorrt_llm", "trtllm-serve", "spawn_main")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    make_tensorrt_llm(tmp_path / "env")
    return tmp_path / "env"


@pytest.fixture
def home(tmp_path: Path, environment: Path, make_installation: Callable[..., Any]) -> Any:
    """A home on a node with one GPU and TensorRT-LLM, nothing ever measured."""
    (tmp_path / "nvml").mkdir()
    (tmp_path / "nvml" / "pynvml.py").write_text(NVML.read_text() + "\ndel GPUS[1:]\n")
    python_path = os.pathsep.join(filter(None, (str(tmp_path / "nvml"), os.environ.get("PYTHONPATH"))))
    return make_installation(
        None,
        ISERVE_CPU_DEVICES="",
        ISERVE_TENSORRT_LLM_PYTHON=str(environment / "bin" / "python"),
        ISERVE_PROFILE_SECONDS="3",
        PYTHONPATH=python_path,
    )


def of_engine(home: Any) -> list[str]:
    return [line for line in home.processes().values() if any(mark in line for mark in MARKS)]


def test_a_deployment_takes_the_profile_that_is_missing_and_serves_by_it(home: Any) -> None:
    """A single way through the house; each step needs the one before."""
    deployed = home.json("deploy", DEMO, "--engine", "tensorrt-llm", "--name", "chat", *WORK)
    assert (deployed["status"], deployed["config"]["engine"]) == ("ready", "tensorrt-llm")
    assert not [line for line in of_engine(home) if "iserve_profiling.tensorrt_llm" in line]
    assert [row["engine"] for row in home.get("/api/v1/profiles")] == ["tensorrt-llm"]
    answer = home.openai().completions.create(model="chat", prompt="hello", max_tokens=8, temperature=0)
    assert (answer.model, answer.usage.completion_tokens) == ("chat", 8)
    home.run("rm", "chat")
    assert of_engine(home) == []

    asked = {"tp": 1, "pp": 1, "weights": "16bit", "kv": "16bit", "pruning": "none"}
    planned = home.json("plan", DEMO, "--engine", "tensorrt-llm", *WORK)
    (measured,) = (c["estimate"] for c in planned["candidates"] if asked.items() <= c["config"].items())
    assert measured["ttft_s"]["source"] == "extrapolated"
    weights = costs.OTHER_BYTES + LAYERS * costs.LAYER_BYTES
    held = weights + costs.ACTIVATION_BYTES + costs.CONTEXT_BYTES
    assert held <= measured["memory_bytes_per_gpu"] <= 1.1 * held
    assert "contract-tested against its documentation, never run" in home.run("doctor", check=False).stdout


def test_an_adapter_is_served_next_to_its_base_and_other_content_by_itself(home: Any, tmp_path: Path) -> None:
    """Through plan, launch, gateway and proxy; the stand-in's tokens name the content that it read."""
    slots = ("--variants", "2", "--rank", "8")
    home.json("deploy", DEMO, "--engine", "tensorrt-llm", "--name", "chat", *WORK, *slots)
    one, other = write_adapters(tmp_path / "adapters", 2)

    def answered(model: str) -> str:
        done = home.openai().completions.create(model=model, prompt="hello", max_tokens=2, temperature=0)
        assert done.model == model
        return done.choices[0].text

    for adapter in (one, other, one):
        added = home.json("variant", "add", "style", "--base", "chat", adapter, "--replace")
        assert added["deployments"] == ["chat"]
        weights = home.home / "variants" / "loadable" / added["content_hash"] / "adapter_model.safetensors"
        text = answered("style")
        assert text == f"tok{sha256(weights.read_bytes()).hexdigest()[:8]} " * 2
    assert answered("chat") == "tok tok "


def test_no_room_for_the_cache_is_told_with_what_to_change(home: Any, environment: Path) -> None:
    (environment / "behaviour.json").write_text(json.dumps({"no_memory_for_kv": True}))
    failed = home.run("profile", DEMO, "--engine", "tensorrt-llm", "--max-seconds", "3", check=False)
    assert failed.returncode == 1
    assert "its KV cache did not get its memory; give it" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert of_engine(home) == []
    assert home.get("/api/v1/profiles") == []


def test_a_model_that_it_does_not_run_is_refused_before_a_start(home: Any, tmp_path: Path) -> None:
    config = {"model_type": "gptj", "architectures": ["GPTJForCausalLM"], "vocab_size": 1000}
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "rotary_dim": 16}
    (tmp_path / "gptj").mkdir()
    (tmp_path / "gptj" / "config.json").write_text(json.dumps(config | sizes))
    refused = home.run("profile", tmp_path / "gptj", "--engine", "tensorrt-llm", check=False)
    assert refused.returncode == 1
    assert "only its older engine flow" in refused.stderr
