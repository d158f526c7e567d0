"""Plug-in of deltas in vLLM's own LoRA code, which runs on a CPU in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    name
    for file in sorted((Path(__file__).parent / "vllm_delta_cases").glob("*.py"))
    for name in re.findall(r"^@case\ndef (\w+)", file.read_text(), re.MULTILINE)
]
SITE = os.environ.get("ISERVE_VLLM_SITE", "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not SITE, reason="ISERVE_VLLM_SITE names no folder with vLLM 0.33.0 and the Python of its dependencies"
    ),
]


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """Return what failed in each case; empty: nothing did."""
    command = (sys.executable, "-m", "tests.daemon.engines.vllm_deltas_on_cpu", SITE)
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["case"]: line["error"] for line in lines}


def test_there_are_cases() -> None:
    assert len(CASES) >= 8


@pytest.mark.parametrize("name", CASES)
def test_in_vllms_own_code(errors: dict[str, str], name: str) -> None:
    assert errors[name] == ""
