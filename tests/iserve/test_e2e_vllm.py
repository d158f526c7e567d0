"""`iserve deploy --engine vllm`, the whole way: plan, placement, daemon, shim, wrapper, gateway.

Stand-ins are only what cannot be here: two GPUs of a strict NVML, the profile's numbers, and vLLM's server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from daemon.client import DaemonClient
from daemon.engines.registry import get_engine
from fingerprint.families import load_spec
from fingerprint.gpus import gpu_spec
from fingerprint.profile_plan import ProfilePlan
from iserve.controller.profiling_validity import machine_key
from iserve.demo import demo_model_path
from iserve.state.store import Store
from tests.daemon.engines.standin import make_vllm
from tests.fingerprint.synthetic_machine import SyntheticMachine, take_profile
from tests.golden_words import Golden
from tests.iserve.conftest import Installation
from tests.iserve.test_e2e_default_capacity import all_served, know_as_demo, long_model

__all__ = ["long_model"]

NVML = Path(__file__).parents[1] / "daemon" / "fake_nvml.py"
WORK = ("--input-tokens", "48", "--output-tokens", "16", "--batch", "2", "--context", "64")


def take_to_be_measured(installation: Installation, *batches: int) -> None:
    """Keep a profile of the demo model on vLLM, as if it had been measured here, with further ``batches``."""
    installation.run("up")
    record = installation.record("daemon")
    node = DaemonClient(record.url, record.token).node()
    installation.run("down")
    assert [device.kind for device in node.devices] == ["cuda", "cuda"]
    machine = SyntheticMachine(load_spec(demo_model_path()), engine="vllm")
    plan = ProfilePlan(budget_s=1e6, max_repeats=5)
    profile = take_profile(machine, replace(plan, batches=(*plan.batches, *batches)))
    here = {"device": gpu_spec("a6000"), "driver": node.driver, "versions": get_engine("vllm").versions()}
    profile = replace(profile, machine=replace(profile.machine, num_devices=2, **here))
    store = Store.open(installation.home / "state.db")
    store.put_profile(profile, machine_key(node, get_engine("vllm")))
    store.close()


def on_two_gpus(folder: Path, version: str = "0.24.0") -> dict[str, str]:
    """Settings of a home on a node with two GPUs and vLLM, both installed in ``folder``."""
    (folder / "nvml").mkdir(parents=True)
    (folder / "nvml" / "pynvml.py").write_bytes(NVML.read_bytes())
    python = make_vllm(folder / "env", version)
    (folder / "env" / "behaviour.json").write_text(json.dumps({"token_s": 0.02}))  # above a busy machine's noise
    python_path = os.pathsep.join(filter(None, (str(folder / "nvml"), os.environ.get("PYTHONPATH"))))
    return {"ISERVE_CPU_DEVICES": "", "ISERVE_VLLM_PYTHON": str(python), "PYTHONPATH": python_path}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state of such a home with the demo model profiled there, for further homes to begin with."""
    folder = tmp_path_factory.mktemp("measured")
    settings = on_two_gpus(folder / "node")
    installation = Installation(folder / "home", settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISERVE_VLLM_PYTHON", settings["ISERVE_VLLM_PYTHON"])
        try:
            take_to_be_measured(installation)
        finally:
            installation.clear()
    return installation.home / "state.db"


@pytest.fixture
def vllm_home(tmp_path: Path, measured: Path, make_installation: Callable[..., Any]) -> Any:
    """A home on a node with two GPUs and vLLM, the demo model profiled there."""
    return make_installation(measured, **on_two_gpus(tmp_path))


def test_deploy_serve_refuse_survive_remove(
    vllm_home: Any, until: Callable[..., Any], kill: Callable[[int], None], golden: Golden
) -> None:
    """A single way through the house; each step needs the one before."""
    deployed = vllm_home.json("deploy", "--engine", "vllm", "--name", "chat", *WORK)
    assert (deployed["status"], deployed["config"]["engine"]) == ("ready", "vllm")
    assert deployed["config"]["weights"] in ("16bit", "fp8")  # all that needs no checkpoint made beforehand

    client = vllm_home.openai()
    assert [model.id for model in client.models.list()] == ["chat"]
    whole = client.completions.create(model="chat", prompt="hello", max_tokens=8, temperature=0)
    assert whole.choices[0].text == "abcdefgh"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 8)
    chat = client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    assert chat.choices[0].message.content == "abc"
    pieces = client.completions.create(model="chat", prompt="x", max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == "abcd"

    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="chat", prompt="x" * 100, max_tokens=8)
    assert refused.value.status_code == 400
    assert "context length is 64" in refused.value.message
    assert refused.value.body["type"] == "BadRequestError"  # type: ignore[index]

    (worker_id,) = vllm_home.worker_pids()
    before = vllm_home.worker_pids()[worker_id]
    holds = {device_id: [[before, 3 * 2**20]] for device_id in vllm_home.json("ps")[0]["device_ids"]}
    (vllm_home.home.parent / "nvml/processes.json").write_text(json.dumps(holds))
    checked = vllm_home.json("verify", "chat", "--max-seconds", "6")["metrics"]
    (memory,) = (metric for metric in checked if metric["name"] == "memory_bytes_per_gpu")
    assert memory["measured"] == 3 * 2**20
    golden("cli", memory["method"])

    kill(before)
    until(lambda: vllm_home.worker_pids().get(worker_id) not in (None, before), "the worker is started again")
    until(lambda: "(ready)" in str(vllm_home.states()), "it is ready again")
    again = client.completions.create(model="chat", prompt="hello", max_tokens=2, temperature=0)
    assert again.choices[0].text == "ab"

    vllm_home.kill("controller")
    vllm_home.run("up")
    assert [row["name"] for row in vllm_home.json("ps")] == ["chat"]
    assert "Available routes" in vllm_home.run("logs", "chat").stdout
    vllm_home.run("rm", "chat")
    assert vllm_home.json("ps") == []
    assert not [line for line in vllm_home.processes().values() if "vllm.entrypoints" in line]


