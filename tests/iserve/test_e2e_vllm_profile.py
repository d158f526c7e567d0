"""`iserve profile --engine vllm` and a deployment by what it measured, with nothing stored beforehand.

Stand-ins are only what cannot be here: a GPU of a strict NVML, the package vllm with its server. The step timer,
the profiling worker, wrapper, shim, daemon, controller, planner and gateway are the real ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.environments import environment_of
from tests.daemon.engines.standin import make_vllm, set_version
from tests.daemon.engines.vllm_releases import recorded
from tests.daemon.engines.vllm_sources import write_release
from tests.daemon.engines.vllm_stand_in import costs
from tests.golden_words import Golden

NVML = Path(__file__).parents[1] / "daemon" / "fake_nvml.py"
DEMO, LAYERS = "iserve-demo", 8
ENOUGH_S = "30"  # for all of a profile, also on a busy machine
WORK = ("--input-tokens", "48", "--output-tokens", "16", "--batch", "2")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return the environment in which the stand-in vLLM is installed."""
    make_vllm(tmp_path / "env")
    return tmp_path / "env"


@pytest.fixture
def home(tmp_path: Path, environment: Path, make_installation: Callable[..., Any]) -> Any:
    """A home on a node with one GPU and vLLM, nothing ever measured."""
    (tmp_path / "nvml").mkdir()
    (tmp_path / "nvml" / "pynvml.py").write_text(NVML.read_text() + "\ndel GPUS[1:]\n")
    python_path = os.pathsep.join(filter(None, (str(tmp_path / "nvml"), os.environ.get("PYTHONPATH"))))
    return make_installation(
        None,
        ISERVE_CPU_DEVICES="",
        ISERVE_VLLM_PYTHON=str(environment / "bin" / "python"),
        ISERVE_PROFILE_SECONDS="3",
        PYTHONPATH=python_path,
    )


def of_vllm(home: Any) -> list[str]:
    """Processes of the home that vLLM's own or our worker around it."""
    marks = ("iserve_profiling.vllm", "vllm.entrypoints", "spawn_main")
    return [line for line in home.processes().values() if any(mark in line for mark in marks)]


def test_a_deployment_takes_the_profile_that_is_missing_and_serves_by_it(
    home: Any, environment: Path, golden: Golden
) -> None:
    """A single way through the house; each step needs the one before."""
    home.settings["ISERVE_PROFILE_SECONDS"] = ENOUGH_S
    deployed = home.json("deploy", DEMO, "--engine", "vllm", "--name", "chat", *WORK)
    assert (deployed["status"], deployed["config"]["engine"]) == ("ready", "vllm")
    assert not [line for line in of_vllm(home) if "iserve_profiling.vllm" in line]
    assert [row["engine"] for row in home.get("/api/v1/profiles")] == ["vllm"]
    answer = home.openai().completions.create(model="chat", prompt="hello", max_tokens=8, temperature=0)
    assert answer.choices[0].text == "abcdefgh"
    packages = next((environment / "lib").glob("*/site-packages"))
    set_version(packages, "vllm", "0.25.1")
    replaced = home.run("verify", "chat", check=False).stderr.splitlines()[-1]
    golden("cli", replaced)
    assert home.get("/api/v1/verifications") == []
    set_version(packages, "vllm", "0.24.0")
    home.run("rm", "chat")
    assert of_vllm(home) == []

    asked = {"tp": 1, "pp": 1, "weights": "16bit", "kv": "16bit", "pruning": "none"}
    planned = home.json("plan", DEMO, "--engine", "vllm", *WORK)
    (measured,) = (c["estimate"] for c in planned["candidates"] if asked.items() <= c["config"].items())
    assert measured["ttft_s"]["source"] == "extrapolated"
    assert measured["tpot_s"]["value"] > 0
    weights = costs.OTHER_BYTES + LAYERS * costs.LAYER_BYTES  # as vLLM counts: the demo's own tensors are tiny
    held = weights + costs.ACTIVATION_BYTES + costs.CONTEXT_BYTES + costs.GRAPH_BYTES
    assert held <= measured["memory_bytes_per_gpu"] <= 1.1 * held


