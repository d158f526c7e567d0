"""The tour of docs/rest.md: each block runs as it is written, in one shell, against a real controller."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.iserve.forked_programs import COMMAND

PAGE = Path(__file__).parents[2] / "docs/rest.md"
STEPS = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
ADDRESS = "http://127.0.0.1:8081"  # of a home with default settings; the test's home takes a free port


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="the tour needs curl and jq")
def test_the_tour_runs_as_it_is_written(shared_home: Any) -> None:
    shared_home.run("up")
    assert STEPS[0].count(ADDRESS) == 1
    script = "\necho '--'\n".join(STEPS).replace(ADDRESS, shared_home.record("controller").url)
    environment = shared_home.environment
    environment["PATH"] = f"{COMMAND.parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{shared_home.logs()}"
    _, plan, deployed, shown, answer, updated, removed = done.stdout.split("--\n")
    assert plan.startswith("iserve-demo on ")
    assert deployed == "accepted\n"
    assert '"status": "ready"' in shown
    assert answer == "579\n"
    assert updated.startswith("true\n")
    assert "update" in updated.splitlines()[-1]
    assert removed == "removing\n0\n"
    assert re.fullmatch(r"id key-\w+, scope admin; .*\n", done.stderr)