def test_by_default_many_and_long_requests_are_served_at_once(
    vllm_home: Any, long_model: Path, golden: Golden
) -> None:
    """The memory that serving them takes is promised and shown."""
    know_as_demo(vllm_home.home / "state.db", long_model)
    agents = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--engine-arg", "max-log-len=100")
    shown = vllm_home.run("deploy", long_model, "--engine", "vllm", "--name", "long", *agents).stdout
    golden("cli", [line for line in shown.splitlines() if "note: what --engine-arg" in line])
    capacity = vllm_home.get("/api/v1/deployments/long/plan")["capacity"]
    assert (capacity["requests_at_once"], capacity["context_tokens"]) == (256, 8192)
    (spec,) = vllm_home.home.glob("workers/*/spec.json")
    limits = json.loads(spec.read_text())["limits"]
    assert limits["memory_bytes_per_device"] == capacity["memory_bytes_per_gpu"]  # which the daemon promises
    command = next(line for line in vllm_home.processes().values() if "vllm.entrypoints" in line)
    assert "--max-num-seqs=256 " in command
    assert "--max-model-len=8192 " in command
    assert "--max-log-len=100" in command
    all_served(vllm_home, "long")
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = vllm_home.openai().chat.completions.create(
        model="long", messages=messages, tools=[tool], tool_choice="auto", max_tokens=4
    )
    message = answer.choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["look"]
    assert message.model_extra["reasoning"] == "thought"


def test_a_check_reads_the_blocks_that_vllm_reports_and_makes_up_no_memory(vllm_home: Any, golden: Golden) -> None:
    """Neither vLLM nor this NVML, whose GPUs hold nothing, tells what the worker takes."""
    work = ("--input-tokens", "48", "--output-tokens", "16", "--max-seconds", "6")
    document = vllm_home.json("verify", "iserve-demo", "--engine", "vllm", *work)
    assert (document["config"]["engine"], document["deployment"]) == ("vllm", None)
    found = {metric["name"]: metric for metric in document["metrics"]}
    assert found["ttft_s"]["measured"] > 0
    assert found["tpot_s"]["repeats"] >= 3
    kv = found["kv_tokens"]
    assert (kv["predicted"], kv["within_interval"]) == (64, True)
    assert kv["method"].endswith(f" {kv['measured'] / 16:.0f} blocks of 16")
    golden("cli", kv["method"])
    memory = found["memory_bytes_per_gpu"]
    assert (memory["measured"], memory["within_interval"]) == (None, None)
    assert "not reported" in memory["method"]
    assert not [line for line in vllm_home.processes().values() if "vllm.entrypoints" in line]
    candidates = vllm_home.json("plan", "iserve-demo", "--engine", "vllm", *work[:4])["candidates"]
    corrections = [c["estimate"]["correction"] for c in candidates if c["estimate"] is not None]
    assert {c["memory_bytes"] for c in corrections if c is not None} == {0}


def test_auto_is_vllm_on_gpus_and_a_profile_holds_for_one_driver(
    vllm_home: Any, tmp_path: Path, golden: Golden
) -> None:
    plan = vllm_home.json("plan", "iserve-demo", *WORK)
    assert {candidate["config"]["engine"] for candidate in plan["candidates"]} == {"vllm"}
    assert all("was not measured" in note for note in plan["notes"]), "nothing on engines or profiles"
    vllm_home.run("down")
    nvml = tmp_path / "nvml" / "pynvml.py"
    nvml.write_text(nvml.read_text().replace('"570.86.15"', '"575.57.08"'))
    refused = vllm_home.run("plan", "iserve-demo", *WORK, check=False)
    assert refused.returncode == 1
    assert "driver 570.86.15 (now 575.57.08)" in refused.stderr
    golden("cli", refused.stderr, numbers=False)
    torch = vllm_home.run("plan", "iserve-demo", "--engine", "torch", *WORK, check=False)
    golden("cli", torch.stderr, numbers=False)
    assert "not used" not in torch.stderr  # of the engine that is asked for there never was one
    assert "there is one on" not in torch.stderr  # that holds