def test_a_gpu_that_no_table_has_is_planned_by_what_its_driver_says(home: Any, tmp_path: Path) -> None:
    """The stand-in vLLM has no torch, so that the benchmark fails: the driver's figures stand alone."""
    with (tmp_path / "nvml" / "pynvml.py").open("a") as file:
        file.write('\nGPUS[0].name = "NVIDIA Abacus"\n')
    deployed = home.json("deploy", DEMO, "--name", "chat", *WORK)
    assert (deployed["status"], deployed["config"]["engine"]) == ("ready", "vllm")
    ((_, device),) = [(row["engine"], row["machine"]["device"]) for row in home.get("/api/v1/profiles")]
    assert device["name"] == "NVIDIA Abacus"
    assert device["memory_bytes_per_s"] == pytest.approx(768e9, rel=0.01)  # the stand-in has an A6000's clocks
    logs = "".join(path.read_text() for path in (home.home / "logs").glob("*.log"))
    assert "gpu_bench gives no figures" in logs
    assert not (home.home / "gpus").exists()
    again = home.json("plan", DEMO, *WORK)  # its profile holds
    assert again["hardware"].startswith("1 x NVIDIA Abacus")


def test_a_pinned_release_serves_whichever_comes_first_until_it_is_unpinned(
    home: Any, environment: Path, until: Callable[..., Any], kill: Callable[[int], None]
) -> None:
    """Follow a deployment through its releases; the setting's 0.24.0 precedes the environments under the home."""
    other = environment_of(home.home, "vllm", "0.26.0")
    make_vllm(other.folder, "0.26.0")
    other.marker.write_text("{}")

    def started() -> tuple[str | None, str, bool]:
        """Return the serving worker's version by its spec and by its start, and whether 0.26 runs."""
        (worker_id,) = (replica["worker_id"] for replica in home.deployment("chat")["replicas"])
        folder = home.home / "workers" / worker_id
        running = [line for line in home.processes().values() if "vllm.entrypoints" in line]
        versions = dict(json.loads((folder / "versions.json").read_text()))
        version = json.loads((folder / "spec.json").read_text())["engine_version"]
        return version, versions["engine"], any(str(other.folder) in line for line in running)

    home.json("deploy", DEMO, "--engine", "vllm", "--name", "chat", *WORK)
    assert started() == ("0.24.0", "vllm 0.24.0", False)
    home.run("update", "chat", "--engine-version", "0.26")
    assert started() == ("0.26.0", "vllm 0.26.0", True)
    profiles = [dict(row["machine"]["versions"])["engine"] for row in home.get("/api/v1/profiles")]
    assert sorted(profiles) == ["vllm 0.24.0", "vllm 0.26.0"]
    until(lambda: len(home.worker_pids()) == 1, "the former worker has drained")
    ((worker_id, pid),) = home.worker_pids().items()
    kill(pid)
    until(lambda: home.worker_pids().get(worker_id) not in (None, pid), "the worker is started again")
    until(lambda: home.deployment("chat")["status"] == "ready", "it is ready again")
    assert started() == ("0.26.0", "vllm 0.26.0", True)
    home.run("update", "chat", "--engine-version", "newest")
    until(lambda: len(home.worker_pids()) == 1, "the former worker has drained")
    assert started() == ("0.24.0", "vllm 0.24.0", False)

    home.run("down")
    set_version(next((environment / "lib").glob("*/site-packages")), "vllm", "0.25.1")
    home.run("up")
    until(lambda: home.deployment("chat")["status"] == "ready", "it is planned anew, for what it ran on is gone")
    assert started() == ("0.25.1", "vllm 0.25.1", False)


