"""A model with code of its own and one with towers, deployed on a stand-in vLLM: measured, served, updated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fingerprint.small_checkpoints import write_own
from tests.golden_words import Golden
from tests.iserve.test_e2e_vllm_profile import WORK, environment, home, of_vllm

__all__ = ["environment", "home"]


def test_own_code_is_measured_and_served_with_permission_only(
    home: Any,
    environment: Path,
    tmp_path: Path,
    until: Callable[..., Any],
    kill: Callable[[int], None],
    golden: Golden,
) -> None:
    """The steps depend on each other; the stand-in asks for permission as vLLM does."""
    folder = write_own(tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())  # as Kimi K2: a class of vLLM's under another name
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    asked = ("--engine", "vllm", "--name", "chat", *WORK)

    refused = home.run("deploy", str(folder), *asked, check=False)
    assert refused.returncode != 0
    golden("cli", refused.stderr)
    refused = home.run("profile", str(folder), "--engine", "vllm", check=False)
    golden("cli", refused.stderr)
    assert (home.json("ps"), home.get("/api/v1/profiles"), of_vllm(home)) == ([], [], [])

    home.run("register", "mine", str(folder))
    deployed = home.run("deploy", "mine", *asked, "--trust-remote-code")
    golden("cli", deployed.stderr.splitlines()[0])
    assert [row["engine"] for row in home.get("/api/v1/profiles")] == ["vllm"]
    assert [line for line in of_vllm(home) if "--trust-remote-code" in line]

    (worker_id,) = home.worker_pids()
    before = home.worker_pids()[worker_id]
    kill(before)
    until(lambda: home.worker_pids().get(worker_id) not in (None, before), "the worker is started again")
    assert [line for line in of_vllm(home) if "--trust-remote-code" in line]
    until(lambda: home.deployment("chat")["status"] == "ready", "it is ready again")
    home.run("update", "chat", "--batch", "1")
    home.run("register", "mine", str(write_own(tmp_path / "other")))
    refused = home.run("update", "chat", "--batch", "2", check=False)
    assert all(str(path) in refused.stderr for path in (folder, tmp_path / "other"))
    golden("cli", refused.stderr)
    assert [line for line in of_vllm(home) if "--trust-remote-code" in line]
    home.run("rm", "chat")

    (environment / "behaviour.json").write_text(json.dumps({"token_s": 0.02}))  # above a busy machine's noise
    check = ("verify", str(folder), "--engine", "vllm", *WORK, "--max-seconds", "8")
    refused = home.run(*check, check=False)
    golden("cli", refused.stderr)
    assert (home.get("/api/v1/verifications"), of_vllm(home)) == ([], [])
    checked = home.run(*check, "--trust-remote-code")
    golden("cli", checked.stderr.splitlines()[0])
    assert [row["engine"] for row in home.get("/api/v1/verifications")] == ["vllm"]
    assert not (folder / "ran").exists()
