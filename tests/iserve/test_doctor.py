"""Findings of `iserve doctor`: engines and databases, what each is or why it is absent; workers left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from daemon.engines.registry import ENGINES
from daemon.interconnect import measure_links
from daemon.lease import LEASE_FILE, Lease, write_file
from iserve.cli.home_checks import Finding, examine
from iserve.settings import Settings, load_settings
from iserve.state.store import Store
from tests.daemon.conftest import Node
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_releases import recorded
from tests.daemon.engines.vllm_sources import write_release
from tests.daemon.test_interconnect import FOUND, saying
from tests.daemon.test_unlisted_gpus import python_that
from tests.golden_words import Golden
from tests.iserve.postgres_server import PostgresServer

NAMES = ("ISERVE_VLLM_PYTHON", "ISERVE_TENSORRT_LLM_PYTHON")


def engines(monkeypatch: pytest.MonkeyPatch, home: Path, **settings: object) -> dict[str, Finding]:
    """Return findings by engine, with only these settings made."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("ISERVE_HOME", str(home))
    found = examine(load_settings(), fix=False)
    return {f.text.split()[1].rstrip(":"): f for f in found if f.text.startswith("engine ")}


def test_an_engine_that_nobody_set_up_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    found = engines(monkeypatch, tmp_path)
    assert found.keys() == ENGINES.keys()
    assert all(finding.ok for finding in found.values())
    assert sys.executable in found["torch"].text
    assert "transformers" in found["torch"].text
    verdicts = {"torch": "ok", "vllm": "absent", "tensorrt-llm": "absent"}
    assert {name: found[name].verdict for name in verdicts} == verdicts
    golden("cli", found["vllm"].text)


def test_one_that_is_set_up_is_told_with_version_and_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_vllm(tmp_path / "env", "0.26.1")
    found = engines(monkeypatch, tmp_path, ISERVE_VLLM_PYTHON=python)["vllm"]
    assert found.ok
    assert found.text.startswith("engine vllm: vllm 0.26.1")
    assert f"for {python}" in found.text


@pytest.mark.parametrize(("version", "unknown"), [("0.33.0", False), ("0.28.0", False), ("0.34.0", True)])
def test_an_unknown_release_is_told_in_its_line(
    version: str, unknown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    python = make_vllm(tmp_path / "env", version)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    write_release(recorded()["0.33.0"], packages / "vllm")
    found = engines(monkeypatch, tmp_path, ISERVE_VLLM_PYTHON=python)["vllm"]
    assert found.ok
    assert ("no release that" in found.text) is unknown
    assert "\n" not in found.text
    golden.hide(python, "ENV")
    golden("cli", found.text)


@pytest.mark.parametrize(
    "version",
    [
        "0.19.0",
        None,
    ],
)
def test_a_setting_that_leads_nowhere_is_a_problem(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    python = sys.executable if version is None else make_vllm(tmp_path / "env", version)
    found = engines(monkeypatch, tmp_path, ISERVE_VLLM_PYTHON=python)["vllm"]
    assert found.verdict == "PROBLEM"
    golden("cli", found.text)


def test_a_database_is_told_to_be_there_or_not(postgres: PostgresServer, tmp_path: Path, golden: Golden) -> None:
    def state(url: str | None) -> list[Finding]:
        found = examine(Settings(home=tmp_path, database_url=url), fix=False)
        return [finding for finding in found if "state" in finding.text]

    url = postgres.make_database()
    assert state(None) == []
    (empty,) = state(url)
    assert empty.ok
    golden("cli", empty.text)
    Store.open(url).close()
    assert state(url) == [Finding(True, "state: PostgreSQL answers")]
    (away,) = state("postgresql://iserve:secret@/no-such?host=/no-such-folder")
    assert not away.ok
    golden("cli", away.text.partition(": ")[0])  # what follows are PostgreSQL's words
    assert "secret" not in away.text


def test_the_gateways_event_loop_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    def told() -> Finding:
        (found,) = [f for f in examine(Settings(home=tmp_path), fix=False) if "event loop" in f.text]
        return found

    assert told().ok
    assert told().text.endswith(f"uvloop {version('uvloop')}")
    monkeypatch.setitem(sys.modules, "uvloop", None)  # as if it were not installed
    assert told().ok
    golden("cli", told().text)


@pytest.mark.parametrize("fix", [False, True])
def test_a_stale_lease_whose_id_is_another_programs_now_is_no_worker(
    fix: bool, tmp_path: Path, golden: Golden
) -> None:
    """After a reboot, or a container's restart on a volume; nothing of that program is ended."""
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        folder = tmp_path / "workers" / "old-1"
        folder.mkdir(parents=True)
        lease = Lease(
            worker_id="old-1",
            pid=stranger.pid,
            start_time_ticks=1,
            shim_pid=stranger.pid,
            shim_start_time_ticks=1,
            port=1,
            config_hash="",
            started_at=1.0,
            lease_ttl_s=600.0,
        )
        write_file(folder / LEASE_FILE, lease)
        found = [f for f in examine(Settings(home=tmp_path), fix=fix) if f.text.startswith("worker")]
        assert [finding.ok for finding in found] == [True]
        golden("cli", found[0].text)
        assert stranger.poll() is None
    finally:
        os.killpg(stranger.pid, signal.SIGKILL)
        stranger.wait()


def links(home: Path) -> list[Finding]:
    return [finding for finding in examine(Settings(home=home), fix=False) if finding.text.startswith("links")]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    node = Node(tmp_path / "home")
    try:
        yield node
    finally:
        node.clear()


@pytest.mark.process
def test_links_between_gpus_are_measured_or_not_yet(node: Node, tmp_path: Path, golden: Golden) -> None:
    node.offer_gpus(tmp_path / "driver")
    node.start(cpu_devices=None)
    (absent,) = links(node.home)
    assert absent.verdict == "absent"
    golden("cli", absent.text)
    measure_links(node.client.node(), python_that(tmp_path, saying(FOUND)))
    (measured,) = links(node.home)
    assert measured.verdict == "ok"
    golden("cli", measured.text.rpartition(",")[0])  # its end is the day


@pytest.mark.process
def test_shares_of_a_cpu_have_no_links(node: Node) -> None:
    assert links(node.home) == []
    node.start()
    assert len(node.client.node().devices) == 2
    assert links(node.home) == []