def test_an_unknown_release_is_profiled_by_the_wall_clock_and_serves(home: Any, environment: Path) -> None:
    home.settings["ISERVE_PROFILE_SECONDS"] = ENOUGH_S
    packages = next((environment / "lib").glob("*/site-packages"))
    set_version(packages, "vllm", "0.34.0")
    write_release(recorded()["0.33.0"], packages / "vllm")
    deployed = home.json("deploy", DEMO, "--engine", "vllm", "--name", "chat", *WORK)
    assert (deployed["status"], deployed["config"]["engine"]) == ("ready", "vllm")
    (profile,) = home.get("/api/v1/profiles")
    assert dict(profile["machine"]["versions"])["engine"] == "vllm 0.34.0"
    assert {run["steps"] == [] for point in profile["timing"] for run in point["runs"]} == {True}
    (step,) = {point["max_batched_tokens"] for point in profile["memory"]}
    assert min(point["max_batch"] for point in profile["memory"]) >= 2
    command = next(line for line in home.processes().values() if "vllm.entrypoints" in line)
    assert f"--max-num-batched-tokens={step} " in command
    document = home.json("plan", DEMO, "--engine", "vllm", *WORK)
    chosen = document["candidates"][document["chosen"]]["estimate"]
    assert chosen["ttft_s"]["source"] == "extrapolated"
    answer = home.openai().completions.create(model="chat", prompt="hello", max_tokens=8, temperature=0)
    assert answer.choices[0].text == "abcdefgh"
    home.run("rm", "chat")
    assert of_vllm(home) == []


def test_an_engine_that_does_not_start_is_told_in_its_own_words_and_leaves_nothing(
    home: Any, environment: Path, golden: Golden
) -> None:
    words = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
    (environment / "behaviour.json").write_text(json.dumps({"start_error": words}))
    done = home.run("profile", DEMO, "--engine", "vllm", "--max-seconds", "3", check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    told = done.stderr.splitlines()[-1]
    golden("cli", told)
    assert of_vllm(home) == []
    assert home.get("/api/v1/profiles") == []

    (environment / "behaviour.json").unlink()
    assert home.json("profile", DEMO, "--engine", "vllm", "--max-seconds", "1")["engine"] == "vllm"


def test_an_engine_that_dies_at_a_point_costs_that_point(home: Any, environment: Path, golden: Golden) -> None:
    (environment / "behaviour.json").write_text(json.dumps({"no_memory_at_tokens": 300}))
    home.run("profile", DEMO, "--engine", "vllm", "--max-seconds", "120")
    assert of_vllm(home) == []
    assert [row["engine"] for row in home.get("/api/v1/profiles")] == ["vllm"]
    warnings = home.json("report", DEMO, "--engine", "vllm")["warnings"]
    failed = next(note for note in warnings if "batch 1 with 512 in failed" in note)
    assert "out of memory" in failed
    golden("cli", failed.partition(" failed: ")[0])


def test_ranks_alone_are_refused_by_an_engine_that_cannot_measure_them(home: Any, golden: Golden) -> None:
    """The option's way from the command line to what takes the profile; what it does there needs no process."""
    refused = home.run("profile", DEMO, "--engine", "torch", "--shards", "always", check=False)
    assert refused.returncode == 1
    golden("cli", refused.stderr)


def test_a_near_deployment_after_an_exact_one_measures_what_that_left_out(home: Any, tmp_path: Path) -> None:
    """Else its fp8 would be the 16 bits' times scaled by datasheets, because an exact one came first."""
    nvml = tmp_path / "nvml" / "pynvml.py"
    nvml.write_text(nvml.read_text().replace("NVIDIA RTX A6000", "NVIDIA H200"))  # a GPU with fp8
    home.settings["ISERVE_PROFILE_SECONDS"] = ENOUGH_S
    fp8 = {"tp": 1, "pp": 1, "weights": "fp8", "kv": "16bit", "pruning": "none"}

    def planned() -> tuple[str, list[str]]:
        plan = home.json("plan", DEMO, "--engine", "vllm", *WORK)
        (found,) = (c["estimate"] for c in plan["candidates"] if fp8.items() <= c["config"].items())
        return found["tpot_s"]["source"], [note for note in plan["notes"] if "taken for another request" in note]

    home.json("deploy", DEMO, "--engine", "vllm", "--quality", "exact", "--name", "exact", *WORK)
    home.run("rm", "exact")
    source, notes = planned()
    assert (source, len(notes)) == ("scaled", 1)
    assert "weights=fp8" in notes[0]
    assert home.json("deploy", DEMO, "--engine", "vllm", "--name", "near", *WORK)["status"] == "ready"
    assert planned() == ("extrapolated", [])
