"""What `iserve doctor` says of the engines and of a database: what each is, or why it is not there."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from iserve.cli.operate import Finding, examine
from iserve.settings import Settings, load_settings
from iserve.state.store import Store
from tests.daemon.engines.standin import make_vllm
from tests.iserve.postgres_server import PostgresServer

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


def test_a_database_is_told_to_be_there_or_not(postgres: PostgresServer, tmp_path: Path) -> None:
    def state(url: str | None) -> list[Finding]:
        found = examine(Settings(home=tmp_path, database_url=url), fix=False)
        return [finding for finding in found if "state" in finding.text]

    url = postgres.make_database()
    assert state(None) == []
    assert state(url) == [Finding(True, "state: PostgreSQL answers, nothing was ever kept there")]
    Store.open(url).close()
    assert state(url) == [Finding(True, "state: PostgreSQL answers")]
    (away,) = state("postgresql://iserve:secret@/no-such?host=/no-such-folder")
    assert not away.ok
    assert away.text.startswith("the state database cannot be read: ")
    assert "secret" not in away.text


def test_the_gateways_event_loop_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> Finding:
        (found,) = [f for f in examine(Settings(home=tmp_path), fix=False) if "event loop" in f.text]
        return found

    assert told() == Finding(True, f"gateway's event loop: uvloop {version('uvloop')}")
    monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not installed
    assert told().ok
    assert told().text.startswith("gateway's event loop: asyncio (uvloop cannot be loaded: ")
