"""README.md's commands, run as they are written in one shell, with the bundled model as ``./my-model``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from iserve.demo import demo_model_path
from tests.iserve.forked_programs import COMMAND

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(after: str) -> str:
    """Return the first indented block behind ``after``."""
    found = re.search(r"(?:^    .*\n)+", README.partition(after)[2], re.MULTILINE)
    assert found
    return found[0]


def test_the_commands_of_the_readme_do_what_they_say(shared_home: Any, tmp_path: Path) -> None:
    shutil.copytree(demo_model_path(), tmp_path / "my-model")
    environment = shared_home.environment
    environment["PATH"] = f"{COMMAND.parent}:{environment['PATH']}"
    script = block("# iServe\n") + "iserve rm my-model\n" + block("## Use\n")
    assert script.count("iserve ") >= 13
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{shared_home.logs()}"
    for said in ("my-model is ready", "chat is ready", "TTFT", "chat is updated"):
        assert said in done.stdout, said
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert shared_home.processes() == {}
