"""What `iserve doctor` says of the engines: what each is, or why it is not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from iserve.cli.operate import Finding, examine
from iserve.settings import load_settings
from tests.daemon.engines.standin import make_vllm

NAMES = ("ISERVE_VLLM_PYTHON", "ISERVE_TENSORRT_LLM_PYTHON")


def engines(monkeypatch: pytest.MonkeyPatch, home: Path, **settings: object) -> dict[str, Finding]:
    """By engine, with only these settings made."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("ISERVE_HOME", str(home))
    found = examine(load_settings(), fix=False)
    return {f.text.split()[1].rstrip(":"): f for f in found if f.text.startswith("engine ")}


def test_an_engine_that_nobody_set_up_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = engines(monkeypatch, tmp_path)
    assert set(found) == {"torch", "vllm", "tensorrt-llm"}
    assert all(finding.ok for finding in found.values())
    assert sys.executable in found["torch"].text
    assert "transformers" in found["torch"].text
    assert found["vllm"].text.endswith("set ISERVE_VLLM_PYTHON to the Python of an environment that has it")


def test_one_that_is_set_up_is_told_with_version_and_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_vllm(tmp_path / "env", "0.23.1")
    found = engines(monkeypatch, tmp_path, ISERVE_VLLM_PYTHON=python)["vllm"]
    assert found.ok
    assert found.text.startswith("engine vllm: vllm 0.23.1")
    assert f"for {python}" in found.text


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.19.0", "vllm 0.19.0 of .* is not one that iServe knows"),
        (None, "is not installed for ISERVE_VLLM_PYTHON="),
    ],
)
def test_a_setting_that_leads_nowhere_is_a_problem(
    version: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = sys.executable if version is None else make_vllm(tmp_path / "env", version)
    found = engines(monkeypatch, tmp_path, ISERVE_VLLM_PYTHON=python)["vllm"]
    assert not found.ok
    assert re.search(reason, found.text)
