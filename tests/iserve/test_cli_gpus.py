"""Plans for GPUs that need not be here, on the command line: AMD's, and those that a file describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.status import DeviceStatus, NodeStatus
from fingerprint.families import load_spec
from iserve.controller import engine_selection
from iserve.demo import demo_model_path
from planner.intent import Quality
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve

__all__ = ["iserve"]  # a fixture

Iserve = Callable[..., Done]
MINE = {
    "name": "rtx-6000-ada",
    "memory_mib": 49140,
    "memory_gb_per_s": 960,
    "tflops_16bit": 364.2,
    "tflops_fp8": 728.5,
    "compute_capability": "8.9",
    "usd_per_gpu_hour": 0.83,
}
MODEL = str(demo_model_path())


@pytest.fixture
def gpu_file(tmp_path: Path) -> str:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(MINE))
    return str(path)


def words(done: Done) -> str:
    """Return its output with a space between words, wherever lines were broken."""
    return " ".join((done.out + done.err).split())


def test_a_plan_for_amd_says_that_it_is_not_deployed(iserve: Iserve, golden: Golden) -> None:
    plan = iserve("plan", MODEL, "--gpus", "mi300x:2", "--json").document
    assert plan["candidates"]
    assert {one["config"]["engine"] for one in plan["candidates"]} == {"vllm"}
    (line,) = plan["verdict"]["deployable"]["missing"]
    assert not plan["verdict"]["deployable"]["here"]
    golden("cli", line)
    assert f"no: {line}" in words(iserve("plan", MODEL, "--gpus", "mi300x:2"))
    assert f"no: {line}" in words(iserve("estimate", MODEL, "--gpu", "mi355x"))


@pytest.mark.parametrize("engine", ["torch", "tensorrt-llm"])
def test_an_engine_that_amd_gpus_do_not_run_is_refused(iserve: Iserve, engine: str, golden: Golden) -> None:
    out = iserve("plan", MODEL, "--gpus", "mi300x", "--engine", engine, "--refused").out
    golden("cli", sorted({line.rpartition("  ")[2] for line in out.splitlines() if "AMD" in line}))


def test_nothing_is_exported_for_amd(iserve: Iserve, tmp_path: Path, golden: Golden) -> None:
    output = tmp_path / "compose.yaml"
    export = ("deploy", MODEL, "--export", "compose", "--gpus", "mi300x:2", "-o", str(output))
    golden("cli", iserve(*export).line)
    assert not output.exists()
    golden("cli", iserve("plan", MODEL, "--gpus", "mi300x:2", "--as", "vllm").line)


def test_a_described_gpu_is_planned_for(iserve: Iserve, gpu_file: str) -> None:
    plan = iserve("plan", MODEL, "--gpus", "rtx-6000-ada:2", "--gpu-file", gpu_file, "--json").document
    assert plan["hardware"] == "2 x rtx-6000-ada"
    assert iserve("plan", MODEL, "--gpu-file", gpu_file, "--json").document["hardware"] == "1 x rtx-6000-ada"
    assert iserve("estimate", MODEL, "--gpu-file", gpu_file, "--json").document["gpu"] == "rtx-6000-ada"
    assert "services:" in iserve("plan", MODEL, "--gpu-file", gpu_file, "--as", "compose").out


def test_a_described_gpu_is_simulated_and_reported(iserve: Iserve, gpu_file: str, tmp_path: Path) -> None:
    load = ("synthetic:azure-conv", "--models", f"a={MODEL}", "--limit", "3", "--json")
    there = ("--gpus", "rtx-6000-ada:2", "--gpu-file", gpu_file)
    assert iserve("simulate", *load, *there).document["hardware"] == "2 x rtx-6000-ada"
    page = tmp_path / "page.md"
    assert "1 x rtx-6000-ada" in words(iserve("report", MODEL, "--gpu-file", gpu_file, "-o", str(page)))
    assert "rtx-6000-ada" in page.read_text()


def test_a_deploy_beside_amd_gpus_says_that_they_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    cpu = DeviceStatus(
        device_id="cpu:0",
        index=0,
        kind="cpu",
        name="AMD EPYC 9575F",
        total_bytes=2**36,
        free_bytes=2**36,
        load_fraction=0.0,
    )
    node = NodeStatus(node_id="n", observed_at=0.0, devices=(cpu,), workers=())
    spec = load_spec(demo_model_path())
    for count in (0, 8):
        monkeypatch.setattr(engine_selection, "count_amd_gpus", lambda count=count: count)
        engine, told = engine_selection.engine_for("auto", spec, node, Quality.NEAR)
        assert (engine.name, len(told)) == ("torch", count > 0)
    golden("cli", told)


def refused(done: Done, what: str = "") -> str:
    assert done.code == 2
    assert "Traceback" not in done.err
    assert what in words(done)
    return done.err


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("plan", MODEL, "--gpus", "h200:2"), id="plan"),
        pytest.param(("estimate", MODEL, "--gpu", "h200"), id="estimate"),
        pytest.param(("plan", MODEL, "--gpus", "rtx-6000-ada:0"), id="none"),
        pytest.param(("deploy", MODEL), id="deploy"),
    ],
)
def test_a_file_that_does_not_fit_the_other_options(
    iserve: Iserve, arguments: tuple[str, ...], gpu_file: str, golden: Golden
) -> None:
    golden("cli-usage-errors", refused(iserve(*arguments, "--gpu-file", gpu_file)))


@pytest.mark.parametrize("command", ["plan", "estimate", "report"])
def test_a_file_with_a_wrong_field_is_a_usage_error(iserve: Iserve, command: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(MINE | {"memory_gbps": 960}))
    refused(iserve(command, MODEL, "--gpu-file", path), "did you mean memory_gb_per_s?")
    refused(iserve(command, MODEL, "--gpu-file", tmp_path / "none.json"), "No such file")


def test_an_estimate_and_a_simulation_need_a_gpu(iserve: Iserve) -> None:
    refused(iserve("estimate", MODEL), "--gpu-file")
    refused(iserve("simulate", "synthetic:azure-conv", "--models", MODEL), "--gpu-file")


def test_an_unknown_gpu_is_told_of_the_file(iserve: Iserve) -> None:
    told = iserve("plan", MODEL, "--gpus", "mi300:8")
    refused(told, "did you mean mi300x:8?")
    refused(told, "--gpu-file describes another")
