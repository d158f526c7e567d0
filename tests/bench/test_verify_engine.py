"""The check of an engine that a user sends back: what it writes where the engine is, and where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.engines.tensorrt_environment import VARIABLE, make_tensorrt_llm

ROOT = Path(__file__).parents[2]
NVML = ROOT / "tests/daemon/fake_nvml.py"

pytestmark = pytest.mark.process


def check(folder: Path, *words: str, **env: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.bench.verify_engine", *words, "--out", str(folder / "found.json")]
    around = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(command, cwd=ROOT, env=around | env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads((folder / "found.json").read_bytes())


def test_without_the_engine_it_says_what_to_set(tmp_path: Path) -> None:
    status, found = check(tmp_path, "tensorrt-llm", "iserve-demo")
    steps = {step["name"]: step for step in found["steps"]}
    assert status == 1
    assert [(name, step["ok"]) for name, step in steps.items()] == [("installed", False), ("end", True)]
    assert VARIABLE in steps["installed"]["problem"]


@pytest.mark.long
def test_every_step_holds_on_the_stand_in(tmp_path: Path) -> None:
    """The engine's stand-in keeps to TensorRT-LLM's documentation, so that no step is tried first by a user."""
    make_tensorrt_llm(tmp_path / "env")
    (tmp_path / "nvml").mkdir()
    (tmp_path / "nvml/pynvml.py").write_text(NVML.read_text() + "\ndel GPUS[1:]\n")
    path = os.pathsep.join(filter(None, (str(tmp_path / "nvml"), os.environ.get("PYTHONPATH"))))
    status, found = check(
        tmp_path,
        "tensorrt-llm",
        "iserve-demo",
        "--max-seconds",
        "5",
        **{VARIABLE: str(tmp_path / "env/bin/python"), "PYTHONPATH": path},
    )
    assert [(step["name"], step["problem"]) for step in found["steps"]] == [
        (name, None) for name in ("installed", "profile", "deploy", "conformance", "accuracy", "end")
    ]
    assert status == 0
    (accuracy,) = (step["result"] for step in found["steps"] if step["name"] == "accuracy")
    assert {metric["name"] for metric in accuracy["metrics"]} >= {"ttft_s", "tpot_s"}
