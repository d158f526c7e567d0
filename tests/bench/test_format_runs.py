"""Runs of formats: each records by itself, whatever ends the run, and no engine outlives it.

The engine is the stand-in vLLM behind the real profiling worker; the GPU's driver is a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from fingerprint.config import WeightFormat
from tests.bench.accuracy import load
from tests.bench.format_runs import main
from tests.daemon.engines.standin import make_vllm
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
SMI = """#!/bin/sh
case "$1" in
*memory.total*) echo 49140 ;;
*) echo "NVIDIA RTX A6000, 580.1" ;;
esac
"""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Small-1B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Return the Python of an environment with the stand-in vLLM, and what a GPU machine has of ours."""
    found = make_vllm(tmp_path / "env", "0.33.0")
    (packages,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (packages / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind the stand-ins
    return str(found)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name in ("bin", "tmp"):
        (tmp_path / name).mkdir()
    smi = tmp_path / "bin/nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}


def of_the_run(tmp_path: Path) -> list[int]:
    """Return the processes that have the run's environment."""
    mark, found = f"TMPDIR={tmp_path / 'tmp'}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.process
def test_each_format_is_recorded_as_it_was_asked_for(
    model: Path, python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [python, "-m", "tests.bench.format_runs", str(out), str(model), "gptq", "fp8"]
    run = subprocess.run(
        [*command, "--most-prompt-tokens", "128", "--seconds", str(PATIENCE_S)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S + 60,
    )  # fmt: skip
    assert run.stdout.splitlines()[-1] == "measured: gptq, fp8; not measured: none", run.stdout + run.stderr
    found = {one.model: one for one in load(out)}
    assert {name: one.weights for name, one in found.items()} == {
        "Small-1B-gptq": WeightFormat.STORED,
        "Small-1B-fp8": WeightFormat.FP8,
    }
    stored = found["Small-1B-gptq"].profile.spec.stored
    assert stored is not None
    assert (stored.method, found["Small-1B-fp8"].profile.spec.stored) == ("gptq", None)
    assert {point.num_layers for point in found["Small-1B-gptq"].profile.memory} == {1, 2}
    assert "exit status 0" in run.stdout
    assert of_the_run(tmp_path) == []


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_keeps_what_it_has_and_leaves_no_process(
    signum: signal.Signals, model: Path, python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [python, "-m", "tests.bench.format_runs", str(out), str(model), "gptq", "awq", "w4a16"]
    run = subprocess.Popen(
        [*command, "--most-prompt-tokens", "128"],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: list(out.glob("*-gptq-*.json.xz")), "the first format is recorded")
        worker = "iserve_profiling.vllm"
        wait_until(lambda: any(worker in line for line in commands(tmp_path)), "the second one's engine runs")
    finally:
        run.send_signal(signum)
        run.wait(PATIENCE_S)
    wait_until(lambda: not of_the_run(tmp_path), "every process has ended")
    assert "Small-1B-gptq" in {one.model for one in load(out)}
    assert not list(out.glob("*w4a16*.json.xz"))


def commands(tmp_path: Path) -> list[str]:
    found = []
    for pid in of_the_run(tmp_path):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text())
    return found


def test_a_format_that_the_model_does_not_run_in_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), str(model), "mxfp4"])
    assert not (tmp_path / "out").exists()
